"""Threads whose places are told truly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from service.errors import QueueFullError
from service.workers import Workers
from tests.service.support import HANG_S, until


def workers(*, max_jobs: int, max_bytes: int = 100) -> Workers:
    return Workers(
        "test", num_threads=1, max_jobs=max_jobs, max_bytes=max_bytes, make_refusal=lambda: QueueFullError(1)
    )


async def test_a_job_keeps_its_place_until_its_thread_is_done() -> None:
    """A caller that goes away frees nothing while its job runs; one whose job has not begun takes it along."""
    pool = workers(max_jobs=2)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(HANG_S)

    running, waiting = (asyncio.create_task(pool.run(work)) for _ in range(2))
    await until(begun.is_set)
    with pytest.raises(QueueFullError):
        await pool.run(work)
    waiting.cancel()
    await until(lambda: pool.num_jobs == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pool.num_jobs == 1
    go_on.set()
    await until(lambda: pool.num_jobs == 0)
    pool.shutdown()


async def test_results_and_errors_come_back() -> None:
    """As the function gave or raised them."""
    pool = workers(max_jobs=1)
    assert await pool.run(lambda: 7) == 7
    await until(lambda: pool.num_jobs == 0)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    await until(lambda: pool.num_jobs == 0)
    pool.shutdown()


async def test_what_waits_is_bounded_in_bytes() -> None:
    """Jobs hold their bytes until their threads are done; one that is larger than all the room is let in alone."""
    pool = workers(max_jobs=10)
    go_on = threading.Event()
    first = asyncio.create_task(pool.run(lambda: go_on.wait(HANG_S), 500))
    await until(lambda: pool.num_jobs)
    with pytest.raises(QueueFullError):
        await pool.run(lambda: None, 1)
    go_on.set()
    await first
    await until(lambda: not pool.num_bytes)
    assert await pool.run(lambda: 7, 100) == 7
    pool.shutdown()
