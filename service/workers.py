"""Threads for what would hold up the loop: tokenization, and the reading of very long option lists.

What lives here: a pool and the count of its jobs. What must not: what the jobs are. A job holds its place until its
thread is done with it, whether or not somebody still waits for the result: callers that come, cancel and come again
find the pool as full as it is.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from service.errors import CallError

_Result = TypeVar("_Result")


class Workers:
    """A bounded pool. All methods belong to the event loop's thread."""

    def __init__(
        self, name: str, *, num_threads: int, max_jobs: int, max_bytes: int, make_refusal: Callable[[], CallError]
    ) -> None:
        """`max_jobs` and `max_bytes` of what they work on, running ones included; what is over one of them is told a
        fresh `make_refusal()`.
        """
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._make_refusal = make_refusal
        self.num_jobs = 0
        self.num_bytes = 0

    async def run(self, function: Callable[[], _Result], num_bytes: int = 0) -> _Result:
        """The function's result, or what it raises. Raises the refusal if too many jobs are there already, or if they
        and this one have too many bytes; a single one may have any number, for its limit is another.
        """
        if self.num_jobs >= self._max_jobs or (self.num_bytes and self.num_bytes + num_bytes > self._max_bytes):
            raise self._make_refusal()
        loop = asyncio.get_running_loop()
        self.num_jobs += 1
        self.num_bytes += num_bytes

        def give_back(_: Future[Any]) -> None:
            loop.call_soon_threadsafe(self._give_back, num_bytes)

        # In the caller's context: what it logs is logged on behalf of the caller's call.
        job = self._pool.submit(contextvars.copy_context().run, function)
        job.add_done_callback(give_back)
        return await asyncio.wrap_future(job)  # if this wait is cancelled, so is a job that has not begun

    def shutdown(self) -> None:
        """Take no more jobs and wait for none; those that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _give_back(self, num_bytes: int) -> None:
        self.num_jobs -= 1
        self.num_bytes -= num_bytes
