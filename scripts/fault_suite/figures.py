"""The table of docs/reliability.md: what each figure means is its function here, and nowhere else.

Each function starts servers of its own with the default model, and gives the rows it has measured. Every loop has a
bound. A row says what is to be reached, what was measured, and whether that is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from scripts.benchmarks import report
from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import distribution
from scripts.fault_suite import asks, scenarios, soak
from scripts.fault_suite.arena import SMALL, Arena, Outcome, arena
from scripts.fault_suite.client import Client, connect
from scripts.fault_suite.faults import READY_LIMIT_S
from scripts.fault_suite.history import Call
from scripts.fault_suite.scenarios import FAIL, Options
from scripts.fault_suite.server import STOP_LIMIT_S, Server, running

UNAVAILABLE = "UNAVAILABLE ENGINE_DEAD"
ROUNDS = {3: 10, 93: 6}
"""Streams: how many deaths with so many."""
KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
BEGIN_LIMIT_S = 120.0
QUIET_S = 3.0
"""If no further stream has begun for so long, the rest waits in the server's queue."""
END_LIMIT_S = 30.0
CHECK_POLL_S = 0.002
PROBE_POLL_S = 0.01
PROBE_AFTER_S = 0.05
"""Tokens of the dead engine can be on their way when it dies; a call that is sent later is another engine's."""
STANDBY_ROUNDS = 6
COLD_ROUNDS = 4
HANG_DEADLINE_S = 3.0
HANG_ROUNDS = 3
NUM_CANCELS = 60_000
"""Three times what is asked about: between collections memory goes up and down by 2 MB, which over 20,000 streams is
100 B each, and tells nothing of a leak of 64.
"""
NUM_CANCELS_WARM = 4_000
CANCELS_AT_A_TIME = 64
CANCEL_FLAGS = (f"--max-num-seqs={CANCELS_AT_A_TIME}", "--max-num-batched-tokens=256")
SIGTERM_ROUNDS = 3
NUM_WATCHES = 3
UNLIMITED = "--max-engine-restarts=1000"
HARM = frozenset({"HUNG", "LOST", "REPEATED", "CHANGED", "MALFORMED", "BAD END"})


@dataclass(frozen=True, slots=True)
class Figure:
    """One row."""

    name: str
    to_reach: str
    measured: str
    is_reached: bool | None
    """None: not run."""
    details: dict[str, Any] = field(default_factory=dict)


def table(rows: Sequence[Figure]) -> str:
    """In Markdown."""
    words = {True: "yes", False: "NO", None: "not run"}
    return report.table(
        ["figure", "to reach", "measured", "reached"],
        [[row.name, row.to_reach, row.measured, words[row.is_reached]] for row in rows],
    )


def as_json(row: Figure) -> dict[str, Any]:
    """For the file."""
    return {
        "name": row.name,
        "to_reach": row.to_reach,
        "measured": row.measured,
        "is_reached": row.is_reached,
        "details": row.details,
    }


def _ms(seconds: float) -> str:
    return f"{report.milliseconds(seconds)} ms"


# ------------------------------------------------------------------------------- what a death costs those who are there


@dataclass(slots=True)
class _Round:
    """One death with `fail`."""

    num_streams: int
    latencies_s: list[float]
    check_s: float
    watch_s: float
    num_records: int
    log_bytes: int
    ends: list[str]


async def deaths(options: Options) -> list[Figure]:
    """Signals to the engine with 3 and with 93 streams: statuses, health, records and log volume."""
    outcome = Outcome("deaths")
    rounds: list[_Round] = []
    async with arena(outcome, [FAIL, UNLIMITED], options.seed, options.logs) as ring:
        number = 0
        for num_streams, count in ROUNDS.items():
            for _ in range(count):
                rounds.append(await _death(ring, num_streams, KILLERS[number % len(KILLERS)]))
                number += 1
        await ring.check_stop()
    _raise_if_stuck(outcome)
    records_at_stop = outcome.violations
    latencies = distribution([latency for one in rounds for latency in one.latencies_s])
    checks = distribution([one.check_s for one in rounds])
    watches = distribution([one.watch_s for one in rounds])
    records = sorted({one.num_records for one in rounds})
    volume = {count: max(one.log_bytes for one in rounds if one.num_streams == count) for count in ROUNDS}
    details = {"rounds": [{key: getattr(one, key) for key in _Round.__slots__} for one in rounds]}
    worst_s = max(checks.max_s, watches.max_s)
    others = [end for one in rounds for end in one.ends if end != UNAVAILABLE]
    return [
        Figure(
            "death → UNAVAILABLE on every stream not saved",
            "p99 ≤ 250 ms, max 1 s",
            f"p99 {_ms(latencies.p99_s)}, max {_ms(latencies.max_s)} ({latencies.count} streams, {len(rounds)} deaths"
            f"{f'; {len(others)} ended otherwise, or not' if others else ''})",
            latencies.p99_s <= 0.25 and latencies.max_s <= 1.0 and not others,
            details,
        ),
        Figure(
            "death of the last engine → readiness NOT_SERVING, Check and Watch",
            "≤ 250 ms",
            f"Check max {_ms(checks.max_s)}, Watch max {_ms(watches.max_s)}",
            worst_s <= 0.25,
        ),
        Figure(
            "`fatal error` records per death; per clean stop",
            "1; 0",
            f"{' '.join(map(str, records))}; {'0' if not records_at_stop else 'see the violations'}",
            records == [1] and not records_at_stop,
            {"violations": [one.detail for one in records_at_stop]},
        ),
        Figure(
            "log volume per death",
            "≤ 64 KB at 3 and at 93 streams",
            ", ".join(f"{size / 1024:.1f} KB at {count}" for count, size in volume.items()),
            max(volume.values()) <= 64 * 1024,
        ),
    ]


async def _death(ring: Arena, num_streams: int, number: signal.Signals) -> _Round:
    """From just before the signal to when each client has its status, a poller its answer, a watcher its message."""
    server = ring.server
    await ring.until_served()
    async with (
        connect(server.address, ring.client.protocol) as prober,
        connect(server.address, ring.client.protocol) as watcher,
        watcher.watch("readiness") as states,
    ):
        calls = [Call(asks.fresh(), time.monotonic()) for _ in range(num_streams)]
        tasks = [asyncio.create_task(ring.client.attempt(call)) for call in calls]
        try:
            await _until_begun(calls)
            await server.until(lambda: bool(states), END_LIMIT_S)
            poll = asyncio.create_task(_until_not_serving(prober))
            await asyncio.sleep(0.3)
            begun = [call for call in calls if call.messages]
            log_bytes = server.num_log_bytes
            num_records = len(server.deaths)
            episode = ring.begin(number.name, 1, 1)
            killed_s = server.signal_engine(number)
            await asyncio.wait(
                [task for call, task in zip(calls, tasks, strict=True) if call in begun], timeout=END_LIMIT_S
            )
            check_s = await asyncio.wait_for(poll, END_LIMIT_S) - killed_s
            heard = [at_s for at_s, state in states if state == "NOT_SERVING" and at_s >= killed_s]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    await ring.end(episode)
    ended = [call for call in calls if call.ended_s is not None and call.status and call.status.name == UNAVAILABLE]
    if not ended or not heard:
        raise BenchmarkError(f"a death that nobody was told of: {len(ended)} ends, Watch {states}")
    return _Round(
        num_streams,
        [(call.ended_s or 0.0) - killed_s for call in ended],
        check_s,
        heard[0] - killed_s,
        len(server.deaths) - num_records,
        server.num_log_bytes - log_bytes,
        [call.status.name if call.status else "open" for call in begun],
    )


async def _until_begun(calls: Sequence[Call]) -> None:
    """All have had a token, or no other one has for QUIET_S. Raises BenchmarkError if none has in time."""
    num_begun, since_s = 0, time.monotonic()
    for _ in range(int(BEGIN_LIMIT_S / 0.01)):
        now = sum(bool(call.messages) for call in calls)
        if now > num_begun:
            num_begun, since_s = now, time.monotonic()
        if num_begun == len(calls) or (num_begun and time.monotonic() - since_s > QUIET_S):
            return
        await asyncio.sleep(0.01)
    if not num_begun:
        raise BenchmarkError(f"no stream had a token within {BEGIN_LIMIT_S:g} s")


async def _until_not_serving(client: Client) -> float:
    """When a Check first said so; asked every CHECK_POLL_S."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline_s:
        if await client.check() != "SERVING":
            return time.monotonic()
        await asyncio.sleep(CHECK_POLL_S)
    raise BenchmarkError("Check says SERVING while there is no engine")


# ------------------------------------------------------------------------------------------------------------ recovery


async def restart(options: Options) -> list[Figure]:
    """From SIGKILL to the first token of a call that was sent after it; with a standby, and cold, for which the spare
    that waits beside every engine is there, or was killed a moment before.
    """
    standby_s, _ = await _restarts(options, ("--standby=1",), STANDBY_ROUNDS)
    cold_s, load_s = await _restarts(options, (), COLD_ROUNDS)
    bare_s, bare_load_s = await _restarts(options, (), COLD_ROUNDS, kill_helpers=True)
    return [
        Figure(
            "death → a real token again, with a standby",
            "≤ 2 s",
            f"max {max(standby_s):.2f} s ({len(standby_s)} deaths)",
            max(standby_s) <= 2.0,
            {"seconds": standby_s},
        ),
        _cold("death → a real token again, cold", cold_s, load_s),
        _cold("the same, the spare killed as well", bare_s, bare_load_s),
    ]


def _cold(name: str, seconds: Sequence[float], load_s: float) -> Figure:
    return Figure(
        name,
        "≤ 1.1 × first start",
        f"max {max(seconds):.2f} s = {max(seconds) / load_s:.2f} × {load_s:.2f} s ({len(seconds)} deaths)",
        max(seconds) <= 1.1 * load_s,
        {"seconds": seconds, "first_start_s": load_s},
    )


async def _restarts(
    options: Options, flags: Sequence[str], rounds: int, *, kill_helpers: bool = False
) -> tuple[list[float], float]:
    """Seconds of each, and those of the first start's load: from the engine process's start to ready, as it tells."""
    outcome = Outcome("restart")
    seconds: list[float] = []
    load_s = 0.0
    async with arena(outcome, [FAIL, UNLIMITED, *flags], options.seed, options.logs) as ring:
        info = await ring.client.unary("InfoService/GetServerInfo")
        load_s = info.engines[0].startup.ToTimedelta().total_seconds()
        for _ in range(rounds):
            # It is made a while after ready.
            if not await ring.server.until(lambda: bool(ring.server.helpers()), READY_LIMIT_S):
                raise BenchmarkError("no spare")
            await _until_settled(ring.server, len(ring.server.engines()))
            episode = ring.begin("kill", 1, 1)
            for helper in ring.server.helpers() if kill_helpers else ():
                ring.server.signal_engine(signal.SIGKILL, helper.pid)
            killed_s = ring.server.signal_engine(signal.SIGKILL)
            seconds.append(await _first_token_s(ring.client, killed_s) - killed_s)
            await ring.end(episode)
        await ring.check_stop()
    _raise_if_stuck(outcome)
    return seconds, load_s


async def _until_settled(server: Server, num_engines: int) -> None:
    """Helpers are there and idle: what is measured is a death, not two at once."""
    quiet = 0
    for _ in range(int(READY_LIMIT_S / 0.5)):
        await asyncio.sleep(0.5)
        engines = server.engines()
        busy = 0.0
        for process in engines:
            with contextlib.suppress(psutil.Error):
                busy = max(busy, process.cpu_percent(None))  # since the last look; 0 at the first
        quiet = quiet + 1 if len(engines) == num_engines and busy < 10.0 else 0
        if quiet >= 4:
            return


async def _first_token_s(client: Client, killed_s: float) -> float:
    """When a call sent after the death had its first token; refused ones are sent again at once."""
    await asyncio.sleep(PROBE_AFTER_S)
    while time.monotonic() - killed_s < READY_LIMIT_S:
        call = Call(asks.short(), time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.attempt(call), READY_LIMIT_S)
        if call.token_ids:
            return next(message.at_s for message in call.messages if message.token_ids)
        await asyncio.sleep(PROBE_POLL_S)
    raise BenchmarkError("no token after the death")


async def hangs(options: Options) -> list[Figure]:
    """From the hang to the first stream's end, less the deadline: SIGSTOP, a sleeping forward pass, a C call with the
    GIL.
    """
    outcome = Outcome("hangs")
    over_s: dict[str, list[float]] = {"stop": [], "sleep": [], "hold the gil": []}
    async with arena(
        outcome, [FAIL, UNLIMITED, f"--step-deadline={HANG_DEADLINE_S}"], options.seed, options.logs
    ) as ring:
        for _ in range(HANG_ROUNDS):
            for what, seconds in over_s.items():
                await ring.until_served()
                calls = [Call(asks.fresh(), time.monotonic()) for _ in range(3)]
                tasks = [asyncio.create_task(ring.client.attempt(call)) for call in calls]
                try:
                    await _until_begun(calls)
                    episode = ring.begin(what, 1, 1)
                    if what == "stop":
                        hung_s = ring.server.signal_engine(signal.SIGSTOP)
                    else:
                        ring.triggers.commit("forward", what)
                        if not await ring.server.until(lambda: ring.triggers.is_done("forward"), END_LIMIT_S):
                            raise BenchmarkError("no forward pass")
                        hung_s = time.monotonic()
                    await asyncio.wait(tasks, timeout=END_LIMIT_S)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                if any(call.ended_s is None for call in calls):
                    raise BenchmarkError(f"{what}: a stream is open {END_LIMIT_S:g} s after the hang")
                seconds.append(max(call.ended_s or 0.0 for call in calls) - hung_s - HANG_DEADLINE_S)
                await ring.end(episode)
        await ring.check_stop()
    _raise_if_stuck(outcome)
    worst_s = max(map(max, over_s.values()))
    each = ", ".join(f"{what} {max(seconds):+.2f} s" for what, seconds in over_s.items())
    return [
        Figure(
            "hang found", "≤ deadline + 1 s", f"deadline {each} (the worst of {HANG_ROUNDS})", worst_s <= 1.0, over_s
        )
    ]


# --------------------------------------------------------------------------------------------------------- innocence


async def innocents(options: Options) -> list[Figure]:
    """The storm, with everything that must not be there after it; and the front end's own death."""
    storm = await scenarios.play("storm", options)
    alone = await scenarios.play("orphans", options)
    harmed = [one for one in storm.violations if one.kind in HARM]
    left = [one for one in (*storm.violations, *alone.violations) if one.kind in ("LEAKED", "STRAY")]
    hung = storm.num_hung + alone.num_hung
    num_faults = storm.faults.total()
    enough = num_faults >= min(100, options.num_faults) and storm.num_streams >= min(1000, options.num_streams)
    return [
        Figure(
            "innocents failed or not exact by one fault, replay on",
            "0 of ≥ 1,000 streams over ≥ 100 seeded faults",
            f"{len(harmed)} of {storm.num_streams:,} streams over {num_faults} faults, {storm.num_deaths} deaths "
            f"({storm.num_near_ties} near-ties, {storm.num_convicted} convicted by faults that kill twice)",
            not harmed and enough,
            {"violations": [f"{one.kind}: {one.detail}" for one in storm.violations], "seed": options.seed},
        ),
        Figure(
            "hung streams, leaked blocks, orphans, zombies",
            "0",
            f"{hung} hung, {len(left)} others",
            not hung and not left,
            {"violations": [f"{one.kind}: {one.detail}" for one in (*left, *alone.violations)]},
        ),
    ]


async def poison(options: Options) -> list[Figure]:
    """Six times the same killer, with replay and with `fail`; the worst counts."""
    replay, fail = await scenarios.play("poison", options), await scenarios.play("poison-fail", options)
    counts = {
        f"{action}, {name}": number
        for name, outcome in (("replay", replay), ("fail", fail))
        for action, number in outcome.figures.get("deaths", {}).items()
    }
    violations = [f"{one.kind}: {one.detail}" for one in (*replay.violations, *fail.violations)]
    return [
        Figure(
            "deaths by one poison with five resubmissions",
            "≤ 2",
            ", ".join(f"{name}: {number}" for name, number in counts.items()) or "no result",
            bool(counts) and max(counts.values()) <= 2 and not violations,
            {"violations": violations},
        )
    ]


# ------------------------------------------------------------------------------------------------------------ the rest


async def cancels(options: Options) -> list[Figure]:
    """Growth of the front end's resident memory over the number of streams; the first ones warm it up."""
    outcome = Outcome("cancels")
    points: list[tuple[int, int]] = []
    async with arena(outcome, [*SMALL, *CANCEL_FLAGS], options.seed, options.logs) as ring:
        for number in range(0, NUM_CANCELS_WARM + NUM_CANCELS, 1000):
            if number >= NUM_CANCELS_WARM:
                await ring.check_idle()
                points.append((number - NUM_CANCELS_WARM, ring.server.memory_bytes()))
            await _cancel(ring.client, 1000)
        await ring.check_idle()
        points.append((NUM_CANCELS, ring.server.memory_bytes()))
        await ring.check_stop()
    _raise_if_stuck(outcome)
    each = slope(points)
    leaks = [one for one in outcome.violations if one.kind == "LEAKED"]
    return [
        Figure(
            "memory per cancelled stream, over 20,000",
            "< 64 B",
            f"{each:.1f} B",
            each < 64 and not leaks,
            {"rss_bytes": points, "violations": [one.detail for one in outcome.violations]},
        )
    ]


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Growth per stream: the median over all pairs of points at least half of the way apart (Theil and Sen's).

    Between collections the front end's memory goes up and down by two megabytes, which over 20,000 streams is more than
    what is looked for: two points alone would tell the collector's phase.
    """
    far = (points[-1][0] - points[0][0]) / 2
    return statistics.median((y2 - y1) / (x2 - x1) for x1, y1 in points for x2, y2 in points if x2 - x1 >= far)


async def _cancel(client: Client, count: int) -> None:
    """So many streams whose callers leave: half before the first token, half at it."""
    waiting = iter(range(count))

    async def caller() -> None:
        for number in waiting:
            await client.attempt(Call(asks.leaver(number % 2), time.monotonic()))

    tasks = [asyncio.create_task(caller()) for _ in range(CANCELS_AT_A_TIME)]
    _, late = await asyncio.wait(tasks, timeout=600.0)
    for task in late:
        task.cancel()
    if late:
        raise BenchmarkError("a cancelled stream has no end")


async def sigterm(options: Options) -> list[Figure]:
    """SIGTERM to an idle server with Watches open: how long it takes, and its exit status."""
    del options
    seconds, statuses = [], []
    for _ in range(SIGTERM_ROUNDS):
        async with running(()) as server, connect(server.address) as client, _watches(client) as watches:
            await server.until(lambda watches=watches: all(watches), END_LIMIT_S)  # type: ignore[misc]
            sent_s = server.signal(signal.SIGTERM)
            statuses.append(await server.wait(STOP_LIMIT_S))
            seconds.append(time.monotonic() - sent_s)
    return [
        Figure(
            "SIGTERM idle with three Watches open",
            "≤ 2 s, exit 0",
            f"max {max(seconds):.2f} s, exit {' '.join(sorted({str(status) for status in statuses}))}",
            max(seconds) <= 2.0 and set(statuses) == {0},
            {"seconds": seconds, "statuses": statuses},
        )
    ]


@asynccontextmanager
async def _watches(client: Client) -> AsyncIterator[list[list[tuple[float, str]]]]:
    async with contextlib.AsyncExitStack() as stack:
        names = ("", "readiness", "liveness")[:NUM_WATCHES]
        yield [await stack.enter_async_context(client.watch(name)) for name in names]


async def giving_up(options: Options) -> list[Figure]:
    """The exit status after the last death that is allowed, also with a SIGTERM right after it."""
    outcome = await scenarios.play("giving-up", options)
    statuses = outcome.figures.get("statuses", [])
    return [
        Figure(
            "exit code after giving up, also with a late SIGTERM",
            "4",
            " ".join(map(str, statuses)) or "no result",
            set(statuses) == {4} and not outcome.violations,
            {"violations": [f"{one.kind}: {one.detail}" for one in outcome.violations]},
        )
    ]


def soak_row(outcome: Outcome | None) -> Figure:
    """The one figure that takes an hour."""
    name, to_reach = "false deaths, health transitions in 1 h saturated", "0"
    if outcome is None:
        return Figure(name, to_reach, "scripts/chaos soak --minutes 60", None)
    found = outcome.figures
    return Figure(
        name,
        to_reach,
        f"{found.get('false deaths')} deaths, {found.get('transitions')} transitions in {found.get('minutes')} min, "
        f"{outcome.num_streams:,} streams",
        not outcome.violations,
        {"violations": [f"{one.kind}: {one.detail}" for one in outcome.violations]},
    )


async def saturation(options: Options) -> list[Figure]:
    """The soak, if minutes are given for it."""
    return [soak_row(await soak.soak(options.seed, options.soak_s) if options.soak_s else None)]


def _raise_if_stuck(outcome: Outcome) -> None:
    """A measurement that was broken off measures nothing."""
    broken = [one.detail for one in outcome.violations if one.kind in ("HUNG", "EXIT")]
    if broken:
        raise BenchmarkError(f"{outcome.scenario}: {broken[0]}")


Measure = Callable[[Options], Awaitable[list[Figure]]]
FIGURES: dict[str, Measure] = {
    "deaths": deaths,
    "restart": restart,
    "hangs": hangs,
    "innocents": innocents,
    "poison": poison,
    "cancels": cancels,
    "saturation": saturation,
    "sigterm": sigterm,
    "giving-up": giving_up,
}
