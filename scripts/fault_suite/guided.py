"""Guided outputs at temperature 1, each with a random schema of its own, beside guides that are malformed or explode.

What is checked: every output ends by itself, is JSON and fulfils its schema, as a validator that is not ours judges it;
the malformed and the explosive are told so; the neighbours, who have no guide, get what they get alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema

from scripts.fault_suite import asks, schemas
from scripts.fault_suite.arena import SMALL, Arena, Outcome, arena
from scripts.fault_suite.history import Ask, Call
from scripts.fault_suite.load import Load, reference

NUM_CLIENTS = 8
NUM_NEIGHBOURS = 3
MAX_TOKENS = 1024
CALL_LIMIT_S = 600.0
FIRST_SEED = 1000


async def guided(num_outputs: int, seed: int, outcome: Outcome) -> None:
    """`num_outputs` of them; the history goes to `outcome`."""
    async with arena(outcome, SMALL, seed) as ring:
        pool = await ring.pool(seed, 8)
        answers = await reference(ring.client, pool, 4)
        await _first(ring)
        neighbours = Load(ring.client, asks.stream(seed, pool, answers), NUM_NEIGHBOURS)
        neighbours.start()
        pests = [
            asyncio.create_task(_pester(ring, make, name))
            for name, make in (("malformed", schemas.malformed), ("explosive", schemas.explosive))
        ]
        try:
            began_s = time.monotonic()
            num_valid = await _all(ring, range(seed + FIRST_SEED, seed + FIRST_SEED + num_outputs))
            outcome.figures["seconds"] = round(time.monotonic() - began_s, 1)
        finally:
            for pest in pests:
                pest.cancel()
            await asyncio.gather(*pests, return_exceptions=True)
            await neighbours.stop()
            await ring.judge(neighbours.calls, answers, replays=False)
        outcome.figures["valid"] = f"{num_valid} of {num_outputs}"
        if ring.server.deaths:
            outcome.blame("RECORD", f"{len(ring.server.deaths)} engine deaths")
        await ring.check_idle()
        await ring.check_stop()


async def _first(ring: Arena) -> None:
    """The very first guided output starts the compiler's process; what that costs is a figure."""
    for name in ("first", "second", "cached"):
        guide = {"json_schema": json.dumps(schemas.random_schema(1 if name == "first" else 2))}
        call = await _ask(ring, 0, guide, stopping={"max_tokens": 1})
        assert call.ended_s is not None
        ring.outcome.figures[f"{name} guide s"] = round(call.ended_s - call.sent_s, 3)


async def _all(ring: Arena, seeds: range) -> int:
    waiting = iter(seeds)
    verdicts: list[bool] = []

    async def work() -> None:
        for seed in waiting:
            schema = schemas.random_schema(seed)
            call = await _ask(ring, seed, {"json_schema": json.dumps(schema)})
            fault = fault_of(call, schema)
            verdicts.append(fault is None)
            if fault is not None:
                ring.outcome.blame("GUIDED", f"schema {seed}: {fault}")

    await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
    return sum(verdicts)


def fault_of(call: Call, schema: dict[str, Any]) -> str | None:
    """What is wrong with an output; None: nothing."""
    if call.status is None or call.status.code != "OK":
        return f"it ended {call.status.name if call.status else 'never'}"
    if (reason := call.messages[-1].finish_reason) != "EOS":
        return f"its finish is {reason}"
    try:
        jsonschema.validate(json.loads("".join(message.text for message in call.messages)), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return " ".join(str(error).split())[:300]
    return None


async def _pester(ring: Arena, make: Callable[[int], dict[str, Any]], name: str) -> None:
    """One such guide after the other, each another one, until cancelled."""
    ends: Counter[str] = Counter()
    ring.outcome.figures[name] = ends
    for number in itertools.count():
        call = await _ask(ring, number, make(number))
        end = call.status.name if call.status is not None else "open"
        ends[end] += 1
        if call.status is None or call.status.code != "INVALID_ARGUMENT":
            ring.outcome.blame("GUIDED", f"a guide that is {name} ended {end}")
        await asyncio.sleep(0.5)


async def _ask(ring: Arena, seed: int, guide: dict[str, Any], **fields: Any) -> Call:
    request: dict[str, Any] = {
        "text": "The record, as JSON: ",
        "sampling": {"temperature": 1.0, "seed": str(seed)},
        "stopping": {"max_tokens": MAX_TOKENS},
        "guided": guide,
    }
    call = Call(Ask(seed, {**request, **fields}), time.monotonic())
    async with asyncio.timeout(CALL_LIMIT_S):
        return await ring.client.attempt(call)
