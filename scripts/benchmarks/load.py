"""The closed loop. It knows neither a protocol nor a server: whoever calls it hands in how a request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Stream
from scripts.benchmarks.workload import Request

Send = Callable[[Request], Awaitable[Stream]]
"""Sends one request and reads its stream to the end. Raises BenchmarkError unless it got exactly what it asked for."""


async def closed_loop(
    requests: Sequence[Request], send: Send, *, concurrency: int, time_limit_s: float
) -> list[Stream]:
    """Sends all requests, in order, `concurrency` at a time: each that ends makes room for the next.

    Returns their streams in the order they ended. The first failure ends the run and is raised as it is; so does the
    time limit, as BenchmarkError.
    """
    waiting = iter(requests)
    streams: list[Stream] = []

    async def client() -> None:
        for request in waiting:  # one iterator for all clients: each takes the next request
            streams.append(await send(request))  # noqa: PERF401 all clients append to it as they go

    try:
        async with asyncio.timeout(time_limit_s), asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(requests))):
                clients.create_task(client())
    except TimeoutError:
        raise BenchmarkError(
            f"{len(streams)} of {len(requests)} requests ended within the time limit of {time_limit_s:g} s"
        ) from None
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others are its consequences, or say the same
    return streams
