"""The engine's life, with a real process and made-up tokens: see `fake_engine.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler.flight_record import FlightRecord
from scheduler.messages import Phase, Ready
from service.engine_client import EngineStream
from service.errors import CallError, DrainingError, EngineDeadError, NonFiniteError
from service.journal import Journal
from service.supervisor import NEXT_STATES, Death, EngineState, Supervisor, _StallWatch
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.support import (
    ENGINE_CONFIG,
    HANG_S,
    CapturedLogs,
    fake_engine,
    poisoned,
    submit,
    until,
)


class Observer:
    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.deaths: list[Death] = []

    def on_engine_ready(self, ready: Ready) -> None:
        self.ready.set()

    def on_engine_death(self, death: Death) -> None:
        self.deaths.append(death)


@asynccontextmanager
async def supervised(*, step_deadline_s: float = HANG_S, **flags: object) -> AsyncIterator[tuple[Supervisor, Observer]]:
    observer = Observer()
    supervisor = Supervisor(
        ENGINE_CONFIG, Journal(), observer, step_deadline_s=step_deadline_s, command=fake_engine(**flags)
    )
    await supervisor.start()
    try:
        async with asyncio.timeout(HANG_S):
            waiting = {asyncio.ensure_future(observer.ready.wait()), supervisor.burial}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        yield supervisor, observer
    finally:
        await supervisor.stop()


async def collect(stream: EngineStream) -> list[int]:
    """All tokens of a stream."""
    token_ids: list[int] = []
    with stream:
        while True:
            outputs = await asyncio.wait_for(stream.next(), HANG_S)
            for output in outputs:
                token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    return token_ids


async def error_of(stream: EngineStream) -> CallError:
    with pytest.raises(CallError) as caught:
        await collect(stream)
    return caught.value


async def test_streams_get_the_tokens_of_their_own_request(log: CapturedLogs) -> None:
    """Concurrent streams each get exactly the tokens made for their prompt, and the journal ends empty."""
    async with supervised() as (supervisor, _):
        streams = [supervisor.generate(submit(n, n, 2 * n, max_tokens=20)) for n in range(1, 9)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert results == [tokens_of((n, 2 * n), 20) for n in range(1, 9)]
        assert len(supervisor.client._journal) == 0


async def test_a_stream_that_is_left_early_is_aborted_in_the_engine(log: CapturedLogs) -> None:
    """Leaving a stream frees its place in the engine; leaving it twice changes nothing."""
    async with supervised() as (supervisor, _):
        with supervisor.generate(submit(1, max_tokens=4000)) as stream:
            await stream.next()
            assert supervisor.client.stats.num_running == 1
        stream.close()
        async with asyncio.timeout(HANG_S):
            while supervisor.client.stats.num_running:
                await collect(supervisor.generate(submit(2)))
        assert supervisor.client.num_messages_sent >= 2


async def test_a_failed_request_leaves_the_others_alone(log: CapturedLogs) -> None:
    """NON_FINITE ends one stream with its own error; the neighbour and the engine go on."""
    async with supervised() as (supervisor, observer):
        neighbour = supervisor.generate(submit(1, max_tokens=50))
        assert isinstance(await error_of(supervisor.generate(poisoned(2, Trigger.NON_FINITE))), NonFiniteError)
        assert await collect(neighbour) == tokens_of((1, 2), 50)
        assert observer.deaths == []


DEATHS = {
    Trigger.EXIT_ZERO: {"exit_status": 0, "signal": None, "phase": "EXECUTE"},
    Trigger.SIGKILL: {"exit_status": None, "signal": "SIGKILL", "last_lines": ["last words on stderr"]},
    Trigger.SIGSEGV: {"exit_status": None, "signal": "SIGSEGV"},
    Trigger.RAISE: {"exit_status": 1, "exception_type": "builtins.RuntimeError", "message": "the root cause"},
    Trigger.GARBAGE: {"signal": "SIGKILL"},
    Trigger.CLOSE_SOCKET: {"signal": "SIGKILL"},
}


@pytest.mark.parametrize("trigger", DEATHS)
async def test_a_death_ends_every_stream_and_writes_one_record(trigger: Trigger, log: CapturedLogs) -> None:
    """Whatever ends the engine, each stream gets a fresh EngineDeadError with one death_id, new calls get it at once,
    and one `fatal error` record tells the reaped status and the step."""
    async with supervised() as (supervisor, observer):
        streams = [supervisor.generate(submit(n, max_tokens=4000)) for n in range(1, 6)]
        for stream in streams:
            await stream.next()
        streams.append(supervisor.generate(poisoned(9, trigger)))
        errors = await asyncio.gather(*(error_of(stream) for stream in streams))
        assert supervisor.state is EngineState.DEAD or supervisor.burial.done()
        with pytest.raises(EngineDeadError):
            supervisor.generate(submit(10))
        await asyncio.wait_for(asyncio.shield(supervisor.burial), HANG_S)

        (death,) = observer.deaths
        assert {error.death_id for error in errors if isinstance(error, EngineDeadError)} == {death.death_id}
        assert len({id(error) for error in errors}) == len(errors) == 6
        assert all(isinstance(error, EngineDeadError) and error.in_step for error in errors)
        (record,) = log.of("fatal error")
        assert record["level"] == "critical"
        assert record["death_id"] == death.death_id
        assert record["num_streams_ended"] == 6
        assert record["recent_steps"]
        assert DEATHS[trigger].items() <= record.items()
        assert ("traceback" in record) == (trigger is Trigger.RAISE)
        assert supervisor.state is EngineState.FAILED


async def test_a_hung_step_is_a_death_at_its_deadline(log: CapturedLogs) -> None:
    """An engine that stays in one phase past the deadline is killed and its streams end."""
    async with supervised(step_deadline_s=0.5) as (supervisor, _):
        await error_of(supervisor.generate(poisoned(1, Trigger.HANG)))
        await asyncio.wait_for(asyncio.shield(supervisor.burial), HANG_S)
        (record,) = log.of("fatal error")
        assert record["cause"].startswith("step deadline: no progress in phase EXECUTE")
        assert record["signal"] == "SIGKILL"


@pytest.mark.parametrize("how", ["stopped", "deaf"])
async def test_an_idle_engine_that_takes_no_message_is_dead(how: str, log: CapturedLogs) -> None:
    """An engine stopped by a signal while idle, or deaf, is found by the message it does not take; that request was
    never seen by it, so its caller is told to come back."""
    async with supervised(step_deadline_s=0.5) as (supervisor, _):
        assert supervisor.process is not None
        if how == "stopped":
            os.kill(supervisor.process.pid, signal.SIGSTOP)
        else:
            await collect(supervisor.generate(submit(1)))
            supervisor.generate(poisoned(2, Trigger.STOP_READING))
            flight = supervisor.process.flight
            await until(lambda: flight.read().num_messages_received == 2)
        error = await error_of(supervisor.generate(submit(3)))
        assert isinstance(error, EngineDeadError)
        assert not error.in_step
        assert error.retry_after_s is not None
        await asyncio.wait_for(asyncio.shield(supervisor.burial), HANG_S)
        (record,) = log.of("fatal error")
        assert "has not taken a message" in record["cause"]


async def test_a_silent_request_is_no_death(log: CapturedLogs) -> None:
    """An idle engine that has taken everything may be silent for longer than the step deadline."""
    async with supervised(step_deadline_s=0.2) as (supervisor, observer):
        supervisor.generate(poisoned(1, Trigger.SILENT))
        await asyncio.sleep(0.8)
        assert observer.deaths == []
        assert await collect(supervisor.generate(submit(2))) == tokens_of((1, 2), 4)


async def test_stopping_is_not_dying(log: CapturedLogs) -> None:
    """A stop ends the engine by its own exit, reaps it, and writes no `fatal error`."""
    async with supervised() as (supervisor, observer):
        process = supervisor.process
        assert process is not None
        await supervisor.stop()
        assert process.returncode == 0
        assert observer.deaths == []
        assert log.of("fatal error") == []
        with pytest.raises(DrainingError):
            supervisor.generate(submit(1))


async def test_a_stop_while_loading_does_not_wait_for_the_model(log: CapturedLogs) -> None:
    """An engine that still loads is killed and reaped at once, and that is no death."""
    observer = Observer()
    supervisor = Supervisor(ENGINE_CONFIG, Journal(), observer, step_deadline_s=1, command=fake_engine(load_s=60))
    await supervisor.start()
    started_s = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - started_s < HANG_S
    assert supervisor.process is not None
    assert supervisor.process.returncode == -signal.SIGKILL
    assert log.of("fatal error") == []


@pytest.mark.parametrize(
    ("fail_with", "is_configuration", "num_records"),
    [("ModelUnsupportedError:no mamba", True, 0), ("StartupError:no file", False, 0), ("OddError:odd", False, 1)],
)
async def test_a_failure_to_start_is_told_apart(
    fail_with: str, is_configuration: bool, num_records: int, log: CapturedLogs
) -> None:
    """The engine's considered words (a configuration it refuses, a file it lacks) need no death record; anything else
    while starting has one."""
    async with supervised(fail_with=fail_with) as (supervisor, observer):
        burial = await asyncio.wait_for(asyncio.shield(supervisor.burial), HANG_S)
        assert burial.is_configuration == is_configuration
        assert fail_with.partition(":")[2] in burial.root_cause
        assert observer.deaths[0].was_starting
        assert len(log.of("fatal error")) == num_records


async def test_a_bug_at_the_funeral_keeps_nobody_waiting(log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the record cannot be written, the bug is told, the burial has the death's cause, and stopping works."""

    def broken(*_: object) -> None:
        raise KeyError("secret")

    async with supervised() as (supervisor, observer):
        monkeypatch.setattr(supervisor, "_record_fields", broken)
        await error_of(supervisor.generate(poisoned(1, Trigger.CLOSE_SOCKET)))
        burial = await asyncio.wait_for(asyncio.shield(supervisor.burial), HANG_S)
        assert burial.root_cause == observer.deaths[0].cause
        assert supervisor.state is EngineState.FAILED
    (bug,) = log.of("internal error")
    assert bug["exception_type"] == "builtins.KeyError"
    assert "secret" not in log.text


async def test_a_death_is_known_before_its_record_is_read(monkeypatch: pytest.MonkeyPatch, log: CapturedLogs) -> None:
    """Health and new calls must not wait for what is only told later."""
    async with supervised() as (supervisor, observer):
        assert supervisor.process is not None
        read = supervisor.process.flight.read
        known: list[int] = []

        def spying_read() -> FlightRecord:
            known.append(len(observer.deaths))
            return read()

        await collect(supervisor.generate(submit(1)))
        monkeypatch.setattr(supervisor.process.flight, "read", spying_read)
        supervisor.on_lost("test")
        assert known[0] == 1


def test_the_table_of_states_has_every_state() -> None:
    """Each state says what may follow, and nothing follows the ends."""
    assert set(NEXT_STATES) == set(EngineState)
    assert NEXT_STATES[EngineState.FAILED] == NEXT_STATES[EngineState.STOPPING] == ()


def record(phase: Phase, *, since: int = 0, num_received: int = 0) -> FlightRecord:
    return FlightRecord(phase, since, 1, num_received, ())


def test_only_time_that_the_watch_lived_through_counts() -> None:
    """The age of a phase by the clock does not matter: only what was observed adds up to the deadline."""
    watch = _StallWatch(1.0)
    assert watch.observe(record(Phase.EXECUTE, since=-(10**12)), 0, 0.2) is None
    for _ in range(5):
        assert watch.observe(record(Phase.EXECUTE, since=-(10**12)), 0, 0.2) is None
    assert "EXECUTE" in (watch.observe(record(Phase.EXECUTE, since=-(10**12)), 0, 0.2) or "")


def test_progress_starts_the_deadline_anew() -> None:
    """Another phase, or the same phase entered again, is progress; loading and idling are never late."""
    watch = _StallWatch(0.5)
    for since in range(50):
        assert watch.observe(record(Phase.EXECUTE, since=since), 0, 0.2) is None
    for phase in (Phase.LOADING, Phase.IDLE):
        for _ in range(50):
            assert watch.observe(record(phase, num_received=3), 3, 0.2) is None


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.IDLE])
def test_a_message_that_is_not_taken_is_late(phase: Phase) -> None:
    """An engine that idles, or stopped the moment it was ready, has the deadline's time to take what it was sent."""
    watch = _StallWatch(0.5)
    verdicts = [watch.observe(record(phase, num_received=3), 4, 0.2) for _ in range(5)]
    assert "has not taken a message" in (verdicts[-1] or "")
