from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.health import INFO_NAME, LIVENESS_NAME, READINESS_NAMES, TOKENIZER_NAME, HealthServicer
from service.status import safe_handlers

Response = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING, SERVICE_UNKNOWN = Response.SERVING, Response.NOT_SERVING, Response.SERVICE_UNKNOWN


class Served:
    def __init__(self, health: HealthServicer) -> None:
        self.health = health
        self.server = grpc.aio.server()

    async def start(self) -> None:
        service = health_pb2.DESCRIPTOR.services_by_name["Health"]
        self.server.add_generic_rpc_handlers((safe_handlers(service, self.health, self._bug),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = health_pb2_grpc.HealthStub(self.channel)

    def _bug(self, _incident: str, error: Exception) -> None:
        raise AssertionError from error

    async def check(self, name: str) -> int:
        return (await self.stub.Check(health_pb2.HealthCheckRequest(service=name))).status

    def watch(self, name: str) -> Any:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=name))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served(HealthServicer(max_watchers=4))
    await server.start()
    yield server
    server.health.close()
    await server.channel.close()
    await server.server.stop(None)


async def next_status(watch: Any) -> int:
    response = await asyncio.wait_for(watch.read(), 30)
    return response.status if response is not grpc.aio.EOF else -1


@pytest.mark.parametrize("name", READINESS_NAMES)
async def test_readiness_begins_not_serving_and_follows(served: Served, name: str) -> None:
    """Each readiness name tells whether a request sent now would be served."""
    assert await served.check(name) == NOT_SERVING
    served.health.set_serving(True)
    assert await served.check(name) == SERVING
    served.health.set_serving(False)
    assert await served.check(name) == NOT_SERVING
    assert await served.check(LIVENESS_NAME) == SERVING


async def test_liveness_begins_serving(served: Served) -> None:
    """A process that is loading is alive."""
    assert await served.check(LIVENESS_NAME) == SERVING
    served.health.set_alive(False)
    assert await served.check(LIVENESS_NAME) == NOT_SERVING


async def test_each_offered_service_has_its_own_name(served: Served) -> None:
    """Check, Watch and List know it from then on; readiness does not move it, nor it readiness."""
    watch = served.watch(INFO_NAME)
    assert await next_status(watch) == SERVICE_UNKNOWN
    served.health.set_offered(INFO_NAME, serving=True)
    assert await next_status(watch) == SERVING
    served.health.set_offered(TOKENIZER_NAME, serving=False)
    served.health.set_serving(False)
    assert (await served.check(INFO_NAME), await served.check(TOKENIZER_NAME)) == (SERVING, NOT_SERVING)
    listed = (await served.stub.List(health_pb2.HealthListRequest())).statuses
    assert set(listed) == {*READINESS_NAMES, LIVENESS_NAME, INFO_NAME, TOKENIZER_NAME}
    assert listed[INFO_NAME].status == SERVING
    watch.cancel()


async def test_an_unknown_name(served: Served) -> None:
    """Check answers NOT_FOUND; Watch says SERVICE_UNKNOWN and stays open."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.check("other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = served.watch("other")
    assert await next_status(watch) == SERVICE_UNKNOWN
    served.health.set_serving(True)
    assert await served.check("") == SERVING
    assert not watch.done()


async def test_list_has_every_name(served: Served) -> None:
    """All names with their present values."""
    response = await served.stub.List(health_pb2.HealthListRequest())
    found = {name: entry.status for name, entry in response.statuses.items()}
    assert found == dict.fromkeys(READINESS_NAMES, NOT_SERVING) | {LIVENESS_NAME: SERVING}


async def test_watch_sends_the_present_value_then_each_change(served: Served) -> None:
    """A change to the value it had is no change."""
    watch = served.watch("readiness")
    assert await next_status(watch) == NOT_SERVING
    for serving in (True, False, True):
        served.health.set_serving(serving)
        served.health.set_serving(serving)
        assert await next_status(watch) == (SERVING if serving else NOT_SERVING)
    served.health.set_alive(False)  # another name's
    served.health.set_serving(False)
    assert await next_status(watch) == NOT_SERVING


async def test_close_ends_watches_and_checks_go_on(served: Served) -> None:
    """Each watcher gets the last value before its stream ends OK; a new one is told to go elsewhere."""
    served.health.set_serving(True)
    watches = [served.watch(""), served.watch("other")]
    assert [await next_status(watch) for watch in watches] == [SERVING, SERVICE_UNKNOWN]
    served.health.set_serving(False)
    served.health.close()
    assert await next_status(watches[0]) == NOT_SERVING
    for watch in watches:
        assert await next_status(watch) == -1
        assert await watch.code() is grpc.StatusCode.OK
    assert await served.check("") == NOT_SERVING
    late = served.watch("")
    assert await late.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_open_watch_does_not_delay_a_stop_after_close(served: Served) -> None:
    """A graceful stop after close() does not wait for watchers."""
    watch = served.watch("")
    await next_status(watch)
    served.health.close()
    await asyncio.wait_for(served.server.stop(grace=300), 30)
    assert served.health.num_watchers == 0


async def test_watchers_are_limited_and_their_places_come_back(served: Served) -> None:
    """One too many is refused, and does not end the others; a cancelled one makes room."""
    watches = [served.watch("") for _ in range(4)]
    for watch in watches:
        await next_status(watch)
    refused = served.watch("")
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watches[0].cancel()
    async with asyncio.timeout(30):
        while served.health.num_watchers == 4:
            await served.check("")  # lets the loop turn
    assert await next_status(served.watch("")) == NOT_SERVING


class StalledContext:
    """A caller that never reads: its write does not return."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.stalled = asyncio.Event()
        self.release = asyncio.Event()

    async def read(self) -> Any:
        return health_pb2.HealthCheckRequest(service="")

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, response: Any) -> None:
        self.written.append(response.status)
        self.stalled.set()
        await self.release.wait()


async def test_a_stalled_watcher_harms_nobody_and_then_gets_the_latest(served: Served) -> None:
    """While its write hangs, others are told and Check answers; of what it missed only the latest value is kept."""
    health = served.health
    watch = served.watch("")
    assert await next_status(watch) == NOT_SERVING
    handlers = safe_handlers(health_pb2.DESCRIPTOR.services_by_name["Health"], health, served._bug)
    details = type("Details", (), {"method": "/grpc.health.v1.Health/Watch", "invocation_metadata": ()})()
    body: Any = handlers.service(details).stream_stream  # type: ignore[arg-type, union-attr] # a stand-in for the call
    stalled = StalledContext()
    task = asyncio.ensure_future(body(None, stalled))
    await asyncio.wait_for(stalled.stalled.wait(), 30)
    for serving in [True, False] * 50 + [True]:
        health.set_serving(serving)
        assert await next_status(watch) == (SERVING if serving else NOT_SERVING)
        assert await served.check("") == (SERVING if serving else NOT_SERVING)
    assert stalled.written == [NOT_SERVING]
    stalled.release.set()
    health.close()
    await asyncio.wait_for(task, 30)
    assert stalled.written == [NOT_SERVING, SERVING]
