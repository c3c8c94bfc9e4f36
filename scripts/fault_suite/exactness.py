"""Whether a stream that departs from the undisturbed answer departs at a near-tie: the design's meaning of "exact".

A plain greedy stream is scored whole by transformers (`teacher.py`, a process of its own). For every other one the
server itself is asked, after the faults: the two tokens at the departure are nudged by a bias of TIE in all, once in
favour of the one, once of the other. If each nudge decides, they were that close; else the stream was changed. A draw
without filters goes by groups of neighbouring ids in this server, so the whole group is nudged if the token alone does
not do it. What follows the departure is then compared with what the server says after the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite.client import Client
from scripts.fault_suite.history import Ask, Call
from scripts.fault_suite.rules import Departure, Violation, first_difference

TIE = 1e-3
"""Logits closer than this may change places with the shape of the batch."""
DEPARTURES_MAX = 8
"""Near-ties in one stream, after each of which its own continuation is followed."""
TEACHER_LIMIT_S = 900.0
GROUP = 256
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of the departures."""

    num_near_ties: int
    violations: list[Violation]


def model_directory() -> Path:
    """The default model as scripts/install made it."""
    return Path(os.environ.get("EMBERLINE_CACHE", "~/.cache/emberline")).expanduser() / "models" / DEFAULT_MODEL


async def judge(client: Client, departures: Sequence[Departure]) -> Judged:
    """Near-ties and changes. The server must be undisturbed and otherwise idle."""
    violations: list[Violation] = []
    greedy = [one for one in departures if is_plain_greedy(one.call.ask)]
    faults = await _teacher(client, greedy) if greedy else []
    for one, fault in zip(greedy, faults, strict=True):
        if fault:
            violations.append(Violation("CHANGED", _describe(one, fault)))
    for one in departures:
        if not is_plain_greedy(one.call.ask):
            fault = await _nudged(client, one)
            if fault:
                violations.append(Violation("CHANGED", _describe(one, fault)))
    return Judged(len(departures) - len(violations), violations)


def is_plain_greedy(ask: Ask) -> bool:
    """The best token at each position, and nothing else."""
    return dict(ask.fields["sampling"]) == {"temperature": 0}


def _describe(departure: Departure, fault: str) -> str:
    ids, expected, place = departure.call.token_ids, departure.answer.token_ids, departure.position
    got, wanted = list(ids[place : place + 4]), list(expected[place : place + 4])
    return f"ask {departure.call.ask.number}: from token {place} on {got} instead of {wanted}; {fault}"


# ------------------------------------------------------------------------------------------------- the teacher's word


async def _teacher(client: Client, departures: Sequence[Departure]) -> list[str]:
    """One sentence per stream; empty if each of its tokens may be what the model says."""
    jobs = [
        {"prompt_ids": await _prompt_ids(client, one.call.ask), "output_ids": list(one.call.token_ids)}
        for one in departures
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scripts.fault_suite.teacher",
        str(model_directory()),
        str(TIE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(json.dumps(jobs).encode()), TEACHER_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BenchmarkError(f"the teacher took more than {TEACHER_LIMIT_S:g} s") from None
    if process.returncode != 0:
        raise BenchmarkError(f"the teacher ended with status {process.returncode}")
    verdicts: list[str] = json.loads(output)
    return verdicts


async def _prompt_ids(client: Client, ask: Ask) -> list[int]:
    if "token_ids" in ask.fields:
        return list(ask.fields["token_ids"]["ids"])
    answer = await client.unary("TokenizerService/Tokenize", text=ask.fields["text"])
    return list(answer.ids)


# ----------------------------------------------------------------------------------------------------------- the nudge


async def _nudged(client: Client, departure: Departure) -> str:
    """Why the stream is not exact; empty if it departs at near-ties only."""
    call, ids = departure.call, departure.call.token_ids
    expected, position = departure.answer.token_ids, departure.position
    for _ in range(DEPARTURES_MAX):
        if position >= len(expected):
            return f"it goes on for {len(ids) - position} tokens after the end"
        if not await _is_near_tie(client, call.ask, ids[:position], ids[position], expected[position]):
            return "this is no near-tie"
        following = await _continuation(client, call.ask, ids[: position + 1])
        expected = (*ids[: position + 1], *following)
        departed = first_difference(ids, expected)
        if departed is None:
            return ""
        position = departed
    return f"it departs at {DEPARTURES_MAX} places"


async def _is_near_tie(client: Client, ask: Ask, prefix: Sequence[int], got: int, wanted: int) -> bool:
    for group in (1, GROUP):
        towards_got = await _next_token(client, ask, prefix, got, wanted, group)
        towards_wanted = await _next_token(client, ask, prefix, wanted, got, group)
        if (towards_got, towards_wanted) == (got, wanted):
            return True
    return False


async def _next_token(
    client: Client, ask: Ask, prefix: Sequence[int], better: int, worse: int, group: int
) -> int | None:
    """The token after `prefix` if one is worth half a TIE more and the other half a TIE less."""
    bias: dict[str, float] = {}
    for token_id, value in ((worse, -TIE / 2), (better, TIE / 2)):
        first = token_id - token_id % group
        bias |= {str(other): value for other in range(first, first + group)}
    sampling = {**ask.fields["sampling"], "logit_bias": bias}
    answer = await _resume(client, ask, prefix, len(prefix) + 1, {"sampling": sampling})
    return answer[0] if answer else None


async def _continuation(client: Client, ask: Ask, prefix: Sequence[int]) -> tuple[int, ...]:
    return await _resume(client, ask, prefix, ask.max_tokens, {})


async def _resume(
    client: Client, ask: Ask, prefix: Sequence[int], max_tokens: int, changes: dict[str, Any]
) -> tuple[int, ...]:
    stopping = {**ask.fields["stopping"], "max_tokens": max_tokens}
    fields = {**ask.fields, "stopping": stopping, "resume_token_ids": list(prefix), **changes}
    call = await client.attempt(Call(replace(ask, fields=fields, leave_after_tokens=None), time.monotonic()))
    if call.status is None or call.status.code != "OK":
        raise BenchmarkError(f"the undisturbed server refuses to go on: {call.status}")
    return call.token_ids
