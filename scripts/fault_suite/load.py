"""A steady load: so many clients, each with one stream at a time, each stream written down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite.client import Client
from scripts.fault_suite.history import Answer, Ask, Call

END_LIMIT_S = 120.0
"""For the streams that are open when the load ends. What is open then has hung."""
STALL_LIMIT_S = 240.0
"""No stream has ended for so long: the run is over."""
REFERENCE_LIMIT_S = 900.0
MOVED_ON_TOKENS = 8


class Load:
    """Enter it to begin, leave it to stop; `calls` is the history, open calls included."""

    def __init__(self, client: Client, asks: Iterator[Ask], num_clients: int, ended_max: int | None = None) -> None:
        """`ended_max`: no new ask after so many have come to an end; the run goes on without load."""
        self._client = client
        self._asks = asks
        self._num_clients = num_clients
        self._ended_max = ended_max
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.calls: list[Call] = []
        self.num_ended = 0
        """Asks that came to an end, refusals not counted."""
        self.last_end_s = time.monotonic()

    def start(self) -> None:
        """All clients begin."""
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._num_clients)]

    async def _run(self) -> None:
        while not self._over and (self._ended_max is None or self.num_ended < self._ended_max):
            ask = next(self._asks)
            await self._client.attempt_until_taken(ask, self.calls)
            self.num_ended += 1
            self.last_end_s = time.monotonic()

    @property
    def num_live(self) -> int:
        """Streams that have had something and go on."""
        return sum(call.ended_s is None and bool(call.messages) for call in self.calls[-4 * self._num_clients :])

    def has_moved_on(self, since_s: float) -> bool:
        """Whether each stream that was open then has ended, or has had some tokens since: nobody is on trial for what
        happened before.
        """
        open_calls = (call for call in self.calls if call.sent_s <= since_s and (call.ended_s or since_s) >= since_s)
        return all(
            call.ended_s is not None or _num_tokens_since(call, since_s) >= MOVED_ON_TOKENS for call in open_calls
        )

    def check_progress(self) -> None:
        """Raises BenchmarkError if nothing ends any more: the open calls then count as hung."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise BenchmarkError(f"a client of the load failed: {task.exception()!r}")
        if time.monotonic() - self.last_end_s > STALL_LIMIT_S:
            raise BenchmarkError(f"no stream has ended for {STALL_LIMIT_S:g} s")

    async def stop(self, limit_s: float = END_LIMIT_S) -> int:
        """No new asks; waits for those that are open. How many hang: these are cancelled, and stay open in `calls`."""
        self._over = True
        if not self._tasks:
            return 0
        _, hanging = await asyncio.wait(self._tasks, timeout=limit_s)
        for task in hanging:
            task.cancel()
        if hanging:
            await asyncio.wait(hanging)
        return len(hanging)


def _num_tokens_since(call: Call, since_s: float) -> int:
    return sum(len(message.token_ids) for message in call.messages if message.at_s > since_s)


async def reference(client: Client, asks: Sequence[Ask], num_clients: int) -> dict[int, Answer]:
    """What the undisturbed server says to each ask. Raises BenchmarkError if it does not."""
    pending = iter(asks)
    calls: list[Call] = []

    async def run() -> None:
        for ask in pending:  # one iterator for all: each takes the next
            calls.append(await client.attempt(Call(ask, time.monotonic())))  # noqa: PERF401

    tasks = [asyncio.create_task(run()) for _ in range(num_clients)]
    _, late = await asyncio.wait(tasks, timeout=REFERENCE_LIMIT_S)
    for task in tasks:
        task.cancel()
    if late:
        raise BenchmarkError(f"the undisturbed pass took more than {REFERENCE_LIMIT_S:g} s")
    await asyncio.gather(*tasks)
    bad = [call for call in calls if call.status is None or call.status.code != "OK" or not call.finish_reason]
    if bad:
        raise BenchmarkError(f"{len(bad)} streams failed without any fault, such as: {bad[0].status} of {bad[0].ask}")
    return {call.ask.number: Answer(call.token_ids, call.text, call.finish_reason or "") for call in calls}
