"""A gRPC client that knows nothing but an address. No call of a load has a deadline: what hangs must be seen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from scripts.benchmarks.emberline_client import loopback
from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite.history import Ask, Call, Message, Status

PACKAGE = "emberline.v1"
GENERATE = f"{PACKAGE}.InferenceService/Generate"
INFO_LIMIT_S = 30.0
"""For calls that are not under test, so that the suite itself ends."""
RETRY_S_MAX = 2.0
"""A refused ask is sent again after its pushback, or after this if that is longer: more tries, more chances to see one
answered wrongly."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # a retried call would hide a failure
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
]


class Protocol:
    """Message classes, as the server's reflection tells them. They outlive the connection they were learned by."""

    def __init__(self, address: str) -> None:
        """Blocks for a moment: from another thread than the loop's."""
        with grpc.insecure_channel(loopback(address), options=OPTIONS) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            self._methods = {}
            for service in sorted(database.get_services()):
                if service.startswith(f"{PACKAGE}."):
                    for method in pool.FindServiceByName(service).methods:
                        self._methods[f"{service}/{method.name}"] = (
                            message_factory.GetMessageClass(method.input_type),
                            message_factory.GetMessageClass(method.output_type),
                            method.server_streaming,
                        )
            reasons = pool.FindEnumTypeByName(f"{PACKAGE}.FinishReason").values_by_number
            self._finish_reasons = {
                number: value.name.removeprefix("FINISH_REASON_") for number, value in reasons.items()
            }

    def request(self, path: str, **fields: Any) -> ProtoMessage:
        """The request of a method, from protojson fields."""
        return json_format.ParseDict(fields, self._methods[_full(path)][0]())

    def stub(self, channel: grpc.aio.Channel, path: str) -> Callable[..., Any]:
        """The callable of a method."""
        _, response, is_streaming = self._methods[_full(path)]
        make = channel.unary_stream if is_streaming else channel.unary_unary
        stub: Callable[..., Any] = make(
            "/" + _full(path),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return stub

    def message(self, response: Any, at_s: float) -> Message:
        """A GenerateResponse, written down."""
        return Message(
            at_s=at_s,
            text=response.text,
            token_ids=tuple(token.id for token in response.tokens),
            index=response.index,
            has_prompt=response.HasField("prompt"),
            finish_reason=self._finish_reasons[response.finish.reason] if response.HasField("finish") else None,
            usage_completion=response.usage.completion if response.HasField("usage") else None,
        )


class Client:
    """One caller: one connection, shared by all its calls."""

    def __init__(self, channel: grpc.aio.Channel, protocol: Protocol) -> None:
        self._channel = channel
        self.protocol = protocol
        self._generate = protocol.stub(channel, GENERATE)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def attempt(self, call: Call) -> Call:
        """Send the ask once and write down what comes. Ends when the call does, or its client leaves; if the task is
        cancelled, the history stays as it is: open.
        """
        leave_after = call.ask.leave_after_tokens
        num_tokens = 0
        call.sent_s = time.monotonic()
        rpc = self._generate(self.protocol.request(GENERATE, **call.ask.fields))
        try:
            if leave_after == 0:
                await asyncio.sleep(0.01)  # it is on its way
                call.left_s = time.monotonic()
                rpc.cancel()
            async for response in rpc:
                message = self.protocol.message(response, time.monotonic())
                call.messages.append(message)
                num_tokens += len(message.token_ids)
                if leave_after is not None and num_tokens >= leave_after and call.left_s is None:
                    call.left_s = message.at_s
                    rpc.cancel()
            status = Status((await rpc.code()).name)
        except grpc.aio.AioRpcError as error:
            status = status_of(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio raises this where we cancelled the call ourselves; anywhere else it is no end that is allowed.
            status = Status("CANCELLED", message="by the client's own library")
        finally:
            rpc.cancel()
        call.ended_s = time.monotonic()
        call.status = status
        return call

    async def attempt_until_taken(self, ask: Ask, calls: list[Call]) -> Call:
        """As a client library does: refused with a pushback, wait and send it again. Every attempt is in `calls`."""
        while True:
            call = Call(ask, time.monotonic())
            calls.append(call)
            await self.attempt(call)
            if not call.is_refusal:
                return call
            assert call.status is not None
            await asyncio.sleep(min((call.status.pushback_ms or 0) / 1000, RETRY_S_MAX))

    async def unary(self, path: str, **fields: Any) -> Any:
        """One call that is not under test. Raises BenchmarkError if it fails."""
        try:
            stub = self.protocol.stub(self._channel, path)
            return await stub(self.protocol.request(path, **fields), timeout=INFO_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"{path} failed: {status_of(error).name}: {error.details()}") from None

    async def check(self, service: str = "readiness") -> str:
        """Health as a probe sees it; `UNREACHABLE` if nobody answers."""
        try:
            response = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=INFO_LIMIT_S)
        except grpc.aio.AioRpcError:
            return "UNREACHABLE"
        return _state(response)

    @asynccontextmanager
    async def watch(self, service: str = "readiness") -> AsyncIterator[list[tuple[float, str]]]:
        """What a Watch tells while the block runs: (moment, state)."""
        states: list[tuple[float, str]] = []
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=service))

        async def collect() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in call:
                    states.append((time.monotonic(), _state(response)))  # noqa: PERF401 readers look meanwhile
            states.append((time.monotonic(), "ENDED"))

        task = asyncio.create_task(collect())
        try:
            yield states
        finally:
            call.cancel()
            task.cancel()
            await asyncio.wait([task])


def _state(response: Any) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def status_of(error: grpc.aio.AioRpcError) -> Status:
    """Its code, reason, death and pushback."""
    reason, death_id, pushback_ms = "", "", None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-retry-pushback-ms":
            pushback_ms = int(value)
        elif key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    reason, death_id = info.reason, info.metadata.get("death_id", "")
    return Status(error.code().name, reason, death_id, pushback_ms, error.details() or "")


@asynccontextmanager
async def connect(address: str, protocol: Protocol | None = None) -> AsyncIterator[Client]:
    """A client with a connection of its own. Refuses anything but the loopback interface."""
    if protocol is None:
        protocol = await asyncio.to_thread(Protocol, address)
    async with grpc.aio.insecure_channel(loopback(address), options=OPTIONS) as channel:
        yield Client(channel, protocol)


def _full(path: str) -> str:
    return path if path.startswith(PACKAGE) else f"{PACKAGE}.{path}"
