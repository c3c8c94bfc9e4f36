"""The catalogue: what is done to a server, from outside, and what may come of it. `scripts/chaos list` prints it.

A fault is injected by a coroutine that returns once it is done to the server: then the scenario waits for as many
deaths as it must have, and for the server to serve again. What it may cost is in its declaration; what clients may see
is in `rules.py`, and is the same for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc
import psutil

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import asks, http2
from scripts.fault_suite.client import GENERATE, OPTIONS, Client, connect
from scripts.fault_suite.history import Call
from scripts.fault_suite.injected import Triggers
from scripts.fault_suite.server import Server

COMMIT_LIMIT_S = 30.0
"""For a server under load to come to the place of a code fault."""
READY_LIMIT_S = 180.0
NUM_STORMERS = 200
NUM_STALLED = 16
NUM_GARBAGE = 60
NUM_PINGS = 20_000
NUM_SOCKETS = 48
BLOCKED_S = 3.0
BUSY_S = 4.0
FREEZE_S = 3.0
SPARE_FDS = 4
SPARE_ADDRESS_SPACE = 256 << 10


@dataclass(slots=True)
class Target:
    """What a fault has at hand."""

    server: Server
    client: Client
    triggers: Triggers
    rng: random.Random


Inject = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the catalogue."""

    name: str
    kind: str
    """process, helper, code, hang, memory, clients or host."""
    inject: Inject
    deaths_min: int
    deaths_max: int
    what: str
    num_spoiled_max: int = 0
    """Streams that may end INTERNAL, because what failed was done for them alone."""
    weight: int = 2
    """How often a storm takes it."""
    fails_only: bool = False


# ---------------------------------------------------------------------------------------------------------- processes


def _signal(number: signal.Signals) -> Inject:
    async def inject(target: Target) -> None:
        target.server.signal_engine(number)

    return inject


async def _kill_twice(target: Target) -> None:
    """Again as soon as the next engine serves: its streams are being replayed."""
    before_s = target.server.signal_engine(signal.SIGKILL)
    await target.server.wait_for("engine ready", READY_LIMIT_S, since_s=before_s)
    await asyncio.sleep(target.rng.uniform(0.0, 0.3))
    target.server.signal_engine(signal.SIGKILL)


async def _kill_starting(target: Target) -> None:
    """The engine, and shortly afterwards every other engine process there is: the one that starts among them."""
    target.server.signal_engine(signal.SIGKILL)
    await asyncio.sleep(target.rng.uniform(0.2, 1.5))
    _kill_helpers(target.server)


async def _kill_all(target: Target) -> None:
    """The engine and its helpers in one moment."""
    for process in target.server.engines():
        with contextlib.suppress(psutil.Error):
            process.kill()


async def _kill_helper(target: Target) -> None:
    _kill_helpers(target.server)
    await asyncio.sleep(0.5)


async def _stop_helper(target: Target) -> None:
    """It answers nothing when it is needed: then, or when it is found out, another takes its place."""
    for process in target.server.helpers():
        with contextlib.suppress(psutil.Error):
            process.suspend()
    target.server.signal_engine(signal.SIGKILL)


def _kill_helpers(server: Server) -> None:
    for process in server.helpers():
        with contextlib.suppress(psutil.Error):
            process.kill()


async def _freeze_front_end(target: Target) -> None:
    """As a paused container, or a debugger."""
    target.server.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(FREEZE_S)
    finally:
        target.server.signal(signal.SIGCONT)


async def _pause_engine(target: Target) -> None:
    """Shorter than any deadline: nothing has happened."""
    pid = target.server.engine_pid()
    target.server.signal_engine(signal.SIGSTOP)
    try:
        await asyncio.sleep(1.0)
    finally:
        target.server.signal_engine(signal.SIGCONT, pid)


# --------------------------------------------------------------------------------------------------------------- code


def _code(place: str, action: str) -> Inject:
    async def inject(target: Target) -> None:
        if place in target.triggers.missing():
            raise BenchmarkError(f"the server's code has no place {place!r} any more: see injected/sitecustomize.py")
        target.triggers.commit(place, action)
        try:
            # Nothing comes to `admission` by itself.
            for _ in range(int(COMMIT_LIMIT_S / 0.5)):
                probe = asyncio.create_task(target.client.attempt(Call(asks.short(), time.monotonic())))
                if await target.server.until(lambda: target.triggers.is_done(place), 0.5):
                    probe.cancel()
                    return
                probe.cancel()
            raise BenchmarkError(f"no process of the server came to the place {place!r}:\n{target.server.tail}")
        finally:
            target.triggers.disarm(place)

    return inject


async def _fail_loading(target: Target) -> None:
    """The next engine that loads fails; whichever comes after it does not."""
    target.triggers.commit("loading", "raise")
    target.server.signal_engine(signal.SIGKILL)
    await target.server.until(lambda: target.triggers.is_done("loading"), 20.0)
    target.triggers.disarm("loading")
    if not target.triggers.is_done("loading"):
        raise BenchmarkError("no engine has loaded: the fault was not put in")


# ------------------------------------------------------------------------------------------------------------- memory


async def _limit_address_space(target: Target) -> None:
    """For a moment the engine gets no more memory than it has."""
    engine = psutil.Process(target.server.engine_pid())
    before = engine.rlimit(psutil.RLIMIT_AS)
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms + SPARE_ADDRESS_SPACE, before[1]))
    await asyncio.sleep(1.0)
    with contextlib.suppress(psutil.Error):
        engine.rlimit(psutil.RLIMIT_AS, before)


# ------------------------------------------------------------------------------------------------------------ clients


async def _cancel_storm(target: Target) -> None:
    """Many streams begin, and all their callers leave within 50 ms: some before the first token, some after it."""
    async with connect(target.server.address, target.client.protocol) as client:
        # As good as endless: they end by the cancel.
        calls = [Call(asks.fresh(), time.monotonic()) for _ in range(NUM_STORMERS)]
        tasks = [asyncio.create_task(client.attempt(call)) for call in calls]
        await asyncio.sleep(target.rng.uniform(0.3, 2.0))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _leave_at_once(target: Target) -> None:
    """Callers that are gone before their request is read, and at the very first token."""
    async with connect(target.server.address, target.client.protocol) as client:
        some = [replace(asks.fresh(), leave_after_tokens=n % 2) for n in range(NUM_STORMERS // 4)]
        calls = [Call(ask, time.monotonic()) for ask in some]
        tasks = [asyncio.create_task(client.attempt(call)) for call in calls]
        await asyncio.wait(tasks, timeout=COMMIT_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stalled_readers(target: Target) -> None:
    """They hold their places and read nothing; then they go."""
    message = target.client.protocol.request(GENERATE, **asks.fresh(64).fields).SerializeToString()
    async with http2.stalled_readers(target.server.address, GENERATE, message, NUM_STALLED):
        await asyncio.sleep(BLOCKED_S)


async def _garbage(target: Target) -> None:
    await http2.garbage(target.server.address, target.rng, NUM_GARBAGE)


async def _ping_flood(target: Target) -> None:
    await http2.ping_flood(target.server.address, NUM_PINGS)


# --------------------------------------------------------------------------------------------------------------- host


async def _limit_descriptors(target: Target) -> None:
    """The front end may open next to nothing more, and many come; then it may again."""
    front_end = psutil.Process(target.server.pid)
    before = front_end.rlimit(psutil.RLIMIT_NOFILE)
    front_end.rlimit(psutil.RLIMIT_NOFILE, (front_end.num_fds() + SPARE_FDS, before[1]))
    try:
        host, _, port = target.server.address.rpartition(":")
        writers = []
        for _ in range(NUM_SOCKETS):
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 1.0)
                writers.append(writer)
        await asyncio.sleep(1.0)
        for writer in writers:
            writer.transport.abort()
    finally:
        with contextlib.suppress(psutil.Error):
            front_end.rlimit(psutil.RLIMIT_NOFILE, before)
    # It accepts again: a caller that was not there before is served.
    deadline_s = time.monotonic() + COMMIT_LIMIT_S
    async with grpc.aio.insecure_channel(target.server.address, options=OPTIONS) as channel:
        newcomer = Client(channel, target.client.protocol)
        while await newcomer.check() == "UNREACHABLE":
            if time.monotonic() > deadline_s:
                raise BenchmarkError("after its descriptors ran out the server accepts nobody any more")
            await asyncio.sleep(0.1)


def _blocked_log(with_death: bool) -> Inject:
    async def inject(target: Target) -> None:
        target.server.pause_log()
        try:
            if with_death:
                target.server.signal_engine(signal.SIGKILL)
            await asyncio.sleep(BLOCKED_S)
        finally:
            target.server.resume_log()

    return inject


async def _busy_cores(_: Target) -> None:
    """As many spinning processes as there are cores, twice; they end by themselves."""
    program = f"import time\nend = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
    count = 2 * len(os.sched_getaffinity(0))
    spinners = [await asyncio.create_subprocess_exec(sys.executable, "-ISc", program) for _ in range(count)]
    await asyncio.gather(*(spinner.wait() for spinner in spinners))


async def _step_clock(target: Target) -> None:
    """An hour back, then a day forward, then right again."""
    for seconds in (-3600.0, 86_400.0, 0.0):
        target.triggers.step_clock(seconds)
        await asyncio.sleep(0.7)


# ------------------------------------------------------------------------------------------------------------ the list

CATALOGUE = (
    Fault("kill", "process", _signal(signal.SIGKILL), 1, 1, "SIGKILL to the engine", weight=10),
    Fault("segv", "process", _signal(signal.SIGSEGV), 1, 1, "SIGSEGV to the engine", weight=4),
    Fault("abrt", "process", _signal(signal.SIGABRT), 1, 1, "SIGABRT to the engine", weight=4),
    Fault("bus", "process", _signal(signal.SIGBUS), 1, 1, "SIGBUS to the engine"),
    Fault("exit 0", "process", _code("forward", "exit 0"), 1, 1, "the engine leaves by _exit(0) in a step"),
    Fault("kill in step", "process", _code("forward", "kill"), 1, 1, "the engine kills itself in a forward pass"),
    Fault("abort in step", "process", _code("sampling", "abort"), 1, 1, "abort() while sampling"),
    Fault("linger", "process", _code("schedule", "linger"), 1, 1, "reports its failure with 100 KB and does not end"),
    Fault("kill twice", "process", _kill_twice, 2, 2, "SIGKILL again while its streams are being replayed", weight=4),
    Fault("kill starting", "process", _kill_starting, 1, 6, "SIGKILL, and to whatever starts after it"),
    Fault("kill all", "process", _kill_all, 1, 6, "SIGKILL to the engine and its helpers in one moment"),
    Fault("fail loading", "process", _fail_loading, 1, 3, "SIGKILL; the next engine that loads raises"),
    Fault("pause", "process", _pause_engine, 0, 0, "SIGSTOP and after a second SIGCONT"),
    Fault("freeze front end", "process", _freeze_front_end, 0, 0, "SIGSTOP to the front end for three seconds"),
    Fault("kill helper", "helper", _kill_helper, 0, 2, "SIGKILL to standby and spare"),
    Fault("stop helper", "helper", _stop_helper, 1, 3, "standby and spare stopped, then the engine killed", weight=1),
    Fault("raise in admission", "code", _code("admission", "raise"), 0, 1, "add_request raises", num_spoiled_max=1),
    Fault("raise in schedule", "code", _code("schedule", "raise"), 1, 1, "schedule() raises"),
    Fault("raise in forward", "code", _code("forward", "raise"), 0, 0, "the forward pass raises once", weight=6),
    Fault("raise in sampling", "code", _code("sampling", "raise"), 0, 0, "sampling raises once", weight=4),
    Fault("raise in update", "code", _code("update", "raise"), 1, 1, "update_from_output() raises"),
    Fault("raise in metrics", "code", _code("metrics", "raise"), 0, 1, "the engine's gauges raise"),
    Fault("raise in recording", "code", _code("recording", "raise"), 0, 0, "a counter or histogram of the front end "
          "raises"),
    Fault("raise in detokenizing", "code", _code("detokenize", "raise"), 0, 0, "the front end raises over one stream's "
          "text", num_spoiled_max=1),
    Fault("thread ends", "code", _code("forward", "thread"), 1, 1, "a helper thread of the engine ends badly"),
    Fault("stop", "hang", _signal(signal.SIGSTOP), 1, 1, "SIGSTOP to the engine"),
    Fault("sleep in forward", "hang", _code("forward", "sleep"), 1, 1, "a forward pass sleeps for an hour"),
    Fault("hold the gil", "hang", _code("forward", "hold the gil"), 1, 1, "a C call keeps the GIL for an hour"),
    Fault("spin in schedule", "hang", _code("schedule", "spin"), 1, 1, "schedule() is a busy loop"),
    Fault("full pipe", "hang", _code("update", "pipe"), 1, 1, "the engine writes to a pipe that nobody reads"),
    Fault("memory error", "memory", _code("forward", "memory error"), 0, 0, "MemoryError in a forward pass", weight=4),
    Fault("torch out of memory", "memory", _code("forward", "torch out of memory"), 0, 0, "torch's own, in a forward "
          "pass", weight=4),
    Fault("address space", "memory", _limit_address_space, 0, 2, "RLIMIT_AS at what the engine has, for a second"),
    Fault("cancel storm", "clients", _cancel_storm, 0, 0, "200 streams begin, and their callers leave at once"),
    Fault("leave at once", "clients", _leave_at_once, 0, 0, "callers gone before their request is read, or at the "
          "first token"),
    Fault("stalled readers", "clients", _stalled_readers, 0, 0, "16 streams whose HTTP/2 windows are zero"),
    Fault("garbage", "clients", _garbage, 0, 0, "60 connections with random bytes, frames and messages"),
    Fault("ping flood", "clients", _ping_flood, 0, 0, "20,000 PINGs on one connection"),
    Fault("descriptors", "host", _limit_descriptors, 0, 0, "the front end's descriptors run out, 48 connections come"),
    Fault("blocked log", "host", _blocked_log(with_death=False), 0, 0, "nobody reads stderr for three seconds"),
    Fault("blocked log and kill", "host", _blocked_log(with_death=True), 1, 1, "nobody reads stderr while the engine "
          "dies"),
    Fault("busy cores", "host", _busy_cores, 0, 0, "two spinning processes per core for four seconds"),
    Fault("clock", "host", _step_clock, 0, 0, "the wall clock an hour back, a day forward, right again"),
)  # fmt: skip


def named(name: str) -> Fault:
    """The entry of that name."""
    return next(fault for fault in CATALOGUE if fault.name == name)


def schedule(seed: int, num_faults: int, kinds: frozenset[str] | None = None) -> list[Fault]:
    """Seeded: every entry in turn comes once before any comes by weight, in an order that the seed shuffles."""
    rng = random.Random(f"{seed} faults")  # noqa: S311 no secret depends on it
    chosen = [fault for fault in CATALOGUE if kinds is None or fault.kind in kinds]
    first = rng.sample(chosen, k=min(num_faults, len(chosen)))
    rest = rng.choices(chosen, weights=[fault.weight for fault in chosen], k=max(0, num_faults - len(first)))
    return [*first, *rest]
