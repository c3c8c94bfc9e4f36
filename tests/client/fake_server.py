"""A server that does what a test tells it: in this process, on gRPC's own server, with google's own error details.

Its model counts: output token i is FIRST_TOKEN + i, whatever the prompt, and its text is one token late, as with a stop
string in sight: what has been sent after k tokens is the text of k − 1, and the rest comes with the finish. So a stream
that goes on must get what the first attempt held back, as from the real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from emberline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

FIRST_TOKEN = 1000
SEED = 2**63 + 11
PROMPT_TOKENS = 7
LIMIT_S = 30.0
"""Against hanging."""
INFERENCE = "emberline.v1.InferenceService"


def word(position: int) -> str:
    """The text of an output token."""
    return f"w{position} "


@dataclass(frozen=True)
class End:
    """How an attempt ends badly."""

    code: grpc.StatusCode
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    pushback_ms: int | str | None = None
    violations: tuple[tuple[str, str], ...] = ()

    def abort(self, context: grpc.ServicerContext) -> None:
        status = status_pb2.Status(code=self.code.value[0], message="told to")
        details: list[Any] = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain="emberline", metadata=self.metadata))
        if self.violations:
            fields = [{"field": name, "description": text} for name, text in self.violations]
            details.append(error_details_pb2.BadRequest(field_violations=fields))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
        if self.pushback_ms is not None:
            trailers.append(("grpc-retry-pushback-ms", str(self.pushback_ms)))
        context.set_trailing_metadata(tuple(trailers))
        context.abort(self.code, "told to")


@dataclass(frozen=True)
class Attempt:
    """What one call of Generate or Complete comes to."""

    num_tokens: int | None = None
    """Tokens until `end`; None: all."""
    end: End | None = None
    """None with `num_tokens`: it simply stops there, with OK."""
    hang: bool = False
    """After the tokens, wait until the caller leaves."""
    prompt_tokens: int = PROMPT_TOKENS


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer,
    info_pb2_grpc.InfoServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
    tokenizer_pb2_grpc.TokenizerServiceServicer,
):
    """Enter it to start it. Each call takes the next of `attempts`; when they are used up, calls end well."""

    def __init__(
        self,
        *attempts: Attempt,
        serving: bool = True,
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.arrivals_s: list[float] = []
        self.left = threading.Event()
        """A caller has left its call."""
        self.hanging = threading.Event()
        self.info = info_pb2.GetServerInfoResponse(version="9.9")
        self.load = info_pb2.GetLoadResponse()
        self._attempts = list(attempts)
        self._lock = threading.Lock()
        self._health = health.HealthServicer()
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        info_pb2_grpc.add_InfoServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_serving(serving)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(0).wait(LIMIT_S)

    def set_serving(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        self._health.set(INFERENCE, states.SERVING if serving else states.NOT_SERVING)

    @property
    def num_calls(self) -> int:
        return len(self.requests)

    def Generate(  # noqa: N802 - the protocol's name
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        attempt = self._arrive(request, context)
        if attempt.hang and not context.add_callback(self.left.set):
            self.left.set()  # it has left already
        yield from self._answer(request, attempt)
        if attempt.hang:
            self.hanging.set()
            self.left.wait(LIMIT_S)
        if attempt.end is not None:
            attempt.end.abort(context)

    def Complete(  # noqa: N802 - the protocol's name
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CompleteResponse:
        attempt = self._arrive(request, context)
        if attempt.hang:
            if not context.add_callback(self.left.set):
                self.left.set()
            self.hanging.set()
            self.left.wait(LIMIT_S)
        if attempt.end is not None:
            attempt.end.abort(context)
        response = inference_pb2.CompleteResponse(request_id="whole")
        completion = response.completions.add()
        for message in self._answer(request, attempt):
            completion.text += message.text
            completion.tokens.extend(message.tokens)
            for name in ("prompt", "usage"):
                if message.HasField(name):
                    getattr(response, name).CopyFrom(getattr(message, name))
            if message.HasField("finish"):
                completion.finish.CopyFrom(message.finish)
        return response

    def GetServerInfo(  # noqa: N802 - the protocol's name
        self, request: info_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> info_pb2.GetServerInfoResponse:
        return self.info

    def GetLoad(  # noqa: N802 - the protocol's name
        self, request: info_pb2.GetLoadRequest, context: grpc.ServicerContext
    ) -> info_pb2.GetLoadResponse:
        return self.load

    def GetModelInfo(  # noqa: N802 - the protocol's name
        self, request: info_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> info_pb2.GetModelInfoResponse:
        return info_pb2.GetModelInfoResponse(model=request.model or "served")

    def Tokenize(  # noqa: N802 - the protocol's name
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        """As many ids as characters, or turns."""
        count = len(request.text) if request.HasField("text") else len(request.chat.messages)
        special = request.encode.add_special_tokens if request.HasField("encode") else True
        pieces = ["p"] * count if request.with_pieces else []
        return tokenizer_pb2.TokenizeResponse(ids=range(count + special), pieces=pieces, max_prompt_tokens=99)

    def Detokenize(  # noqa: N802 - the protocol's name
        self, request: tokenizer_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.DetokenizeResponse:
        skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else None
        return tokenizer_pb2.DetokenizeResponse(text=f"{list(request.ids)} {skips}")

    def Abort(  # noqa: N802 - the protocol's name
        self, request: admin_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AbortResponse:
        """Those that begin with `live`."""
        results = [{"request_id": name, "aborted": name.startswith("live")} for name in request.request_ids]
        return admin_pb2.AbortResponse(results=results)

    def Drain(  # noqa: N802 - the protocol's name
        self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainResponse:
        """Tells the grace in milliseconds; 7 where there is none."""
        grace = request.grace.ToMilliseconds() if request.HasField("grace") else 7
        return admin_pb2.DrainResponse(live_requests=grace)

    def _arrive(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Attempt:
        with self._lock:
            self.requests.append(request)
            self.metadata.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
            self.arrivals_s.append(time.monotonic())
            return self._attempts.pop(0) if self._attempts else Attempt()

    def _answer(
        self, request: inference_pb2.GenerateRequest, attempt: Attempt
    ) -> Iterator[inference_pb2.GenerateResponse]:
        first = len(request.resume_token_ids)
        cached = 5 if first else 3
        last = request.stopping.max_tokens or 10
        stop = last if attempt.num_tokens is None else min(last, first + attempt.num_tokens)
        for position in range(first, stop):
            message = inference_pb2.GenerateResponse(request_id=request.request_id or "made")
            message.text = word(position - 1) if position else ""
            if request.output.token_ids:
                message.tokens.add(id=FIRST_TOKEN + position)
            if position == first:
                message.prompt.count = attempt.prompt_tokens
                message.prompt.cached = cached
                message.prompt.seed = request.sampling.seed if request.sampling.HasField("seed") else SEED
            if position == last - 1:
                message.text += word(position)
                message.finish.reason = inference_pb2.FINISH_REASON_MAX_TOKENS
                message.usage.prompt = attempt.prompt_tokens
                message.usage.completion = last - first
                message.usage.cached = cached
            yield message


def all_requests(servers: Sequence[FakeServer]) -> list[inference_pb2.GenerateRequest]:
    """Of several servers, one server after another."""
    return [request for server in servers for request in server.requests]


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; AssertionError if it does not come."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come"
        time.sleep(0.01)
