"""Callers that go away: by cancelling, by their deadline, by vanishing. Nothing of them stays in the engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.e2e.crowd import Crowd, endless
from tests.e2e.harness import INFERENCE, Generation, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTLE_TIMEOUT_S = 60.0
"""A bound against blocks that are never freed; the aim is one step."""
NUM_STREAMS = 2000
NUM_AT_ONCE = 100
SHARED = "The history of the lighthouse begins with a keeper who counted the waves. "


@dataclass
class Traceless:
    """Asserts, at the end of a test, that its callers have left no trace."""

    server: Server
    client: ReflectionClient

    def __post_init__(self) -> None:
        self._engine_pid = self.server.engine_pid()
        self._num_logs = len(self.server.logs)
        self._answer = self._ask()

    def check(self) -> None:
        self._wait_until_idle()
        assert self.server.engine_pid() == self._engine_pid
        bad = [r for r in self.server.logs[self._num_logs :] if r["level"] in ("warning", "error", "critical")]
        assert bad == []
        assert self._ask() == self._answer

    def _ask(self) -> list[int]:
        """Greedy tokens, from no one's cache."""
        request: dict[str, Any] = {**endless("The capital of France is", max_tokens=24), "cache": {"bypass": True}}
        return self.client.generate(**request).expect_ok().token_ids

    def _wait_until_idle(self) -> None:
        begun_s = time.monotonic()
        while True:
            load = self.client.load()
            if not (load.running or load.waiting or load.waiting_tokens or load.kv_blocks_used):
                assert load.kv_blocks_total > 0
                print(f"nothing is held {time.monotonic() - begun_s:.3f} s after the last caller left")
                return
            assert time.monotonic() - begun_s < SETTLE_TIMEOUT_S, f"still held: {load}"
            time.sleep(0.02)


def _wait_until_running(client: ReflectionClient, num_requests: int) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while client.load().running < num_requests:
        assert time.monotonic() < deadline, client.load()
        time.sleep(0.02)


@pytest.fixture
def traceless(server: Server, client: ReflectionClient) -> Iterator[None]:
    check = Traceless(server, client)
    yield
    check.check()


@pytest.mark.usefixtures("traceless")
async def test_2000_streams_cancelled_at_random_moments(client: ReflectionClient) -> None:
    """2,000 streams cancelled at any moment (in the queue, in prefill, after some tokens): no block stays used, no
    line of the log complains, the engine is the same and gives the same tokens.
    """
    seed = 20_261
    choices = random.Random(seed)
    requests = [
        endless(SHARED * choices.randrange(1, 8) + f"Chapter {number}.", max_tokens=choices.randrange(8, 200))
        for number in range(NUM_STREAMS)
    ]
    # Most leave after a time, whatever has come by then, some in the moment in which a certain message comes.
    moments = [
        (choices.uniform(0.0, 1.0), None) if number % 4 else (None, choices.randrange(1, 6))
        for number in range(NUM_STREAMS)
    ]
    places = asyncio.Semaphore(NUM_AT_ONCE)
    num_messages = 0
    num_cancelled = 0

    async def one(channel: grpc.aio.Channel, fields: dict[str, Any], moment: tuple[float | None, int | None]) -> None:
        nonlocal num_messages, num_cancelled
        after_s, after_messages = moment
        async with places:
            stub = client.stub(f"{INFERENCE}/Generate", channel)
            call = stub(client.request(f"{INFERENCE}/Generate", **fields), timeout=240.0)
            if after_s is not None:
                asyncio.get_running_loop().call_later(after_s, call.cancel)
            num_here = 0
            try:
                async for _ in call:
                    num_here += 1
                    if num_here == after_messages:
                        call.cancel()
            except asyncio.CancelledError:
                num_cancelled += 1
            assert await call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.OK)
            num_messages += num_here

    async with client.aio_channel() as channel:
        await asyncio.gather(*(one(channel, *pair) for pair in zip(requests, moments, strict=True)))
    print(f"seed {seed}: {num_cancelled} streams cancelled, {num_messages} messages read")
    assert num_cancelled > NUM_STREAMS * 0.9


@pytest.mark.usefixtures("traceless")
async def test_all_cancelled_at_once(client: ReflectionClient) -> None:
    """300 streams that leave together, some running and most waiting, leave nothing behind."""
    async with Crowd(client, 300, lambda number: endless(SHARED * 3 + f"Verse {number}.")) as crowd:
        await crowd.until_begun(20)


@pytest.mark.usefixtures("traceless")
async def test_deadlines_free_what_they_end(client: ReflectionClient) -> None:
    """Streams whose callers' deadlines pass, while waiting or while streaming, end DEADLINE_EXCEEDED and free their
    blocks.
    """
    choices = random.Random(7)

    async def one(channel: grpc.aio.Channel, number: int) -> Generation:
        fields = endless(SHARED * choices.randrange(1, 10) + f"Poem {number}.")
        return await client.agenerate(channel, timeout_s=choices.uniform(0.01, 3.0), **fields)

    async with client.aio_channel() as channel:
        generations = await asyncio.gather(*(one(channel, number) for number in range(80)))
    for generation in generations:
        generation.expect(grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.usefixtures("traceless")
async def test_a_cancelled_complete_is_forgotten(client: ReflectionClient) -> None:
    """The unary call holds an engine's blocks, too, and gives them back when its caller leaves."""
    path = f"{INFERENCE}/Complete"
    async with client.aio_channel() as channel:
        calls = [
            client.stub(path, channel)(client.request(path, **endless(f"Letter {number}.")), timeout=240.0)
            for number in range(8)
        ]
        await asyncio.to_thread(_wait_until_running, client, 8)
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


@pytest.mark.usefixtures("traceless")
async def test_a_vanished_connection_ends_its_streams(client: ReflectionClient) -> None:
    """A client whose connection goes, without a word, frees what its streams held."""
    channel = client.aio_channel()
    path = f"{INFERENCE}/Generate"
    calls = [
        client.stub(path, channel)(client.request(path, **endless(f"Song {number}.")), timeout=240.0)
        for number in range(8)
    ]
    for call in calls:
        assert await call.read() is not grpc.aio.EOF
    await channel.close()
