"""The service recovers by itself: engines die and are replaced, streams go on or are told, health tells the truth.

All against `scripts/serve` with the real model and real signals. How fast it is, `scripts/chaos` measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.crowd import SMALL, Crowd
from tests.e2e.harness import ROOT, Generation, Health, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 120.0
"""Whatever takes longer hangs."""
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
StartServer = Callable[..., Server]


def story(number: int, max_tokens: int = 48, **fields: Any) -> dict[str, Any]:
    """A stream that takes a while: greedy, or of its own seed if the number is odd."""
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "text": f"Story {number}. Once upon a time there was a",
        "sampling": sampling,
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
        "output": {"token_ids": True},
        **fields,
    }


def several_stories(number: int) -> dict[str, Any]:
    """The same, but one of them of three sequences."""
    fields = story(number)
    return fields | {"sampling": {**fields["sampling"], "n": 3}} if number == 3 else fields


def by_index(generation: Generation) -> dict[int, tuple[list[int], str]]:
    """Tokens and text of each sequence."""
    sequences: dict[int, tuple[list[int], str]] = {}
    for response in generation.responses:
        token_ids, text = sequences.get(response.index, ([], ""))
        sequences[response.index] = [*token_ids, *(token.id for token in response.tokens)], text + response.text
    return sequences


async def crowd_of(
    client: ReflectionClient, server: Server, num_streams: int, make: Callable[[int], dict[str, Any]] = story
) -> list[Generation]:
    """The streams, their engine killed once all have begun."""
    async with Crowd(client, num_streams, make) as crowd:
        await crowd.until_begun(num_streams)
        os.kill(await asyncio.to_thread(server.engine_pid), signal.SIGKILL)
        return await crowd.until_ended(LIMIT_S)


def wait_until_ready(server: Server, count: int) -> None:
    """Until an engine was ready for the `count`th time."""
    server.wait_for_log("engine ready", LIMIT_S, count=count)


def served(client: ReflectionClient, **fields: Any) -> Generation:
    """A call that is tried until it is served."""
    deadline = time.monotonic() + LIMIT_S
    while (generation := client.generate(**fields)).code is UNAVAILABLE:
        assert generation.status.pushback_ms is not None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return generation.expect_ok()


def test_replayed_streams_are_what_they_would_have_been(start_server: StartServer) -> None:
    """Streams whose engine is killed go on: the same tokens as without the death, each index once, one usage; each of
    several sequences in one stream, too.
    """
    server = start_server(on_engine_death="replay", **SMALL)
    with ReflectionClient(server.address) as client:
        undisturbed = [client.generate(**several_stories(number)).expect_ok() for number in range(5)]
        streams = asyncio.run(crowd_of(client, server, 5, several_stories))
        for before, after in zip(undisturbed, streams, strict=True):
            after.expect_ok()
            assert by_index(after) == by_index(before)
            assert after.usage.completion == before.usage.completion
        assert client.load().kv_blocks_used == 0
    (record,) = server.fatal_errors
    assert record["num_streams_ended"] == 0
    assert record["num_streams_replayed"] == 5


def test_without_replay_streams_end_and_the_next_engine_serves(start_server: StartServer, tmp_path: Path) -> None:
    """The default: UNAVAILABLE and never to be retried for those of the dying step; soon another engine serves; the
    death left one record and one crash report, which `emberline autopsy` can tell.
    """
    server = start_server(crash_dir=tmp_path, **SMALL)
    with ReflectionClient(server.address) as client:
        for stream in asyncio.run(crowd_of(client, server, 4)):
            stream.expect(UNAVAILABLE, "ENGINE_DEAD")
            assert stream.status.pushback_ms == -1
        assert served(client, **story(1, max_tokens=8)).token_ids
        engine = client.stub("InfoService/GetServerInfo")(client.request("InfoService/GetServerInfo")).engines[0]
        assert engine.pid == server.engine_pid()
    (record,) = server.fatal_errors
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert report["death_id"] == record["death_id"]
    assert "Once upon a time" not in path.read_text()
    assert str(path) == record["crash_report"]
    told = subprocess.run([ROOT / ".venv/bin/emberline", "autopsy", path], capture_output=True, text=True, check=True)
    assert "SIGKILL" in told.stdout
    assert record["death_id"] in told.stdout
    assert told.stdout.count("\n") <= 40


def test_a_stream_may_choose(start_server: StartServer) -> None:
    """`resume_on_engine_death` of the request beats the server's default, both ways."""
    server = start_server(on_engine_death="replay", **SMALL)
    with ReflectionClient(server.address) as client:

        def fields(number: int) -> dict[str, Any]:
            return story(number, **({} if number % 2 else {"resume_on_engine_death": False}))

        async def run() -> list[Generation]:
            async with Crowd(client, 4, fields) as crowd:
                await crowd.until_begun(4)
                os.kill(await asyncio.to_thread(server.engine_pid), signal.SIGKILL)
                return await crowd.until_ended(LIMIT_S)

        for number, stream in enumerate(asyncio.run(run())):
            if number % 2:
                stream.expect_ok()
            else:
                stream.expect(UNAVAILABLE, "ENGINE_DEAD")


def test_a_client_can_resume_by_itself(start_server: StartServer) -> None:
    """From the tokens it holds and the seed it was told, on the next engine: the rest is what would have followed."""
    server = start_server(**SMALL)
    with ReflectionClient(server.address) as client:
        whole = client.generate(**story(0)).expect_ok()
        (broken,) = asyncio.run(crowd_of(client, server, 1, lambda n: story(n, resume_on_engine_death=False)))
        broken.expect(UNAVAILABLE, "ENGINE_DEAD")
        held = broken.token_ids
        assert held
        assert held == whole.token_ids[: len(held)]
        rest = served(client, **story(0), resume_token_ids=held)
        assert held + rest.token_ids == whole.token_ids


def test_health_through_deaths(start_server: StartServer) -> None:
    """With one engine each death is exactly two transitions of readiness, for every one of many watchers; liveness
    never moves. (`scripts/chaos` has ten deaths and 2,000 watchers.)
    """
    num_deaths, num_watchers = 3, 200
    server = start_server(standby=1, **SMALL)
    expected = ["SERVING", *["NOT_SERVING", "SERVING"] * num_deaths]

    async def watch_all() -> tuple[list[list[str]], list[str]]:
        with ReflectionClient(server.address) as client, client.health.watch("liveness") as liveness:
            channels = [client.aio_channel() for _ in range(4)]
            heard: list[list[str]] = [[] for _ in range(num_watchers)]
            watching = asyncio.gather(
                *(
                    _watch(channels[n % 4], ("readiness", "")[n % 2], len(expected), states)
                    for n, states in enumerate(heard)
                )
            )
            async with asyncio.timeout(LIMIT_S):
                # Whoever comes after a death has not seen what was before it.
                while not all(heard):  # noqa: ASYNC110 - 200 lists, and nobody to set an event
                    await asyncio.sleep(0.01)
            for number in range(1, num_deaths + 1):
                os.kill(await asyncio.to_thread(server.engine_pid), signal.SIGKILL)
                await asyncio.to_thread(wait_until_ready, server, number + 1)
            await asyncio.wait_for(watching, LIMIT_S)
            for channel in channels:
                await channel.close()
            return heard, liveness.states

    heard, liveness = asyncio.run(watch_all())
    assert all(states == expected for states in heard)
    assert liveness == ["SERVING"]
    assert len(server.fatal_errors) == num_deaths


async def _watch(channel: grpc.aio.Channel, service: str, count: int, states: list[str]) -> None:
    """Puts the first `count` states that a Watch is told into `states`."""
    stub = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    async for update in call:
        states.append(health_pb2.HealthCheckResponse.ServingStatus.Name(update.status))
        if len(states) == count:
            call.cancel()
            break


def test_two_replicas(start_server: StartServer) -> None:
    """A death costs one replica's share: readiness stays SERVING, the other's streams do not notice, and with replay
    nobody loses anything.
    """
    server = start_server(replicas=2, on_engine_death="replay", **SMALL)
    with ReflectionClient(server.address) as client, client.health.watch("readiness") as readiness:
        undisturbed = [client.generate(**story(number)).expect_ok().token_ids for number in range(6)]
        streams = asyncio.run(crowd_of(client, server, 6))
        assert [stream.expect_ok().token_ids for stream in streams] == undisturbed
        wait_until_ready(server, 3)
        assert readiness.states == ["SERVING"]
    (record,) = server.fatal_errors
    assert 0 < record["num_streams_replayed"] < 6


def test_the_standby_and_its_own_death(start_server: StartServer) -> None:
    """A killed standby is replaced and is no engine death; the next one takes over."""
    server = start_server(standby=1, **SMALL)
    server.wait_for_log("standby ready", LIMIT_S)
    (standby,) = server.spare_pids()
    os.kill(standby, signal.SIGKILL)
    server.wait_for_log("standby ready", LIMIT_S, count=2)
    assert not server.fatal_errors
    (standby,) = server.spare_pids()
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until_ready(server, 2)
    assert server.engine_pid() == standby
    with ReflectionClient(server.address) as client:
        assert client.generate(**story(2, max_tokens=4)).expect_ok().token_ids


def test_a_hung_engine_is_replaced_and_its_streams_go_on(start_server: StartServer) -> None:
    """SIGSTOP in mid-stream: found at the step deadline, killed, replaced; replayed streams are whole."""
    server = start_server(on_engine_death="replay", step_deadline=2, standby=1, **SMALL)
    server.wait_for_log("standby ready", LIMIT_S)
    with ReflectionClient(server.address) as client:
        undisturbed = [client.generate(**story(number)).expect_ok().token_ids for number in range(3)]

        async def run() -> list[Generation]:
            async with Crowd(client, 3, story) as crowd:
                await crowd.until_begun(3)
                os.kill(await asyncio.to_thread(server.engine_pid), signal.SIGSTOP)
                return await crowd.until_ended(LIMIT_S)

        assert [stream.expect_ok().token_ids for stream in asyncio.run(run())] == undisturbed
    (record,) = server.fatal_errors
    assert "step deadline" in record["cause"]


@pytest.mark.parametrize("late", [False, True], ids=["alone", "late SIGTERM"])
def test_the_window_spent_is_exit_4(start_server: StartServer, tmp_path: Path, late: bool) -> None:
    """More deaths than allowed: exit code 4 with the root cause in the termination log, whatever signal comes late."""
    termination_log = tmp_path / "termination"
    server = start_server(max_engine_restarts=1, standby=1, termination_log=termination_log, **SMALL)
    with ReflectionClient(server.address) as client, client.health.watch("liveness") as liveness:
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until_ready(server, 2)
        assert liveness.states == ["SERVING"]
        os.kill(server.engine_pid(), signal.SIGKILL)
        liveness.wait_for("NOT_SERVING", LIMIT_S)
        if late:
            server.signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 4
    assert "SIGKILL" in termination_log.read_text()
    assert len(server.fatal_errors) == 2
    assert server.leftovers() == []


def test_calls_while_the_next_engine_loads_are_told(start_server: StartServer) -> None:
    """Between two engines each new call is answered at once: UNAVAILABLE, with the time to come back."""
    server = start_server(**SMALL)
    with ReflectionClient(server.address) as client, closing(client.new_channel()) as other:
        os.kill(server.engine_pid(), signal.SIGKILL)
        reasons = set()
        deadline = time.monotonic() + LIMIT_S
        while (call := client.generate(channel=other, **story(2, max_tokens=2))).code is UNAVAILABLE:
            assert time.monotonic() < deadline
            reasons.add(call.status.reason)
            assert (call.status.pushback_ms or 0) != 0
            assert Health(other).check("liveness") == "SERVING"
        call.expect_ok()
    assert reasons <= {"ENGINE_DEAD", "ENGINE_STARTING"}
    assert "ENGINE_STARTING" in reasons
