"""Our server as the load generator sees it: requests out, timed and checked streams back."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2, info_pb2_grpc
from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Message, Stream
from scripts.benchmarks.workload import Request, Workload

INFO_LIMIT_S = 10.0


class EmberlineClient:
    """One channel, as one caller would have; all streams share it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._info = info_pb2_grpc.InfoServiceStub(channel)

    async def model(self) -> info_pb2.GetModelInfoResponse:
        try:
            info: info_pb2.GetModelInfoResponse = await self._info.GetModelInfo(
                info_pb2.GetModelInfoRequest(), timeout=INFO_LIMIT_S
            )
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"GetModelInfo failed: {describe(error)}") from None
        return info

    async def server(self) -> info_pb2.GetServerInfoResponse:
        try:
            info: info_pb2.GetServerInfoResponse = await self._info.GetServerInfo(
                info_pb2.GetServerInfoRequest(), timeout=INFO_LIMIT_S
            )
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"GetServerInfo failed: {describe(error)}") from None
        return info

    def generate(self, request: Request) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Opens the stream. Text and ids are both asked for: the one is what callers use, the other counts tokens."""
        call: AsyncIterator[inference_pb2.GenerateResponse] = self._inference.Generate(
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=request.prompt_ids),
                sampling=inference_pb2.SamplingOptions(temperature=0),
                stopping=inference_pb2.StoppingOptions(max_tokens=request.num_output_tokens, ignore_eos=True),
                output=inference_pb2.OutputOptions(text=True, token_ids=True),
            )
        )
        return call

    async def send(self, request: Request) -> Stream:
        """Reads one stream to its end. Raises BenchmarkError unless it got exactly what it asked for."""
        messages: list[Message] = []
        prompt = inference_pb2.PromptInfo()
        finish = inference_pb2.Finish()
        usage = inference_pb2.Usage()
        started_s = time.perf_counter()
        try:
            async for response in self.generate(request):
                if response.tokens:
                    messages.append(Message(time.perf_counter(), len(response.tokens)))
                if response.HasField("prompt"):
                    prompt = response.prompt
                if response.HasField("finish"):
                    finish = response.finish
                if response.HasField("usage"):
                    usage = response.usage
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"a stream failed: {describe(error)}") from None
        stream = Stream(started_s, tuple(messages), time.perf_counter(), prompt.count, usage.cached)
        check(request, stream, finish, usage)
        return stream


def check(request: Request, stream: Stream, finish: inference_pb2.Finish, usage: inference_pb2.Usage) -> None:
    """A fast answer to another question is no figure: everything that was asked for must be there, and no more."""
    reason = inference_pb2.FinishReason.Name(finish.reason)
    if reason != "FINISH_REASON_MAX_TOKENS":
        raise BenchmarkError(f"a stream ended with {reason}, not at its number of tokens")
    had = (stream.num_prompt_tokens, stream.num_output_tokens, usage.prompt, usage.completion)
    wanted = (len(request.prompt_ids), request.num_output_tokens) * 2
    if had != wanted:
        raise BenchmarkError(
            f"a stream had {had[0]} prompt and {had[1]} output tokens (by its usage {had[2]} and {had[3]}); "
            f"asked for were {wanted[0]} and {wanted[1]}"
        )


def check_limits(workload: Workload, limits: info_pb2.Limits) -> None:
    """Before anything is sent: whether the server takes all of it."""
    bounds = (
        (workload.prompt_tokens_max, limits.max_prompt_tokens, "prompt tokens"),
        (workload.output_tokens_max, limits.max_output_tokens, "output tokens"),
        (workload.prompt_tokens_max + workload.output_tokens_max, limits.max_model_len, "tokens in all"),
    )
    for wanted, limit, noun in bounds:
        if wanted > limit:
            raise BenchmarkError(f"the workload has requests of up to {wanted} {noun}; this server takes {limit}")


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[EmberlineClient]:
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # a retried call would hide a failure, or time the wrong attempt
    ]
    async with grpc.aio.insecure_channel(loopback(address), options=options) as channel:
        yield EmberlineClient(channel)


def loopback(address: str) -> str:
    """The address with its host as a number. Raises BenchmarkError unless it is this machine's loopback: load is for
    the machine under test, and a mistyped host would be someone else's.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise BenchmarkError(f"{address!r} is not host:port")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError):
        raise BenchmarkError(f"{address!r} cannot be resolved") from None
    hosts = [ipaddress.ip_address(entry[4][0]) for entry in found]
    if not all(number.is_loopback for number in hosts):
        raise BenchmarkError(f"{address!r} is not on the loopback interface; load is sent nowhere else")
    number = hosts[0]
    return f"[{number}]:{port}" if number.version == 6 else f"{number}:{port}"


def describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
