from __future__ import annotations

import asyncio

import pytest

from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Message, Stream
from scripts.benchmarks.load import closed_loop
from scripts.benchmarks.workload import Request

REQUESTS = [Request((index,), 1) for index in range(20)]


class Sink:
    """Takes requests; each stays a few turns of the loop."""

    def __init__(self) -> None:
        self.live = 0
        self.live_max = 0
        self.seen: list[int] = []

    async def send(self, request: Request) -> Stream:
        self.seen.append(request.prompt_ids[0])
        self.live += 1
        self.live_max = max(self.live_max, self.live)
        for _ in range(1 + request.prompt_ids[0] % 3):
            await asyncio.sleep(0)
        self.live -= 1
        return Stream(0.0, (Message(1.0, 1),), 1.0, 1, 0)


@pytest.mark.parametrize("concurrency", [1, 7, 100])
async def test_every_request_is_sent_once_in_order_and_never_too_many_at_a_time(concurrency: int) -> None:
    """A closed loop holds its concurrency while there is work, and no more."""
    sink = Sink()
    streams = await closed_loop(REQUESTS, sink.send, concurrency=concurrency, time_limit_s=60)
    assert (len(streams), sink.seen) == (20, list(range(20)))
    assert sink.live_max == min(concurrency, 20)


async def test_the_first_failure_ends_the_run() -> None:
    """It is raised as it is, and no further request is sent."""
    sink = Sink()

    async def send(request: Request) -> Stream:
        if request.prompt_ids[0] == 5:
            raise BenchmarkError("the sixth")
        return await sink.send(request)

    with pytest.raises(BenchmarkError, match=r"^the sixth$"):
        await closed_loop(REQUESTS, send, concurrency=2, time_limit_s=60)
    assert len(sink.seen) < 10


async def test_a_server_that_hangs_ends_the_run_at_its_time_limit() -> None:
    """The error tells how far it got."""

    async def send(request: Request) -> Stream:
        if request.prompt_ids[0] >= 2:
            await asyncio.Event().wait()
        return Stream(0.0, (), 0.0, 0, 0)

    with pytest.raises(BenchmarkError, match=r"2 of 20 requests .* 0\.05 s"):
        await closed_loop(REQUESTS, send, concurrency=3, time_limit_s=0.05)
