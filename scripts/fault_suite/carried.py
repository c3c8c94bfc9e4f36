"""Whole servers die, and the project's own client carries its streams through it: the scenario `client`.

Everywhere else the suite speaks to servers as a stranger would; here the client is what is under test. Two servers, all
streams open at once; one after another a server is killed, front end and all, with as many streams in the middle of
their text as can be, and comes back on its port. No caller sees an error, and the judge finds each stream to be what an
undisturbed server says.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from google.protobuf import json_format

from emberline.client import AsyncClient, EmberlineError, Resume
from emberline.v1 import inference_pb2
from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import asks, exactness, rules
from scripts.fault_suite.arena import SMALL, Outcome, longest_silence_s
from scripts.fault_suite.client import connect
from scripts.fault_suite.history import Answer, Ask, Call, Message, Status
from scripts.fault_suite.load import reference
from scripts.fault_suite.server import START_LIMIT_S, Server, running, spawned

STREAMS_MAX = 200
DEATHS_MAX = 3
FLAGS = (*SMALL, "--max-num-seqs=64", "--num-kv-blocks=1024")
RESUME = Resume(outage_s_max=240.0)
END_LIMIT_S = 900.0
MIDWAY_LIMIT_S = 120.0
TOKENS_BEFORE_DEATH = 2
"""Each of the streams that a death is to hit has had at least as many, anew since the last one."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of it."""

    num_streams: int
    num_deaths: int
    num_asks: int
    seed: int

    @property
    def num_midway(self) -> int:
        """So many streams are in the middle of their text when a server dies, or all that are left."""
        return max(1, self.num_streams // 12)


async def carried(size: Size, outcome: Outcome) -> None:
    """The scenario."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running(FLAGS)) for _ in range(2)]
        addresses = [server.address for server in servers]
        async with connect(addresses[0]) as judge:
            model = await judge.unary("InfoService/GetModelInfo")
            pool = asks.pool(size.seed, size.num_asks, model.vocab_size, model.eos_token_ids)
            answers = await reference(judge, pool, 8)
        load = _Streams(addresses, size, pool, answers)
        try:
            for number in range(size.num_deaths):
                await load.until_midway(size.num_midway)
                place = number % len(servers)
                outcome.figures[f"open_at_death_{number + 1}"] = load.num_open
                outcome.faults["kill a server"] += 1
                servers[place].family()
                servers[place].signal(signal.SIGKILL)
                await _expect_gone(servers[place])
                _, _, port = addresses[place].rpartition(":")
                servers[place] = await stack.enter_async_context(spawned(FLAGS, port=int(port)))
                await servers[place].wait_for("serving", START_LIMIT_S)
            await load.until_ended()
        finally:
            await load.stop()
            outcome.figures |= load.figures()
            await _judge(outcome, load.calls, answers, addresses[0])


class _Streams:
    """All streams, written down as any other client's."""

    def __init__(self, addresses: Sequence[str], size: Size, pool: Sequence[Ask], answers: dict[int, Answer]) -> None:
        self._client = AsyncClient(addresses, resume=RESUME)
        chosen = asks.stream(size.seed, pool, answers, leavers=0.0)
        self.calls = [Call(next(chosen), time.monotonic()) for _ in range(size.num_streams)]
        self._num_resumes = dict.fromkeys(range(size.num_streams), 0)
        self._tasks = [asyncio.create_task(self._read(number, call)) for number, call in enumerate(self.calls)]

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return sum(call.ended_s is None for call in self.calls)

    def figures(self) -> dict[str, int]:
        """What the client did that its callers did not see."""
        resumes = self._num_resumes.values()
        return {
            "streams_resumed": sum(number > 0 for number in resumes),
            "attempts_after_the_first": sum(resumes),
            "attempts_after_the_first_max": max(resumes),
        }

    async def until_midway(self, count: int) -> None:
        """So many streams, or all that are open, have had some tokens since now. Raises BenchmarkError."""
        had = [len(call.token_ids) for call in self.calls]
        deadline_s = time.monotonic() + MIDWAY_LIMIT_S
        while True:
            midway = sum(
                call.ended_s is None and len(call.token_ids) >= before + TOKENS_BEFORE_DEATH
                for call, before in zip(self.calls, had, strict=True)
            )
            if midway >= min(count, self.num_open):
                break
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{midway} streams go on, with {self.num_open} open")
            await asyncio.sleep(0.02)
        if not self.num_open:
            raise BenchmarkError("all streams have ended before the last death: there was nothing to carry")

    async def until_ended(self) -> None:
        """Each of them has; what has not by then hangs."""
        await asyncio.wait(self._tasks, timeout=END_LIMIT_S)

    async def stop(self) -> None:
        """Those that are open stay so in the history."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def _read(self, number: int, call: Call) -> None:
        request = json_format.ParseDict(dict(call.ask.fields), inference_pb2.GenerateRequest())
        call.sent_s = time.monotonic()
        stream = self._client.generate(request)
        try:
            async for delta in stream:
                self._num_resumes[number] = stream.num_resumes
                call.messages.append(
                    Message(
                        at_s=time.monotonic(),
                        text=delta.text,
                        token_ids=tuple(token.id for token in delta.tokens),
                        index=delta.index,
                        has_prompt=delta.prompt is not None,
                        finish_reason=None if delta.finish is None else delta.finish.reason,
                        usage_completion=None if delta.usage is None else delta.usage.completion,
                    )
                )
        except EmberlineError as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            call.status = Status(error.code.name, error.reason, error.death_id or "", None, f"{error.message} {notes}")
        else:
            call.status = Status("OK")
        call.ended_s = time.monotonic()


async def _expect_gone(server: Server) -> None:
    """Before another one takes its port. Raises BenchmarkError."""
    await server.wait(10.0)
    if left := await server.leftovers():
        raise BenchmarkError(f"{len(left)} processes live on after a server that was killed")


async def _judge(outcome: Outcome, calls: Sequence[Call], answers: dict[int, Answer], address: str) -> None:
    verdict = rules.judge(calls, answers, [], rules.Mode(replays=True))
    outcome.violations += verdict.violations
    outcome.num_exact += verdict.num_exact
    outcome.num_hung += sum(call.ended_s is None for call in calls)
    outcome.num_streams += sum(call.ended_s is not None for call in calls)
    outcome.num_deaths += outcome.faults.total()
    outcome.silence_s_max = max(map(longest_silence_s, calls))
    if verdict.ends is not None:
        outcome.ends += verdict.ends
    if verdict.departures:
        async with connect(address) as judge:
            judged = await exactness.judge(judge, verdict.departures)
        outcome.num_near_ties += judged.num_near_ties
        outcome.num_exact += judged.num_near_ties
        outcome.violations += judged.violations
    print(f"  {json.dumps(outcome.figures)}", flush=True)
