"""What is done to a server, from its start to its end. Each scenario has servers of its own and gives one `Outcome`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import asks, carried, faults, http2, rules
from scripts.fault_suite import guided as guides
from scripts.fault_suite.arena import SMALL, Arena, Outcome, arena
from scripts.fault_suite.client import connect
from scripts.fault_suite.history import Call, Episode
from scripts.fault_suite.load import Load, reference
from scripts.fault_suite.server import START_LIMIT_S, running, spawned

REPLAY = "--on-engine-death=replay"
FAIL = "--on-engine-death=fail"
BEGIN_LIMIT_S = 120.0
END_LIMIT_S = 120.0
SHARE_LIMIT_S = 60.0
"""Between two faults; where the machine is too slow for that, the streams come after the last fault."""
POISON_RESUBMISSIONS = 5
POISON_ACTIONS = ("kill", "abort", "raise")
POISON_TOKEN_IDS = (23_456, 23_457, 23_458)
NUM_HEALTH_DEATHS = 10
NUM_WATCHERS = 2000
GUIDED_OUTPUTS_MAX = 200
HEALTH_PATH = "grpc.health.v1.Health/Watch"


@dataclass(frozen=True, slots=True)
class Options:
    """How much of it."""

    seed: int = 0
    num_faults: int = 100
    num_streams: int = 1000
    """At least so many come to an end in a storm."""
    num_asks: int = 96
    num_clients: int = 12
    time_limit_s: float = 7200.0
    """Of one storm."""
    only: tuple[str, ...] = ()
    """Storms of these faults alone, in turn."""
    standby: bool = True
    logs: Path | None = None
    """Where the servers' logs are kept."""
    soak_s: float = 0.0
    """Of the one figure that takes an hour; 0: leave it out."""


Scenario = Callable[[Options, Outcome], Awaitable[None]]


async def play(name: str, options: Options) -> Outcome:
    """One scenario. What the suite itself runs into, such as a server that does not start, is a violation too."""
    outcome = Outcome(name)
    began_s = time.monotonic()
    try:
        await SCENARIOS[name](options, outcome)
    except BenchmarkError as error:
        outcome.blame("EXIT", str(error))
    outcome.wall_s = time.monotonic() - began_s
    return outcome


# ------------------------------------------------------------------------------------------------------------- storms


async def storm(options: Options, outcome: Outcome) -> None:
    """Every fault there is, with replay: no stream notices."""
    standby = ("--standby=1",) if options.standby else ()
    await _storm(outcome, options, (REPLAY, *standby), replays=True)


async def storm_cold(options: Options, outcome: Outcome) -> None:
    """A tenth of it without a standby: streams outlast whole restarts."""
    fewer = replace(options, num_faults=max(4, options.num_faults // 10), num_streams=options.num_streams // 10)
    await _storm(outcome, fewer, (REPLAY,), replays=True)


async def storm_fail(options: Options, outcome: Outcome) -> None:
    """A quarter of it with `fail`: streams end UNAVAILABLE, and nothing else happens to anyone."""
    fewer = replace(options, num_faults=max(4, options.num_faults // 4), num_streams=options.num_streams // 10)
    await _storm(outcome, fewer, (FAIL,), replays=False)


async def _storm(outcome: Outcome, options: Options, flags: Sequence[str], *, replays: bool) -> None:
    if options.only:
        plan = [faults.named(options.only[n % len(options.only)]) for n in range(options.num_faults)]
    else:
        plan = faults.schedule(options.seed, options.num_faults)
    async with arena(outcome, [*SMALL, *flags], options.seed, options.logs) as ring:
        pool = await ring.pool(options.seed, options.num_asks)
        answers = await reference(ring.client, pool, options.num_clients)
        streams = Load(ring.client, asks.stream(options.seed, pool, answers), options.num_clients)
        streams.start()
        try:
            await _strike_all(ring, streams, plan, options)
        finally:
            await streams.stop()
            await ring.judge(streams.calls, answers, replays=replays)
        await ring.check_idle()
        await ring.check_stop()


async def _strike_all(ring: Arena, streams: Load, plan: Sequence[faults.Fault], options: Options) -> None:
    deadline_s = time.monotonic() + options.time_limit_s
    for place, fault in enumerate(plan):
        # Streams are spread over the faults: between them some go by undisturbed, and a helper may get ready.
        share = options.num_streams * place // len(plan)
        await ring.server.until(lambda share=share: streams.num_ended >= share, SHARE_LIMIT_S)  # type: ignore[misc]
        await _until_live(ring, streams, options.num_clients // 3)
        await asyncio.sleep(ring.rng.uniform(0.1, 1.0))
        episode = await ring.strike(fault)
        streams.check_progress()
        # One fault at a time: the next one does not come while somebody is on trial for this one.
        await _until_moved_on(ring, streams, episode)
        _say(
            f"  {place + 1} of {len(plan)}: {fault.name}: {len(episode.death_ids)} deaths, "
            f"{episode.recovered_s - episode.began_s:.1f} s; {streams.num_ended} streams so far"
        )
        if time.monotonic() > deadline_s:
            raise BenchmarkError(f"{place + 1} of {len(plan)} faults within the time limit")
    while streams.num_ended < options.num_streams:
        await asyncio.sleep(0.5)
        streams.check_progress()
        if time.monotonic() > deadline_s:
            raise BenchmarkError(f"{streams.num_ended} of {options.num_streams} streams within the time limit")


# -------------------------------------------------------------------------------------------------------------- poison


async def poison(options: Options, outcome: Outcome) -> None:
    """A request that kills, aborts or raises, sent six times among innocents, with replay."""
    await _poison(outcome, options, (REPLAY, "--standby=1"), replays=True)


async def poison_fail(options: Options, outcome: Outcome) -> None:
    """The same with `fail`: found by its fingerprint."""
    await _poison(outcome, options, (FAIL,), replays=False)


async def _poison(outcome: Outcome, options: Options, flags: Sequence[str], *, replays: bool) -> None:
    deaths: dict[str, int] = {}
    async with arena(outcome, [*SMALL, *flags], options.seed, options.logs) as ring:
        pool = await ring.pool(options.seed, min(32, options.num_asks), POISON_TOKEN_IDS)
        answers = await reference(ring.client, pool, options.num_clients)
        streams = Load(ring.client, asks.stream(options.seed, pool, answers), options.num_clients)
        streams.start()
        culprits: list[Call] = []
        try:
            for number, (action, token_id) in enumerate(zip(POISON_ACTIONS, POISON_TOKEN_IDS, strict=True)):
                ring.triggers.poison(token_id, action)
                episode = ring.begin(f"poison: {action}", 0 if action == "raise" else 1, 0 if action == "raise" else 2)
                for _ in range(1 + POISON_RESUBMISSIONS):
                    await asyncio.wait_for(
                        ring.client.attempt_until_taken(asks.poison(-10 - number, token_id), culprits), END_LIMIT_S
                    )
                await ring.end(episode)
                ring.outcome.faults[episode.fault] += 1
                deaths[action] = len(episode.death_ids)
                streams.check_progress()
            ring.triggers.cure()
        except TimeoutError:
            outcome.blame("HUNG", "a poison request has no end")
        finally:
            await streams.stop()
            await ring.judge([*streams.calls, *culprits], answers, replays=replays)
        for call in culprits:
            if call.status is not None and call.status.code == "OK":
                outcome.blame("BAD END", "a poison request ended OK: nothing was proved")
        outcome.figures["deaths"] = deaths
        outcome.figures["ends"] = [call.status.name if call.status else "open" for call in culprits]
        await ring.check_idle()
        await ring.check_stop()


# ------------------------------------------------------------------------------------------------- starting and ending


async def starting(options: Options, outcome: Outcome) -> None:
    """The engine is killed in the first start: exit 3, one record."""
    del options
    async with spawned(SMALL) as server:
        try:
            record = await server.wait_for("engine starting", START_LIMIT_S)
            await asyncio.sleep(0.5)
            server.signal_engine(signal.SIGKILL, int(record.fields["pid"]))
            status = await server.wait(END_LIMIT_S)
        except BenchmarkError as error:
            outcome.blame("EXIT", str(error))
            return
        outcome.faults["kill in the first start"] += 1
        if status != 3:
            outcome.blame("EXIT", f"exit status {status}, not 3:\n{server.tail}")
        outcome.num_deaths = len(server.deaths)
        if outcome.num_deaths != 1:
            outcome.blame("RECORD", f"{outcome.num_deaths} `fatal error` records of one death")
        if left := await server.leftovers():
            outcome.blame("STRAY", f"{len(left)} processes live on after the server")


async def draining(options: Options, outcome: Outcome) -> None:
    """SIGTERM with streams: they end well, newcomers are told. Once more, and the engine is killed meanwhile."""
    for flags, with_death in (((FAIL,), False), ((FAIL,), True), ((REPLAY, "--standby=1"), True)):
        async with arena(outcome, [*SMALL, *flags], options.seed, options.logs) as ring:
            await _drain(ring, options, with_death=with_death, is_saved=with_death and REPLAY in flags)


async def _drain(ring: Arena, options: Options, *, with_death: bool, is_saved: bool) -> None:
    outcome, server = ring.outcome, ring.server
    pool = [ask for ask in await ring.pool(options.seed, 24) if ask.max_tokens >= 16][:6]
    answers = await reference(ring.client, pool, 6)
    streams = [asyncio.create_task(ring.client.attempt(Call(ask, time.monotonic()))) for ask in pool]
    await asyncio.sleep(0.5)
    episode = ring.begin("kill while draining" if with_death else "drain", 0, 1 if with_death else 0)
    server.family()
    server.signal(signal.SIGTERM)
    outcome.faults[episode.fault] += 1
    refused = await _until_draining(ring)
    if with_death and server.status is None:
        with contextlib.suppress(BenchmarkError):  # it may be gone by now
            server.signal_engine(signal.SIGKILL)
    _, late = await asyncio.wait(streams, timeout=END_LIMIT_S)
    for task in late:
        task.cancel()
        outcome.blame("HUNG", "a stream is open after the drain")
        outcome.num_hung += 1
    calls = [task.result() for task in streams if task not in late]
    status = await server.wait(END_LIMIT_S)
    await ring.check_gone(status, (0, 4) if with_death and not is_saved else (0,))
    episode.recovered_s = time.monotonic()
    episode.death_ids = [str(record.fields.get("death_id")) for record in server.deaths]
    outcome.num_deaths += len(episode.death_ids)
    if refused is not None and (refused.status is None or not refused.is_refusal):
        outcome.blame("BAD END", f"a newcomer of the drain was told {refused.status}")
    # With `fail` a dying engine's streams end UNAVAILABLE; replayed ones go on while the server drains.
    is_lost = with_death and not is_saved
    kept = [call for call in calls if not (is_lost and call.status and call.status.code == "UNAVAILABLE")]
    verdict = rules.judge(kept, answers, [episode], rules.Mode(replays=True))
    outcome.violations += verdict.violations
    outcome.violations += rules.open_episode_faults([episode])
    outcome.violations += [
        rules.Violation(
            "CHANGED", f"ask {one.call.ask.number} departs at {one.position}, and there is no server to ask"
        )
        for one in verdict.departures
    ]
    outcome.num_streams += len(calls)
    outcome.num_exact += verdict.num_exact


async def _until_draining(ring: Arena) -> Call | None:
    """A newcomer that is told no; None if the server has left before."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while ring.server.status is None and time.monotonic() < deadline_s:
        if await ring.client.check() == "NOT_SERVING":
            call = Call(asks.short(), time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ring.client.attempt(call), END_LIMIT_S)
            # Without a reason it found nobody: the server has left.
            return call if call.status is None or call.status.reason else None
        await asyncio.sleep(0.01)
    return None


async def giving_up(options: Options, outcome: Outcome) -> None:
    """Deaths until the window is spent: exit 4, with a late SIGTERM too, at once or after one restart."""
    statuses = []
    for num_restarts, late_sigterm in ((0, False), (0, True), (1, False), (1, True)):
        flags = (*SMALL, f"--max-engine-restarts={num_restarts}", FAIL)
        async with arena(outcome, flags, options.seed, options.logs) as ring:
            for number in range(num_restarts + 1):
                is_last = number == num_restarts
                calls = [Call(asks.fresh(), time.monotonic()) for _ in range(3)]
                tasks = [asyncio.create_task(ring.client.attempt(call)) for call in calls]
                await _until_begun(ring, calls)
                episode = ring.begin("last death" if is_last else "death", 1, 1)
                ring.server.family()
                ring.server.signal_engine(signal.SIGKILL)
                outcome.faults[episode.fault] += 1
                await asyncio.wait(tasks, timeout=END_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
                if is_last and late_sigterm:
                    ring.server.signal(signal.SIGTERM)
                await _collect_ends(ring, tasks)
                if not is_last:
                    await ring.end(episode)
            status = await ring.server.wait(END_LIMIT_S)
            statuses.append(status)
            await ring.check_gone(status, (4,))
            outcome.num_deaths = len(ring.server.deaths)
            if len(ring.server.deaths) != num_restarts + 1:
                outcome.blame("RECORD", f"{len(ring.server.deaths)} `fatal error` records of {num_restarts + 1} deaths")
    outcome.figures["statuses"] = statuses


async def _collect_ends(ring: Arena, tasks: Sequence[asyncio.Task[Call]]) -> None:
    """Streams of a death with `fail`: each ends UNAVAILABLE ENGINE_DEAD."""
    _, late = await asyncio.wait(tasks, timeout=END_LIMIT_S)
    for task in tasks:
        if task in late:
            task.cancel()
            ring.outcome.num_hung += 1
            ring.outcome.blame("HUNG", "a stream of a dead engine is open")
        else:
            status = task.result().status
            name = status.name if status else "open"
            ring.outcome.ends[name] += 1
            ring.outcome.num_streams += 1
            if name != "UNAVAILABLE ENGINE_DEAD":
                ring.outcome.blame("BAD END", f"a stream of a dead engine ended {name}")


async def orphans(options: Options, outcome: Outcome) -> None:
    """SIGKILL to the front end, whatever the engine does: nothing is left, and a relaunch serves on the same port."""
    for what in ("busy", "stopped", "holds the gil", "starting"):
        async with arena(outcome, [*SMALL, "--standby=1"], options.seed, options.logs) as ring:
            server, address = ring.server, ring.server.address
            calls = [Call(asks.fresh(), time.monotonic()) for _ in range(3)]
            tasks = [asyncio.create_task(ring.client.attempt(call)) for call in calls]
            await _until_begun(ring, calls)
            if what == "stopped":
                server.signal_engine(signal.SIGSTOP)
            elif what == "holds the gil":
                ring.triggers.commit("forward", "hold the gil")
                await _until_done(ring, "forward")
            elif what == "starting":
                server.signal_engine(signal.SIGKILL)
                await asyncio.sleep(0.7)
            server.family()
            server.signal(signal.SIGKILL)
            outcome.faults[f"front end killed, engine {what}"] += 1
            _, late = await asyncio.wait(tasks, timeout=END_LIMIT_S)
            for task in late:
                task.cancel()
                outcome.num_hung += 1
                outcome.blame("HUNG", f"engine {what}: a stream outlives the front end")
            await ring.check_gone(await server.wait(END_LIMIT_S), (-signal.SIGKILL,))
            if what == "busy":
                await _relaunch(outcome, address)


async def _relaunch(outcome: Outcome, address: str) -> None:
    async with running(SMALL, port=int(address.rpartition(":")[2])) as server, connect(server.address) as client:
        call = await client.attempt(Call(asks.short(), time.monotonic()))
        if call.status is None or call.status.code != "OK":
            outcome.blame("BAD END", f"the relaunch answers {call.status}")


async def signals(options: Options, outcome: Outcome) -> None:
    """SIGTERM to the whole group lets streams finish; a second signal ends it soon; both are clean stops."""
    for twice in (False, True):
        async with arena(outcome, [*SMALL, "--standby=1"], options.seed, options.logs) as ring:
            server = ring.server
            some = [asks.fresh(2000 if twice else 48) for _ in range(3)]
            calls = [Call(ask, time.monotonic()) for ask in some]
            tasks = [asyncio.create_task(ring.client.attempt(call)) for call in calls]
            await _until_begun(ring, calls)
            server.family()
            os.killpg(server.pid, signal.SIGTERM)  # its session is its own
            outcome.faults["SIGTERM to the group" + (", twice" if twice else "")] += 1
            if twice:
                await asyncio.sleep(0.5)
                os.killpg(server.pid, signal.SIGTERM)
            _, late = await asyncio.wait(tasks, timeout=END_LIMIT_S)
            for task in late:
                task.cancel()
                outcome.blame("HUNG", "a stream is open after the stop")
            if not twice:
                bad = [task.result().status for task in tasks if task not in late]
                outcome.violations += [
                    rules.Violation("BAD END", f"a stream of the drain ended {status}")
                    for status in bad
                    if status is None or status.code != "OK"
                ]
            await ring.check_gone(await server.wait(END_LIMIT_S), (0,))
            if server.deaths:
                outcome.blame("RECORD", "a clean stop wrote `fatal error`")


# ------------------------------------------------------------------------------------------------------------- health


async def health(options: Options, outcome: Outcome) -> None:
    """Ten deaths, many watchers, one that does not read: exactly two transitions each, and the same ones for all."""
    async with arena(outcome, [*SMALL, FAIL], options.seed, options.logs) as ring, contextlib.AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(ring.client.watch("readiness")) for _ in range(NUM_WATCHERS)]
        alive = await stack.enter_async_context(ring.client.watch("liveness"))
        request = b"\x0a\x09readiness"  # field 1, nine bytes
        await stack.enter_async_context(http2.stalled_readers(ring.server.address, HEALTH_PATH, request, 4))
        await ring.server.until(lambda: all(watches), BEGIN_LIMIT_S)
        for _ in range(NUM_HEALTH_DEATHS):
            await ring.strike(faults.named("kill"))
        wanted = ["SERVING", *["NOT_SERVING", "SERVING"] * NUM_HEALTH_DEATHS]
        await ring.server.until(lambda: all(len(states) >= len(wanted) for states in watches), 10.0)
        wrong = [[state for _, state in states] for states in watches if [state for _, state in states] != wanted]
        if wrong:
            outcome.blame("HEALTH", f"{len(wrong)} of {NUM_WATCHERS} watchers saw other transitions: {wrong[0]}")
        if [state for _, state in alive] != ["SERVING"]:
            outcome.blame("HEALTH", f"liveness: {[state for _, state in alive]}")
        outcome.figures["transitions"] = len(wanted) - 1
        outcome.violations += rules.open_episode_faults(ring.episodes)
        await ring.check_idle()
        await stack.aclose()
        await ring.check_stop()


async def replicas(options: Options, outcome: Outcome) -> None:
    """Two engines: a death costs one share, or with replay nothing; readiness never changes."""
    for mode in (FAIL, REPLAY):
        flags = [*SMALL, mode, "--replicas=2"]
        async with arena(outcome, flags, options.seed, options.logs) as ring, ring.client.watch("readiness") as states:
            await _until_replicas(ring, 2)
            pool = await ring.pool(options.seed, min(24, options.num_asks))
            answers = await reference(ring.client, pool, 8)
            streams = Load(ring.client, asks.stream(options.seed, pool, answers), 8)
            streams.start()
            try:
                for number in range(4):
                    await _until_live(ring, streams, 4)
                    episode = ring.begin("kill a replica", 1, 1)
                    ring.server.signal_engine(signal.SIGKILL, ring.server.engine_pid(number % 2))
                    outcome.faults[episode.fault] += 1
                    died_s = episode.began_s
                    await ring.end(episode)
                    await ring.server.wait_for("engine ready", faults.READY_LIMIT_S, since_s=died_s)
                    streams.check_progress()
                    await _until_moved_on(ring, streams, episode)
            finally:
                await streams.stop()
                await ring.judge(streams.calls, answers, replays=mode == REPLAY)
            if [state for _, state in states] != ["SERVING"]:
                outcome.blame("HEALTH", f"readiness while a replica lives: {[state for _, state in states]}")
            await ring.check_idle()
            await ring.check_stop()


async def guided(options: Options, outcome: Outcome) -> None:
    """Random schemas at temperature 1, beside guides that are malformed or explode: every output is valid."""
    await guides.guided(min(options.num_streams, GUIDED_OUTPUTS_MAX), options.seed, outcome)


async def client(options: Options, outcome: Outcome) -> None:
    """The project's own client carries its streams through the deaths of whole servers."""
    size = carried.Size(
        num_streams=min(options.num_streams, carried.STREAMS_MAX),
        num_deaths=min(options.num_faults, carried.DEATHS_MAX),
        num_asks=options.num_asks,
        seed=options.seed,
    )
    await carried.carried(size, outcome)


async def _until_moved_on(ring: Arena, streams: Load, episode: Episode) -> None:
    await ring.server.until(lambda: streams.has_moved_on(episode.recovered_s), SHARE_LIMIT_S)


async def _until_replicas(ring: Arena, count: int) -> None:
    if not await ring.server.until(lambda: len(ring.server.serving_pids()) == count, START_LIMIT_S):
        raise BenchmarkError(f"{len(ring.server.serving_pids())} of {count} engines serve")


async def _until_begun(ring: Arena, calls: Sequence[Call]) -> None:
    """Each has had a message. Raises BenchmarkError if that does not come."""
    if not await ring.server.until(lambda: all(call.messages for call in calls), BEGIN_LIMIT_S):
        raise BenchmarkError("streams do not begin")


async def _until_done(ring: Arena, place: str) -> None:
    if not await ring.server.until(lambda: ring.triggers.is_done(place), BEGIN_LIMIT_S):
        raise BenchmarkError(f"no process of the server came to the place {place!r}")


async def _until_live(ring: Arena, streams: Load, count: int) -> None:
    """So many streams have begun; where they are too short for that, in vain, and not for long."""
    await ring.server.until(lambda: streams.num_live >= count, 30.0)


SCENARIOS: dict[str, Scenario] = {
    "storm": storm,
    "storm-cold": storm_cold,
    "storm-fail": storm_fail,
    "poison": poison,
    "poison-fail": poison_fail,
    "starting": starting,
    "draining": draining,
    "giving-up": giving_up,
    "orphans": orphans,
    "signals": signals,
    "health": health,
    "replicas": replicas,
    "guided": guided,
    "client": client,
}


def _say(text: str) -> None:
    print(text, flush=True)
