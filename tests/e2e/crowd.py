"""Many streams at once, watched from the client's side.

async with Crowd(client, 93, lambda number: endless(f"Story {number}")) as crowd:
    await crowd.until_begun(16)
    …
    generations = await crowd.until_ended()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from tests.e2e.harness import Generation, ReflectionClient

BEGIN_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
"""Bounds against hanging."""
POLL_S = 0.01
MAX_NUM_SEQS = 16
SMALL: dict[str, Any] = {
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 512,
    "threads": 1,
}
"""Flags of a server that starts soon and shares its machine well: for tests that start one after another."""


def endless(text: str, max_tokens: int = 2000) -> dict[str, Any]:
    """The fields of a stream that outlives its test: it has that many tokens to come, whatever they are."""
    return {
        "text": text,
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
        "output": {"token_ids": True},
    }


def call_until_gone(client: ReflectionClient, channel: grpc.Channel, text: str) -> list[Generation]:
    """New calls to a server that is about to end, each made as soon as the one before has its answer. The last one
    found nobody; all others were refused for a reason.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    calls: list[Generation] = []
    while not calls or calls[-1].status.reason is not None:
        assert time.monotonic() < deadline, "the server answers calls and does not end"
        calls.append(client.generate(channel=channel, timeout_s=END_TIMEOUT_S, **endless(text, max_tokens=1)))
    return calls


class Crowd:
    """Generate calls over one connection of their own. Leaving cancels what is still open."""

    def __init__(
        self, client: ReflectionClient, num_streams: int, fields: Callable[[int], Mapping[str, Any]], **call: Any
    ) -> None:
        """`fields(number)` are the request's; `call` goes to each `agenerate`."""
        self._client = client
        self._num_streams = num_streams
        self._fields = fields
        self._call = call
        self._num_messages = [0] * num_streams
        self.first_end = asyncio.Event()
        """Set when the first of the streams has ended."""

    async def __aenter__(self) -> Self:
        self._channel = self._client.aio_channel()
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self._num_streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    @property
    def num_begun(self) -> int:
        """Streams that have had a message."""
        return sum(count > 0 for count in self._num_messages)

    async def until_begun(self, num_streams: int, timeout_s: float = BEGIN_TIMEOUT_S) -> None:
        """Wait until so many streams have had a message, and the server knows of all of them."""
        deadline = time.monotonic() + timeout_s
        while self.num_begun < num_streams:
            assert time.monotonic() < deadline, f"{self.num_begun} of {num_streams} streams have begun"
            if any(task.done() for task in self._tasks):
                raise AssertionError(f"a stream ended early: {[t.result().status for t in self._tasks if t.done()]}")
            await asyncio.sleep(POLL_S)
        while (num_known := await asyncio.to_thread(self._num_known)) < self._num_streams:
            assert time.monotonic() < deadline, f"the server knows of {num_known} of {self._num_streams} streams"
            await asyncio.sleep(POLL_S)

    async def until_ended(self, timeout_s: float = END_TIMEOUT_S) -> list[Generation]:
        """Every stream's outcome; AssertionError if one hangs."""
        _, hanging = await asyncio.wait(self._tasks, timeout=timeout_s)
        assert not hanging, f"{len(hanging)} of {self._num_streams} streams are open after {timeout_s} s"
        return [task.result() for task in self._tasks]

    def _num_known(self) -> int:
        load = self._client.load()
        return int(load.running + load.waiting)

    async def _run(self, number: int) -> Generation:
        def count(response: Any) -> None:
            self._num_messages[number] += 1

        try:
            fields = self._fields(number)
            return await self._client.agenerate(self._channel, on_response=count, **self._call, **fields)
        finally:
            self.first_end.set()
