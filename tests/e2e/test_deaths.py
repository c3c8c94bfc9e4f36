"""The engine dies, in every way there is: what callers, probes, logs and the process's owner are told.

Each kind of death happens once for each number of streams, on a server of its own (`aftermath`); the tests below each
look at one side of what was left behind. Latencies are printed, not asserted (`-rP` shows them).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.crowd import MAX_NUM_SEQS, SMALL, Crowd, call_until_gone, endless
from tests.e2e.faults import FaultFile, line_of_injected_error
from tests.e2e.harness import Generation, Health, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CANARY = "Quetzalbramble"
STEP_DEADLINE_S = 5.0
"""Long enough for a busy machine's longest step."""
LIMIT_S = 60.0
"""Whatever takes longer hangs."""
TRACEBACK = "Traceback (most recent call last)"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


# ------------------------------------------------------------------------------------------------------ the deaths


@dataclass(frozen=True)
class Kind:
    """A way to die: how to bring it about, and what the record must say of it."""

    act: Callable[[Server, FaultFile], None]
    signal: str | None = None
    exit_status: int | None = None
    exception_type: str | None = None
    told: str = ""
    """Words that the root cause must hold."""


def _signal(number: signal.Signals) -> Kind:
    return Kind(lambda server, _: os.kill(server.engine_pid(), number), signal=number.name, told=number.name)


def _fault(name: str, **expected: Any) -> Kind:
    return Kind(lambda _, fault: fault.commit(name), **expected)


INJECTED = {"exit_status": 1, "exception_type": "sitecustomize.InjectedError", "told": "a fault made by a test"}
KINDS = {
    "exception": _fault("exception", **INJECTED),
    "thread": _fault("thread", **INJECTED),
    "exit 0": _fault("exit 0", exit_status=0, told="exit status 0"),
    "hang": Kind(
        lambda server, _: os.kill(server.engine_pid(), signal.SIGSTOP), signal="SIGKILL", told="step deadline"
    ),
    **{number.name: _signal(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)},
}
CROWDED = ("exception", "SIGKILL", "hang")
CASES = [*((kind, 3) for kind in KINDS), *((kind, 93) for kind in CROWDED)]


@dataclass
class Aftermath:
    """What was left of one server."""

    kind: Kind
    num_streams: int
    streams: list[Generation]
    probes: list[Generation]
    """New calls, one after another, from the first stream's end until nobody answered."""
    readiness: list[str]
    liveness: list[str]
    """What a Watch was told."""
    exit_status: int
    leftovers: list[int]
    is_port_free: bool
    logs: list[dict[str, Any]]
    stderr: str
    stderr_since: str
    """What was written from the fault on."""
    termination_log: str
    last_stream_s: float
    not_serving_s: float
    exit_s: float
    """From the fault; for `hang` with the step deadline, for what is injected with the rest of a step."""
    fatal_errors: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.fatal_errors = [record for record in self.logs if record.get("event") == "fatal error"]

    @property
    def record(self) -> dict[str, Any]:
        (record,) = self.fatal_errors
        return record

    @property
    def told_probes(self) -> list[Generation]:
        """New calls that reached the server."""
        return [probe for probe in self.probes if probe.status.reason]


def prompt(number: int) -> str:
    return f"Once upon a time, {CANARY} the {number}th "


async def _die(kind: Kind, num_streams: int, folder: Path) -> Aftermath:
    fault = FaultFile(folder)
    termination_log = folder / "termination"
    server = Server(
        env=fault.env,
        step_deadline=STEP_DEADLINE_S,
        termination_log=termination_log,
        max_engine_restarts=0,  # what is restarted is in test_recovery.py
        crash_dir=folder / "crashes",
        **SMALL,
    )
    await asyncio.to_thread(server.__enter__)
    try:
        with (
            ReflectionClient(server.address) as client,
            closing(client.new_channel()) as other_channel,
            client.health.watch("readiness") as readiness,
            client.health.watch("liveness") as liveness,
        ):
            async with Crowd(client, num_streams, lambda number: endless(prompt(number))) as crowd:
                await crowd.until_begun(min(num_streams, MAX_NUM_SEQS))
                assert Health(other_channel).check() == "SERVING"  # connected
                for watch in (readiness, liveness):
                    await asyncio.to_thread(watch.wait_for, "SERVING")
                num_chars_before = len(server.raw_stderr)
                begun_s = time.monotonic()
                kind.act(server, fault)
                await asyncio.wait_for(crowd.first_end.wait(), LIMIT_S)
                probes = asyncio.create_task(asyncio.to_thread(call_until_gone, client, other_channel, CANARY))
                streams = await crowd.until_ended(LIMIT_S)
            exit_status = await asyncio.to_thread(server.wait, LIMIT_S)
            exit_s = time.monotonic() - begun_s
            not_serving_s = readiness.wait_for("NOT_SERVING") - begun_s
            readiness.join()
            liveness.join()
            return Aftermath(
                kind=kind,
                num_streams=num_streams,
                streams=streams,
                probes=await probes,
                readiness=readiness.states,
                liveness=liveness.states,
                exit_status=exit_status,
                leftovers=server.leftovers(),
                is_port_free=_is_free(server.address),
                logs=server.logs,
                stderr=server.raw_stderr,
                stderr_since=server.raw_stderr[num_chars_before:],
                termination_log=termination_log.read_text() if termination_log.exists() else "",
                last_stream_s=max(stream.ended_s for stream in streams) - begun_s,
                not_serving_s=not_serving_s,
                exit_s=exit_s,
            )
    finally:
        await asyncio.to_thread(server.kill)


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind((host, int(port)))
            listener.listen()
            return True
    return False


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Aftermath]:
    """`deaths("SIGKILL", 93)`: the aftermath; each happens when it is first asked for."""
    known: dict[tuple[str, int], Aftermath] = {}

    def get(name: str, num_streams: int) -> Aftermath:
        if (name, num_streams) not in known:
            aftermath = asyncio.run(_die(KINDS[name], num_streams, tmp_path_factory.mktemp("death")))
            known[name, num_streams] = aftermath
            print(
                f"{name}, {num_streams} streams: the last ended after {aftermath.last_stream_s:.3f} s, a Watch heard "
                f"of it after {aftermath.not_serving_s:.3f} s, the process left after {aftermath.exit_s:.3f} s; "
                f"{len(aftermath.told_probes)} new calls told meanwhile"
            )
        return known[name, num_streams]

    return get


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def aftermath(request: pytest.FixtureRequest, deaths: Callable[[str, int], Aftermath]) -> Aftermath:
    return deaths(*request.param)


# ---------------------------------------------------------------------------------------------- what callers are told


def test_every_stream_is_told_of_the_same_death(aftermath: Aftermath) -> None:
    """However the engine ends, each of its streams ends UNAVAILABLE, ENGINE_DEAD, with the death_id of the log."""
    for stream in aftermath.streams:
        stream.expect(UNAVAILABLE, "ENGINE_DEAD")
        assert stream.status.metadata["death_id"] == aftermath.record["death_id"]
        assert stream.status.details_bytes <= 1024
        assert stream.finish is None
        assert stream.usage is None


def test_streams_that_may_have_killed_it_are_not_to_be_retried(aftermath: Aftermath) -> None:
    """A stream that had had output gets pushback −1, which forbids its client library to try again."""
    begun = [stream for stream in aftermath.streams if stream.responses]
    assert len(begun) == min(aftermath.num_streams, MAX_NUM_SEQS)
    assert {stream.status.pushback_ms for stream in begun} == {-1}
    assert {stream.status.retry_delay_s for stream in begun} == {None}


def test_new_calls_are_told_at_once(aftermath: Aftermath) -> None:
    """From the first stream's end on, a new call is told ENGINE_DEAD, the same death_id and when to come back, or finds
    nobody there.
    """
    *told, last = aftermath.probes
    for probe in told:
        probe.expect(UNAVAILABLE, "ENGINE_DEAD")
        assert probe.status.metadata["death_id"] == aftermath.record["death_id"]
        assert probe.status.pushback_ms is not None
        assert probe.status.pushback_ms > 0
    last.expect(UNAVAILABLE)


def test_watchers_of_health_are_told_before_the_end(aftermath: Aftermath) -> None:
    """A Watch of readiness and one of liveness hear NOT_SERVING before the process is gone: it cannot recover."""
    assert aftermath.readiness == ["SERVING", "NOT_SERVING"]
    assert aftermath.liveness == ["SERVING", "NOT_SERVING"]


# ----------------------------------------------------------------------------------------------- what the owner is told


def test_one_record_with_the_root_cause(aftermath: Aftermath) -> None:
    """One `fatal error`, critical, tells the exception with its line, or the signal or exit status; where the engine
    was, and with what.
    """
    kind, record = aftermath.kind, aftermath.record
    assert record["level"] == "critical"
    assert record["signal"] == kind.signal
    assert record["exit_status"] == kind.exit_status
    assert record.get("exception_type") == kind.exception_type
    if kind.exception_type is not None:
        assert line_of_injected_error() in record["traceback"]
        assert record["traceback"].rstrip().endswith(f"{kind.exception_type}: {kind.told}")
    assert kind.exception_type is None or record["phase"] == "EXECUTE"
    assert record["phase"] not in ("", "LOADING", "IDLE", "UNSPECIFIED")
    assert record["step_id"] > 0
    assert f"num_seqs={min(aftermath.num_streams, MAX_NUM_SEQS)} " in str(record["batch"]) + " "
    assert aftermath.num_streams == record["num_streams_ended"]


def test_no_other_traceback(aftermath: Aftermath) -> None:
    """All of stderr is JSON, one object a line, and no traceback is in it but the record's own."""
    for line in aftermath.stderr.splitlines():
        assert isinstance(json.loads(line), dict)
    num_tracebacks = 0 if aftermath.kind.exception_type is None else 1
    assert aftermath.stderr.count(TRACEBACK) == num_tracebacks
    assert json.dumps(aftermath.fatal_errors).count(TRACEBACK) == num_tracebacks


def test_exit_code_and_termination_log(aftermath: Aftermath) -> None:
    """The process gives up with exit code 4 and leaves the root cause, one line, in the termination log."""
    assert aftermath.exit_status == 4
    assert aftermath.kind.told in aftermath.termination_log
    assert aftermath.termination_log.count("\n") == 1
    if aftermath.kind.exception_type is not None:
        assert aftermath.kind.exception_type in aftermath.termination_log


def test_nothing_is_left_behind(aftermath: Aftermath) -> None:
    """No process of the server lives on, and its port is free."""
    assert aftermath.leftovers == []
    assert aftermath.is_port_free


def test_no_users_text_is_told(aftermath: Aftermath) -> None:
    """A word of the prompts is in no log line, no status and not in the termination log."""
    assert CANARY not in aftermath.stderr
    assert CANARY not in aftermath.termination_log
    for call in aftermath.streams + aftermath.probes:
        assert CANARY not in repr(call.status)


@pytest.mark.parametrize("name", CROWDED)
def test_log_volume_does_not_grow_with_the_streams(deaths: Callable[[str, int], Aftermath], name: str) -> None:
    """With 93 streams a death writes as many lines as with 3, and as many bytes, give or take the digits of counts."""
    few, many = deaths(name, 3).stderr_since, deaths(name, 93).stderr_since
    assert many.count("\n") == few.count("\n")
    assert abs(len(many) - len(few)) < 256
    assert len(many) < 16 * 1024


# ------------------------------------------------------------------------------------------------------ special cases


def test_an_engine_that_fails_and_lingers(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """An engine that reports its failure but does not end is killed. Until the process leaves, new calls are told
    ENGINE_DEAD, Check says NOT_SERVING, and a late SIGTERM does not turn exit code 4 into 0. A huge message is cut.
    """
    fault = FaultFile(tmp_path)
    termination_log = tmp_path / "termination"
    server = start_server(env=fault.env, termination_log=termination_log, max_engine_restarts=0, **SMALL)

    told: list[Generation] = []
    states: list[str] = []

    def ask_until_gone(client: ReflectionClient, channel: grpc.Channel) -> None:
        """From before the death on, so that no moment after it is missed."""
        health = Health(channel)
        with contextlib.suppress(grpc.RpcError):
            while (
                call := client.generate(channel=channel, **endless(CANARY, max_tokens=1))
            ).status.reason or call.text:
                if call.status.reason:
                    told.append(call)
                    states.append(health.check("readiness"))

    async def die() -> list[Generation]:
        with ReflectionClient(server.address) as client, closing(client.new_channel()) as other_channel:
            async with Crowd(client, 3, lambda number: endless(prompt(number))) as crowd:
                await crowd.until_begun(3)
                asking = asyncio.create_task(asyncio.to_thread(ask_until_gone, client, other_channel))
                fault.commit("linger")
                await asyncio.wait_for(crowd.first_end.wait(), LIMIT_S)
                server.signal(signal.SIGTERM)
                streams = await crowd.until_ended()
            await asyncio.wait_for(asking, LIMIT_S)
            return streams

    streams = asyncio.run(die())
    assert server.wait(LIMIT_S) == 4
    (record,) = server.fatal_errors
    assert told
    assert set(states) == {"NOT_SERVING"}
    for call in streams + told:
        call.expect(UNAVAILABLE, "ENGINE_DEAD")
        assert call.status.metadata["death_id"] == record["death_id"]
    assert record["exception_type"] == "sitecustomize.InjectedError"
    assert record["signal"] == "SIGKILL"
    assert len(record["message"].encode()) <= 2048 + 8
    assert len(json.dumps(record)) < 32 * 1024
    assert "InjectedError" in record["traceback"]
    assert len(termination_log.read_text()) < 4096
    assert not server.events("draining")
    assert server.leftovers() == []


def test_death_while_loading(tmp_path: Path) -> None:
    """An engine killed before it was ready: exit code 3, one `fatal error`, the root cause in the termination log."""
    termination_log = tmp_path / "termination"
    server = Server(termination_log=termination_log).spawn()
    try:
        server.wait_for_log("engine loading", LIMIT_S)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.wait(LIMIT_S) == 3
        (record,) = server.fatal_errors
        assert record["level"] == "critical"
        assert record["signal"] == "SIGKILL"
        assert record["starting"] is True
        assert "SIGKILL" in termination_log.read_text()
        assert TRACEBACK not in server.raw_stderr
        assert not server.events("serving")
        assert server.leftovers() == []
    finally:
        server.kill()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_the_engine_does_not_outlive_the_front_end(start_server: Callable[..., Server], is_stopped: bool) -> None:
    """When the front end is killed, its engine goes too, even one that is stopped; nothing holds the port."""
    server = start_server(**SMALL)

    async def die() -> list[Generation]:
        with ReflectionClient(server.address) as client:
            async with Crowd(client, 3, lambda number: endless(prompt(number))) as crowd:
                await crowd.until_begun(3)
                if is_stopped:
                    os.kill(server.engine_pid(), signal.SIGSTOP)
                else:
                    assert server.engine_pid()  # known to `leftovers`, too
                server.signal(signal.SIGKILL)
                return await crowd.until_ended()

    for stream in asyncio.run(die()):
        stream.expect(UNAVAILABLE)
    assert server.wait(LIMIT_S) == -signal.SIGKILL
    deadline = time.monotonic() + 30.0
    while server.leftovers():
        assert time.monotonic() < deadline, f"left behind: {server.leftovers()}"
        time.sleep(0.05)
    assert _is_free(server.address)
    assert not server.fatal_errors
