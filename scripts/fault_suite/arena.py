"""A server, its clients and what is done to it: faults are struck one after another, and everything is checked after.

What must live here: the order of a strike (inject, count the deaths, see it serve again), the checks that hold for
every run (nothing leaked, no stray or dead process left over, a clean stop), and the outcome. What must not: single
scenarios (`scenarios.py`), what a client may see (`rules.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import asks, exactness, rules
from scripts.fault_suite.client import Client, connect
from scripts.fault_suite.faults import READY_LIMIT_S, Fault, Target
from scripts.fault_suite.history import Answer, Ask, Call, Episode
from scripts.fault_suite.injected import Triggers
from scripts.fault_suite.rules import Departure, Mode, Violation
from scripts.fault_suite.server import STOP_LIMIT_S, Server, running

SETTLE_S = 0.5
SETTLE_UNSURE_S = 2.0
"""Where it is open how many deaths a fault brings."""
IDLE_LIMIT_S = 20.0
HELPERS_LIMIT_S = 90.0
"""For a helper that was killed to be replaced: it loads a model beside a busy engine."""
ZOMBIE_LOOKS_S = 2.0
PROBE_TRIES_S = 0.1
STRANGE_LINES_SHOWN = 20
SMALL = (
    "--threads=1",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=64",
    "--num-kv-blocks=256",
    "--step-deadline=5",
    "--max-engine-restarts=1000",
    "--drain-grace=60",
)
"""A server that starts soon, whose KV pool is a little too small for its load, and that never gives up."""


@dataclass(slots=True)
class Outcome:
    """What came of one scenario."""

    scenario: str
    violations: list[Violation] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    num_deaths: int = 0
    num_streams: int = 0
    """Asks that came to an end."""
    num_exact: int = 0
    num_cut: int = 0
    num_refused: int = 0
    num_near_ties: int = 0
    num_hung: int = 0
    num_convicted: int = 0
    """Innocents that the second death of one fault made look like killers; see `rules.py`."""
    episodes: list[Episode] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    """From each fault that killed to a probe's end."""
    silence_s_max: float = 0.0
    """The longest that any stream was without a message."""
    wall_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def blame(self, kind: str, detail: str) -> None:
        """One more violation."""
        self.violations.append(Violation(kind, detail))


class Arena:
    """One server with one client, the history of all that was done to it."""

    def __init__(self, server: Server, client: Client, triggers: Triggers, outcome: Outcome, seed: int) -> None:
        self.server = server
        self.client = client
        self.outcome = outcome
        self.triggers = triggers
        self.rng = random.Random(f"{seed} {outcome.scenario}")  # noqa: S311 no secret depends on it
        self.episodes: list[Episode] = []
        self._num_deaths_known = 0
        self._num_engines: int | None = None
        self._departures: list[Departure] = []

    @property
    def target(self) -> Target:
        """For a fault."""
        return Target(self.server, self.client, self.triggers, self.rng)

    async def pool(self, seed: int, num_asks: int, avoid: Sequence[int] = ()) -> list[Ask]:
        """Asks that fit the served model."""
        model = await self.client.unary("InfoService/GetModelInfo")
        return asks.pool(seed, num_asks, model.vocab_size, [*model.eos_token_ids, *avoid])

    # A strike

    async def strike(self, fault: Fault) -> Episode:
        """Do it, and wait until the server serves again."""
        if self._num_engines is None:
            await self.server.until(lambda: bool(self.server.helpers()), HELPERS_LIMIT_S)  # made a while after ready
            self._num_engines = len(self.server.engines())
        self.outcome.faults[fault.name] += 1
        episode = self.begin(fault.name, fault.deaths_min, fault.deaths_max, fault.num_spoiled_max)
        await fault.inject(self.target)
        await self.end(episode)
        return episode

    def begin(self, name: str, deaths_min: int, deaths_max: int, num_spoiled_max: int = 0) -> Episode:
        """From now on refusals are allowed, and deaths are this fault's."""
        episode = Episode(
            name,
            time.monotonic(),
            deaths_min=deaths_min,
            deaths_max=deaths_max,
            num_spoiled_max=num_spoiled_max,
        )
        self.episodes.append(episode)
        return episode

    async def end(self, episode: Episode) -> None:
        """Once it has had its deaths and a probe is served. Raises BenchmarkError if that does not come."""
        known = self._num_deaths_known
        died = await self.server.until(lambda: len(self.server.deaths) >= known + episode.deaths_min, READY_LIMIT_S)
        if died:
            await self.until_served()
            unsure = episode.deaths_max > episode.deaths_min
            await asyncio.sleep(SETTLE_UNSURE_S if unsure else SETTLE_S)
            if unsure:
                await self.until_served()
        deaths = self.server.deaths
        episode.death_ids = [str(record.fields.get("death_id")) for record in deaths[known:]]
        self._num_deaths_known = len(deaths)
        self.outcome.num_deaths += len(episode.death_ids)
        if not died:
            raise BenchmarkError(f"{episode.fault}: no death within {READY_LIMIT_S:g} s\n{self.server.tail}")
        episode.recovered_s = time.monotonic()
        if episode.death_ids:
            self.outcome.recovery_s.append(episode.recovered_s - episode.began_s - SETTLE_S)

    async def until_served(self, limit_s: float = READY_LIMIT_S) -> None:
        """Readiness says so, and a probe stream is. Raises BenchmarkError if the time is up or the server has ended."""
        deadline_s = time.monotonic() + limit_s
        last = "no answer"
        while True:
            if self.server.status is not None:
                raise BenchmarkError(f"the server has ended with status {self.server.status}:\n{self.server.tail}")
            if await self.client.check() == "SERVING":
                call = Call(asks.short(), time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.client.attempt(call), max(0.1, deadline_s - time.monotonic()))
                last = call.status.name if call.status is not None else "open"
                if last == "OK":
                    return
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"no probe is served after {limit_s:g} s: {last}\n{self.server.tail}")
            await asyncio.sleep(PROBE_TRIES_S)

    # What is checked

    async def judge(self, calls: Sequence[Call], answers: Mapping[int, Answer], *, replays: bool) -> None:
        """All calls against the rules; departures are judged by asking the server, which is idle by now."""
        verdict = rules.judge(calls, answers, self.episodes, Mode(replays))
        outcome = self.outcome
        outcome.violations += verdict.violations
        outcome.violations += rules.open_episode_faults(self.episodes)
        outcome.num_exact += verdict.num_exact
        outcome.num_cut += verdict.num_cut
        outcome.num_refused += verdict.num_refused
        outcome.num_convicted += verdict.num_convicted
        outcome.num_hung += sum(call.ended_s is None for call in calls)
        outcome.num_streams += sum(call.ended_s is not None and not call.is_refusal for call in calls)
        outcome.ends += verdict.ends or Counter()
        outcome.silence_s_max = max([outcome.silence_s_max, *map(longest_silence_s, calls)])
        if verdict.departures and self.server.status is None:
            judged = await exactness.judge(self.client, verdict.departures)
            outcome.num_near_ties += judged.num_near_ties
            outcome.num_exact += judged.num_near_ties
            outcome.violations += judged.violations
        elif verdict.departures:
            outcome.blame("CHANGED", f"{len(verdict.departures)} streams depart, and there is no server to ask")

    async def check_idle(self) -> None:
        """Without streams nothing is held: no KV block, no place; each helper that died has a successor."""
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while True:
            load = await self.client.unary("InfoService/GetLoad")
            if not (load.running or load.waiting or load.kv_blocks_used):
                break
            if time.monotonic() > deadline_s:
                text = f"{load.running} running, {load.waiting} waiting, {load.kv_blocks_used} KV blocks"
                self.outcome.blame("LEAKED", f"{text}, and no stream")
                break
            await asyncio.sleep(0.1)
        wanted = self._num_engines
        if wanted is not None and not await self.server.until(
            lambda: len(self.server.engines()) == wanted, HELPERS_LIMIT_S
        ):
            self.outcome.blame("STRAY", f"{len(self.server.engines())} engine processes; there were {wanted}")
        zombies = set(self.server.zombies())
        if zombies:
            await asyncio.sleep(ZOMBIE_LOOKS_S)
            if still := zombies & set(self.server.zombies()):
                self.outcome.blame("STRAY", f"{len(still)} zombies")
        if missing := self.triggers.missing():
            self.outcome.blame("RECORD", f"places that the server's code has not: {', '.join(missing)}")

    async def check_stop(self, status_wanted: int = 0) -> None:
        """SIGTERM: it leaves with that status, takes all with it, and writes no record of a death."""
        num_deaths = len(self.server.deaths)
        self.server.family()
        self.server.signal(signal.SIGTERM)
        status = await self.server.wait(STOP_LIMIT_S)
        await self.check_gone(status, (status_wanted,))
        if len(self.server.deaths) != num_deaths:
            self.outcome.blame("RECORD", "a clean stop wrote `fatal error`")

    async def check_gone(self, status: int | None, wanted: Sequence[int]) -> None:
        """After its end: the status, no process left, the port free, and a log that is JSON lines."""
        if status not in wanted:
            self.outcome.blame(
                "EXIT", f"exit status {status}, not {' or '.join(map(str, wanted))}:\n{self.server.tail}"
            )
        if left := await self.server.leftovers():
            self.outcome.blame("STRAY", f"{len(left)} processes live on after the server")
        if self.server.events("serving") and not self.server.is_port_free(self.server.address):
            self.outcome.blame("STRAY", "the port is still taken")
        if strange := self.server.strange_lines:
            some = "\n".join(line[:200] for line in strange[:STRANGE_LINES_SHOWN])
            self.outcome.blame("RECORD", f"{len(strange)} lines of the log are no records:\n{some}")


def longest_silence_s(call: Call) -> float:
    """Between being sent, messages and the end; what is still open counts up to its last message."""
    moments = [call.sent_s, *(message.at_s for message in call.messages)]
    if call.ended_s is not None:
        moments.append(call.ended_s)
    return max((after - before for before, after in pairwise(moments)), default=0.0)


@asynccontextmanager
async def arena(outcome: Outcome, flags: Sequence[str], seed: int, logs: Path | None = None) -> AsyncIterator[Arena]:
    """A server that serves. What the suite runs into while it does becomes a violation, and what follows goes on."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        triggers = Triggers(Path(folder))
        crash_flag = f"--crash-dir={folder}/crashes"
        async with running([*flags, crash_flag], triggers.environment) as server, connect(server.address) as client:
            ring = Arena(server, client, triggers, outcome, seed)
            try:
                yield ring
            except BenchmarkError as error:
                outcome.blame("HUNG" if server.status is None else "EXIT", str(error))
            finally:
                outcome.episodes += ring.episodes
                if logs is not None:
                    _keep_log(server, logs, outcome.scenario)


def _keep_log(server: Server, folder: Path, scenario: str) -> None:
    """All its records, for a person; what a client saw at a moment is found by `read_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"read_s": round(record.at_s, 3), **record.fields}) + "\n" for record in server.records]
    (folder / f"{scenario}-{server.pid}.jsonl").write_text("".join(lines), encoding="utf-8")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """For the file."""
    return {
        "scenario": outcome.scenario,
        "violations": [{"kind": one.kind, "detail": one.detail} for one in outcome.violations],
        "faults": dict(outcome.faults),
        "deaths": outcome.num_deaths,
        "streams": outcome.num_streams,
        "exact": outcome.num_exact,
        "cut": outcome.num_cut,
        "refused": outcome.num_refused,
        "near_ties": outcome.num_near_ties,
        "hung": outcome.num_hung,
        "convicted": outcome.num_convicted,
        "episodes": [
            {
                "fault": one.fault,
                "began_s": one.began_s,
                "took_s": None if one.recovered_s == float("inf") else one.recovered_s - one.began_s,
                "death_ids": one.death_ids,
            }
            for one in outcome.episodes
        ],
        "ends": dict(outcome.ends),
        "recovery_s": outcome.recovery_s,
        "silence_s_max": outcome.silence_s_max,
        "wall_s": outcome.wall_s,
        "figures": json.loads(json.dumps(outcome.figures)),
    }
