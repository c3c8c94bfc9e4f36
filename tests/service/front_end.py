"""A whole front end in this process, over real gRPC, with a fake engine behind it: see `fake_engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2, info_pb2_grpc, tokenizer_pb2_grpc
from service.cli import build_parser
from service.config import parse
from service.exit import ExitCode
from service.server import Server
from tests.service import tiny_tokenizers
from tests.service.support import HANG_S, fake_engine, until

CANARY = "xylophone"


class Running:
    """A server that runs as a task, and stubs to call it."""

    def __init__(self, server: Server, task: asyncio.Task[ExitCode], channel: grpc.aio.Channel) -> None:
        self.server = server
        self.task = task
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.info = info_pb2_grpc.InfoServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def exit_code(self) -> ExitCode:
        return await asyncio.wait_for(asyncio.shield(self.task), HANG_S)

    async def wait_serving(self) -> None:
        async with asyncio.timeout(HANG_S):
            async for update in self.health.Watch(health_pb2.HealthCheckRequest()):
                if update.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    async def readiness(self, name: str = "readiness") -> str:
        response = await self.health.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_idle(self) -> None:
        """Until no request is left anywhere."""
        async with asyncio.timeout(HANG_S):
            while True:
                load = await self.info.GetLoad(info_pb2.GetLoadRequest())
                if load.running == load.waiting == load.kv_blocks_used == 0:
                    return
                await asyncio.sleep(0.01)

    def generate(self, *prompt: int, **fields: Any) -> Any:
        return self.inference.Generate(request(*prompt, **fields), timeout=HANG_S)


def request(*prompt: int, max_tokens: int = 5, **fields: Any) -> inference_pb2.GenerateRequest:
    if "text" not in fields:
        fields["token_ids"] = inference_pb2.TokenIds(ids=prompt or (1, 2))
    stopping = fields.pop("stopping", inference_pb2.StoppingOptions(max_tokens=max_tokens))
    return inference_pb2.GenerateRequest(stopping=stopping, **fields)


async def _run(server: Server) -> ExitCode:
    code = await server.run()
    guides = getattr(server, "_guides", None)
    child = None if guides is None else guides._child
    await server.close()
    if child is not None:  # a process's end would take it along; a loop that ends first would leave it unreaped
        await until(lambda: child._popen.returncode is not None and (child._transport is None or child._is_lost))
        await asyncio.sleep(0)  # the transport closes its socket in the next turn
    return code


@contextlib.asynccontextmanager
async def running(
    model: Path, *arguments: str, engine: tuple[str, ...] | None = None, wait: bool = True
) -> AsyncIterator[Running]:
    flags = ["serve", "--model", str(model), "--port", "0", "--served-model-name", "tiny"]
    flags += ["--max-output-tokens", "4000", "--max-engine-restarts", "0"]
    flags += ["--crash-dir", str(model.parent / "crashes"), *arguments]
    config = parse(build_parser().parse_args(flags), {})
    server = Server(config, engine_command=engine or fake_engine())
    task = asyncio.create_task(_run(server))
    await until(lambda: server.address or task.done())
    async with grpc.aio.insecure_channel(server.address, [("grpc.enable_retries", 0)]) as channel:
        run = Running(server, task, channel)
        try:
            if wait:
                await run.wait_serving()
            yield run
        finally:
            server.request_stop()
            server.request_stop()
            await asyncio.wait_for(task, HANG_S)


def details(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], str | None]:
    """ErrorInfo's reason and metadata, and the pushback."""
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    pushback = trailing.get("grpc-retry-pushback-ms")
    return info.reason, dict(info.metadata), pushback if pushback is None else str(pushback)


async def rest_of(call: Any) -> list[Any]:
    """What a stream still has to say."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest_of(call) if hasattr(call, "read") else call)
    return caught.value


def text_of(model: Path, token_ids: list[int]) -> str:
    return tiny_tokenizers.load_tokenizer(model).decode(token_ids)
