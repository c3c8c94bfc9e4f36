"""Stopping is not dying: what a stop signal does, and what it must not do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import grpc
import pytest

from tests.e2e.crowd import MAX_NUM_SEQS, SMALL, Crowd, call_until_gone, endless
from tests.e2e.harness import Generation, Health, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 60.0
"""Whatever takes longer hangs."""
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def _story(number: int) -> str:
    return f"Story number {number} begins on a quiet morning when"


def expect_clean_stop(server: Server) -> None:
    """Exit code 0, nobody left, and nothing that looks like a death."""
    assert server.wait(LIMIT_S) == 0
    assert server.fatal_errors == []
    assert [record for record in server.logs if record["level"] in ("error", "critical")] == []
    assert "Traceback" not in server.raw_stderr
    assert server.leftovers() == []


def expect_refused(client: ReflectionClient) -> None:
    """A new call is told DRAINING and when to come back."""
    refused = client.generate(**endless("Too late", max_tokens=1), timeout_s=LIMIT_S)
    refused.expect(UNAVAILABLE, "DRAINING")
    assert refused.status.pushback_ms is not None
    assert refused.status.pushback_ms > 0
    assert refused.status.retry_delay_s == pytest.approx(refused.status.pushback_ms / 1000)


def test_streams_finish_after_sigterm(start_server: Callable[..., Server]) -> None:
    """SIGTERM with 20 streams, some of them waiting: all end OK with all their tokens. A new connection is told
    NOT_SERVING, that the process lives, and DRAINING. Two open Watches do not delay the end.
    """
    num_tokens = 60
    server = start_server(drain_grace=300, **SMALL)

    async def stop() -> tuple[list[Generation], float]:
        with (
            ReflectionClient(server.address) as client,
            client.health.watch("readiness") as readiness,
            client.health.watch("liveness") as liveness,
        ):
            await asyncio.to_thread(readiness.wait_for, "SERVING")
            await asyncio.to_thread(liveness.wait_for, "SERVING")
            async with Crowd(client, 20, lambda number: endless(_story(number), num_tokens)) as crowd:
                await crowd.until_begun(MAX_NUM_SEQS)
                server.signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for_log, "draining")
                with ReflectionClient(server.address) as newcomer:
                    for name in ("", "readiness", "emberline.v1.InferenceService"):
                        assert newcomer.health.check(name) == "NOT_SERVING"
                    assert newcomer.health.check("liveness") == "SERVING"
                    expect_refused(newcomer)
                    assert newcomer.load().running > 0
                streams = await crowd.until_ended(240.0)
            ended_s = time.monotonic()
            await asyncio.to_thread(server.wait, LIMIT_S)
            exit_s = time.monotonic() - ended_s
            readiness.join()
            assert readiness.states == ["SERVING", "NOT_SERVING"]
            return streams, exit_s

    streams, exit_s = asyncio.run(stop())
    print(f"exit {exit_s:.3f} s after the last stream's end")
    for stream in streams:
        stream.expect_ok()
        assert len(stream.token_ids) == num_tokens
        assert stream.finish_reason == "MAX_TOKENS"
        assert stream.usage.completion == num_tokens
    expect_clean_stop(server)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_drains(number: signal.Signals, start_server: Callable[..., Server]) -> None:
    """A terminal's Ctrl-C reaches groups, a service manager's SIGTERM the engine too: streams still finish."""
    server = start_server(**SMALL)

    async def stop() -> list[Generation]:
        with ReflectionClient(server.address) as client:
            async with Crowd(client, 3, lambda number: endless(_story(number), 30)) as crowd:
                await crowd.until_begun(3)
                os.kill(server.engine_pid(), number)
                os.killpg(server.pid, number)
                return await crowd.until_ended(240.0)

    for stream in asyncio.run(stop()):
        assert len(stream.expect_ok().token_ids) == 30
    expect_clean_stop(server)


@dataclass
class Cut:
    """A server that was told to stop while its streams had far too much to say."""

    streams: list[Generation]
    refused: list[Generation]
    """New calls from then on, until nobody answered."""
    exit_s: float
    """From the last signal."""

    def expect_all_told(self) -> None:
        """Streams and new calls alike are UNAVAILABLE, to the last moment: never CANCELLED, which nobody retries."""
        *refused, last = self.refused
        for call in self.streams + refused:
            call.expect(UNAVAILABLE, "DRAINING")
        assert refused
        last.expect(UNAVAILABLE)


def _cut(server: Server, num_signals: int) -> Cut:
    async def stop() -> Cut:
        with ReflectionClient(server.address) as client, closing(client.new_channel()) as other_channel:
            assert Health(other_channel).check() == "SERVING"
            async with Crowd(client, 3, lambda number: endless(_story(number))) as crowd:
                await crowd.until_begun(3)
                server.signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for_log, "draining")
                refused = asyncio.create_task(
                    asyncio.to_thread(call_until_gone, client, other_channel, "Too late to begin")
                )
                if num_signals == 2:
                    server.signal(signal.SIGTERM)
                signalled_s = time.monotonic()
                streams = await crowd.until_ended()
            await asyncio.to_thread(server.wait, LIMIT_S)
            exit_s = time.monotonic() - signalled_s
            return Cut(streams, await refused, exit_s)

    return asyncio.run(stop())


def test_a_second_signal_does_not_wait(start_server: Callable[..., Server]) -> None:
    """After a second SIGTERM the streams are told UNAVAILABLE and the process ends, whatever grace is left."""
    server = start_server(drain_grace=3600, **SMALL)
    cut = _cut(server, num_signals=2)
    print(f"exit {cut.exit_s:.3f} s after the second signal; {len(cut.refused)} calls refused meanwhile")
    cut.expect_all_told()
    expect_clean_stop(server)


def test_the_grace_ends(start_server: Callable[..., Server]) -> None:
    """Streams that are not done when --drain-grace is over end UNAVAILABLE, and the stop is a clean one."""
    server = start_server(drain_grace=0.5, **SMALL)
    cut = _cut(server, num_signals=1)
    print(f"exit {cut.exit_s:.3f} s after the signal, of which 0.5 s are grace; {len(cut.refused)} calls refused")
    cut.expect_all_told()
    expect_clean_stop(server)


def test_an_engine_that_dies_in_the_drain(start_server: Callable[..., Server]) -> None:
    """A death is a death while draining, too: ENGINE_DEAD to the streams, one `fatal error`, and exit code 4 if it was
    the last one allowed.
    """
    server = start_server(drain_grace=3600, max_engine_restarts=0, **SMALL)

    async def die() -> list[Generation]:
        with ReflectionClient(server.address) as client:
            async with Crowd(client, 3, lambda number: endless(_story(number))) as crowd:
                await crowd.until_begun(3)
                server.signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for_log, "draining")
                os.kill(server.engine_pid(), signal.SIGKILL)
                return await crowd.until_ended()

    for stream in asyncio.run(die()):
        stream.expect(UNAVAILABLE, "ENGINE_DEAD")
    assert server.wait(LIMIT_S) == 4
    (record,) = server.fatal_errors
    assert record["signal"] == "SIGKILL"
    assert server.leftovers() == []


@pytest.mark.parametrize("event", ["engine starting", "engine loading"])
def test_sigterm_while_loading(event: str) -> None:
    """A server told to stop before it serves stops: exit code 0, no `fatal error`, nobody left."""
    server = Server().spawn()
    try:
        server.wait_for_log(event, LIMIT_S)
        assert server.engine_pid()
        server.signal(signal.SIGTERM)
        expect_clean_stop(server)
        assert not server.events("serving")
    finally:
        server.kill()
