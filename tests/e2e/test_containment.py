"""One bad request harms only itself: what raises in a step is contained, what kills is found; neighbours do not notice.

All against `scripts/serve` with the real model; faults are put into the engine process from outside (`faults`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.crowd import SMALL, Crowd
from tests.e2e.faults import FaultFile
from tests.e2e.harness import Generation, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 120.0
POISON = 31_337
"""A token of the vocabulary that no innocent prompt here has, nor any innocent output."""
NUM_INNOCENTS = 4
StartServer = Callable[..., Server]


def story(number: int) -> dict[str, Any]:
    return {
        "text": f"Story {number}. Once upon a time there was a",
        "sampling": {"temperature": 0, "logit_bias": {str(POISON): -100}},
        "stopping": {"max_tokens": 48, "ignore_eos": True},
        "output": {"token_ids": True},
    }


def poison(**fields: Any) -> dict[str, Any]:
    return {"token_ids": {"ids": [1, POISON, 2]}, "stopping": {"max_tokens": 8}, **fields}


def references(client: ReflectionClient) -> list[list[int]]:
    """What the innocents say undisturbed."""
    return [client.generate(**story(number)).expect_ok().token_ids for number in range(NUM_INNOCENTS)]


def in_the_crowd(client: ReflectionClient, act: Callable[[], Any]) -> tuple[list[Generation], Any]:
    """The innocents' streams, and what `act` (run once all have begun) returned."""

    async def run() -> tuple[list[Generation], Any]:
        async with Crowd(client, NUM_INNOCENTS, story) as crowd:
            await crowd.until_begun(NUM_INNOCENTS)
            result = await asyncio.to_thread(act)
            return await crowd.until_ended(LIMIT_S), result

    return asyncio.run(run())


def test_a_step_that_raises_once_harms_nobody(start_server: StartServer, tmp_path: Path) -> None:
    """The step is dropped and made again in halves; every stream is what it would have been; no engine died."""
    fault = FaultFile(tmp_path)
    server = start_server(env=fault.env, **SMALL)
    engine_pid = server.engine_pid()
    with ReflectionClient(server.address) as client:
        before = references(client)
        streams, _ = in_the_crowd(client, lambda: fault.commit("once"))
        assert [stream.expect_ok().token_ids for stream in streams] == before
        assert client.load().kv_blocks_used == 0
    assert server.events("step contained")
    assert not server.fatal_errors
    assert server.engine_pid() == engine_pid


def test_a_request_that_raises_fails_alone(start_server: StartServer, tmp_path: Path) -> None:
    """INTERNAL, POISON_REQUEST, never to be retried; its neighbours do not notice; no engine died."""
    fault = FaultFile(tmp_path)
    server = start_server(env=fault.env, **SMALL)
    engine_pid = server.engine_pid()
    with ReflectionClient(server.address) as client:
        before = references(client)
        fault.commit(f"poison raise {POISON}")
        streams, culprit = in_the_crowd(client, lambda: client.generate(**poison()))
        culprit.expect(grpc.StatusCode.INTERNAL, "POISON_REQUEST")
        assert culprit.status.pushback_ms == -1
        assert [stream.expect_ok().token_ids for stream in streams] == before
        assert client.load().kv_blocks_used == 0
    assert not server.fatal_errors
    assert server.engine_pid() == engine_pid


@pytest.mark.parametrize("resumes", [False, True], ids=["fail", "replay"])
def test_one_poison_kills_twice_at_most(start_server: StartServer, tmp_path: Path, resumes: bool) -> None:
    """A request that kills the process, sent five times: at most two deaths, then it is refused. The innocents are on
    replay and lose nothing.
    """
    fault = FaultFile(tmp_path)
    server = start_server(env=fault.env, on_engine_death="replay", standby=1, **SMALL)
    with ReflectionClient(server.address) as client:
        before = references(client)
        fault.commit(f"poison kill {POISON}")

        def resubmit() -> list[Generation]:
            ends: list[Generation] = []
            deadline = time.monotonic() + LIMIT_S
            while len(ends) < 5:
                assert time.monotonic() < deadline
                end = client.generate(**poison(resume_on_engine_death=resumes))
                if end.status.reason == "ENGINE_STARTING" or (end.status.pushback_ms or 0) > 0:
                    time.sleep(0.1)  # not served yet: no submission
                else:
                    ends.append(end)
            return ends

        streams, ends = in_the_crowd(client, resubmit)
        assert ends[-1].status.reason == "POISON_REQUEST"
        assert ends[-1].code is grpc.StatusCode.INTERNAL
        assert {end.status.pushback_ms for end in ends} == {-1}
        assert [stream.expect_ok().token_ids for stream in streams] == before
    assert len(server.fatal_errors) <= 2
    assert server.fatal_errors[-1]["killer"] is not None


def test_a_kill_from_outside_convicts_nobody(start_server: StartServer) -> None:
    """The only stream there is, twice in a dying step, goes on."""
    server = start_server(on_engine_death="replay", standby=1, **SMALL)
    with ReflectionClient(server.address) as client:
        fields = story(0) | {"stopping": {"max_tokens": 200, "ignore_eos": True}}
        before = client.generate(**fields).expect_ok()

        async def run() -> list[Generation]:
            async with Crowd(client, 1, lambda _: fields) as crowd:
                await crowd.until_begun(1)
                for count in (1, 2):
                    os.kill(await asyncio.to_thread(server.engine_pid), signal.SIGKILL)
                    await asyncio.to_thread(server.wait_for_log, "engine ready", LIMIT_S, count + 1)
                    await asyncio.sleep(1.0)
                return await crowd.until_ended(LIMIT_S)

        (stream,) = asyncio.run(run())
        assert stream.expect_ok().token_ids == before.token_ids
    assert len(server.fatal_errors) == 2
