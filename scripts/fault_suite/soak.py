"""An hour of too much work on too few cores, and nothing else: an engine that is only slow is not dead."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import asks
from scripts.fault_suite.arena import Outcome, arena
from scripts.fault_suite.load import Load, reference

NUM_CLIENTS = 96
"""More than --max-num-seqs: there is always somebody waiting."""
NUM_ASKS = 64
NUM_SPINNERS = 1
LOOK_S = 1.0
FLAGS = ("--on-engine-death=replay",)
"""Defaults otherwise: the deadline is the one that a user gets."""
SPIN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


async def soak(seed: int, seconds: float) -> Outcome:
    """So long; every death is a false one, every health transition after the first too."""
    outcome = Outcome("soak")
    async with arena(outcome, FLAGS, seed) as ring, ring.client.watch("readiness") as states:
        pool = await ring.pool(seed, NUM_ASKS)
        answers = await reference(ring.client, pool, 16)
        streams = Load(ring.client, asks.stream(seed, pool, answers), NUM_CLIENTS)
        async with spinners(NUM_SPINNERS, seconds + 60.0):
            began_s = time.monotonic()
            streams.start()
            try:
                while time.monotonic() - began_s < seconds:
                    await asyncio.sleep(LOOK_S)
                    streams.check_progress()
                    if ring.server.status is not None:
                        raise BenchmarkError(f"the server has ended with status {ring.server.status}")
            finally:
                await streams.stop()
                outcome.num_deaths = len(ring.server.deaths)
                outcome.figures["minutes"] = round((time.monotonic() - began_s) / 60, 1)
                outcome.figures["false deaths"] = outcome.num_deaths
                outcome.figures["transitions"] = len(states) - 1
                await ring.judge(streams.calls, answers, replays=True)
        if outcome.num_deaths:
            outcome.blame("RECORD", f"{outcome.num_deaths} deaths of an engine that was only slow")
        if [state for _, state in states] != ["SERVING"]:
            outcome.blame("HEALTH", f"readiness: {[state for _, state in states]}")
        await ring.check_idle()
        await ring.check_stop()
    return outcome


@asynccontextmanager
async def spinners(number: int, seconds: float) -> AsyncIterator[None]:
    """Other work on the cores; it ends with the block, or by itself after so long."""
    running = [await asyncio.create_subprocess_exec(sys.executable, "-ISc", SPIN, str(seconds)) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            await process.wait()
