"""One engine's life, with a real process and made-up tokens: see `fake_engine.py`. Nothing is restarted here."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path

import pytest

from service.engine_process import EngineProcess
from service.errors import DrainingError, EngineDeadError, NonFiniteError
from service.replica import EngineState
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.rig import collect, collect_all, error_of, rig
from tests.service.support import HANG_S, CapturedLogs, fake_engine, poisoned, submit, until


async def test_streams_get_the_tokens_of_their_own_request(log: CapturedLogs) -> None:
    """Concurrent streams each get exactly the tokens made for their prompt, and the journal ends empty."""
    async with rig() as run:
        streams = [run.generate(submit(n, n, 2 * n, max_tokens=20)) for n in range(1, 9)]
        assert await collect_all(streams) == [tokens_of((n, 2 * n), 20) for n in range(1, 9)]
        assert len(run.journal) == 0


async def test_a_stream_that_is_left_early_is_aborted_in_the_engine(log: CapturedLogs) -> None:
    """Leaving a stream frees its place in the engine; leaving it twice changes nothing."""
    async with rig() as run:
        with run.generate(submit(1, max_tokens=4000)) as stream:
            await stream.next()
            assert run.engine.client.stats.num_running == 1
        stream.close()
        number = iter(range(2, 1000))
        async with asyncio.timeout(HANG_S):
            while run.engine.client.stats.num_running:
                await collect(run.generate(submit(next(number))))


async def test_a_failed_request_leaves_the_others_alone(log: CapturedLogs) -> None:
    """NON_FINITE ends one stream with its own error; the neighbour and the engine go on."""
    async with rig() as run:
        neighbour = run.generate(submit(1, max_tokens=50))
        assert isinstance(await error_of(run.generate(poisoned(2, Trigger.NON_FINITE))), NonFiniteError)
        assert await collect(neighbour) == tokens_of((1, 2), 50)
        assert run.deaths == []


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
    and one `fatal error` record tells the reaped status, the step, and whose step it was."""
    async with rig() as run:
        streams = [run.generate(submit(n, max_tokens=4000)) for n in range(1, 6)]
        for stream in streams:
            await stream.next()
        streams.append(run.generate(poisoned(9, trigger)))
        errors = await asyncio.gather(*(error_of(stream) for stream in streams))
        assert run.is_hopeless
        with pytest.raises(EngineDeadError):
            run.generate(submit(10))
        await run.given_up()

        (death,) = run.deaths
        assert {error.death_id for error in errors if isinstance(error, EngineDeadError)} == {death.death_id}
        assert len({id(error) for error in errors}) == len(errors) == 6
        assert all(isinstance(error, EngineDeadError) and error.in_step for error in errors)
        (record,) = log.of("fatal error")
        assert record["level"] == "critical"
        assert record["death_id"] == death.death_id
        assert record["num_streams_ended"] == 6
        assert record["num_suspects"] == 6
        assert set(record["suspects"]) <= {f"label-{n}" for n in (1, 2, 3, 4, 5, 9)}
        assert record["recent_steps"]
        assert DEATHS[trigger].items() <= record.items()
        assert ("traceback" in record) == (trigger is Trigger.RAISE)
        assert run.replica.state is EngineState.FAILED


async def test_a_hung_step_is_a_death_at_its_deadline(log: CapturedLogs) -> None:
    """An engine that stays in one phase past the deadline is suspected, then killed; its streams end, and the record
    has its Python stacks."""
    async with rig(step_deadline_s=0.5) as run:
        await error_of(run.generate(poisoned(1, Trigger.HANG)))
        await run.given_up()
        (record,) = log.of("fatal error")
        assert "no progress in phase EXECUTE" in record["cause"]
        assert record["signal"] == "SIGKILL"
        assert "in misbehave" in record["stacks"]
        assert log.of("engine suspect")


@pytest.mark.parametrize("how", ["stopped", "deaf"])
async def test_an_idle_engine_that_takes_no_message_is_dead(how: str, log: CapturedLogs) -> None:
    """An engine stopped by a signal while idle, or deaf, is found by the message it does not take; that request was
    never seen by it, so its caller is told to come back."""
    async with rig(step_deadline_s=0.5) as run:
        assert run.engine.process is not None
        if how == "stopped":
            os.kill(run.engine.pid, signal.SIGSTOP)
        else:
            await collect(run.generate(submit(1)))
            run.generate(poisoned(2, Trigger.STOP_READING))
            flight = run.engine.process.flight
            await until(lambda: flight.read().num_messages_received == 2)
        error = await error_of(run.generate(submit(3)))
        assert isinstance(error, EngineDeadError)
        assert not error.in_step
        assert error.retry_after_s is not None
        await run.given_up()
        (record,) = log.of("fatal error")
        assert "has not taken a message" in record["cause"]


async def test_a_silent_request_is_no_death(log: CapturedLogs) -> None:
    """An idle engine that has taken everything may be silent for longer than the step deadline."""
    async with rig(step_deadline_s=0.2) as run:
        run.generate(poisoned(1, Trigger.SILENT))
        await asyncio.sleep(0.8)
        assert run.deaths == []
        assert await collect(run.generate(submit(2))) == tokens_of((1, 2), 4)


async def test_stopping_is_not_dying(log: CapturedLogs) -> None:
    """A stop ends the engine by its own exit, reaps it, and writes no `fatal error`."""
    async with rig() as run:
        process = run.engine.process
        assert process is not None
        await run.supervisor.stop()
        assert process.returncode == 0
        assert run.deaths == []
        assert log.of("fatal error") == []
        assert isinstance(run.supervisor.refusal(), DrainingError)


async def test_a_stop_while_loading_does_not_wait_for_the_model(log: CapturedLogs) -> None:
    """An engine that still loads is killed and reaped at once, and that is no death."""
    async with rig(flags={"load_s": 60}, wait=False) as run:
        process = run.engine.process
        started_s = time.monotonic()
        await run.supervisor.stop()
        assert time.monotonic() - started_s < HANG_S
        assert process is not None
        assert process.returncode == -signal.SIGKILL
    assert log.of("fatal error") == []


@pytest.mark.parametrize(
    ("fail_with", "is_configuration", "num_records"),
    [("ModelUnsupportedError:no mamba", True, 0), ("StartupError:no file", False, 0), ("OddError:odd", False, 1)],
)
async def test_a_failure_to_start_is_told_apart(
    fail_with: str, is_configuration: bool, num_records: int, log: CapturedLogs
) -> None:
    """The first start is not tried again. The engine's considered words (a configuration it refuses, a file it lacks)
    need no death record; anything else while starting has one."""
    async with rig(flags={"fail_with": fail_with}, wait=False, max_restarts=9) as run:
        end = await run.given_up()
        assert end.is_first_start
        assert end.is_configuration == is_configuration
        assert fail_with.partition(":")[2] in end.root_cause
        assert run.deaths[0].was_starting
        assert len(log.of("fatal error")) == num_records


async def test_a_bug_at_the_funeral_keeps_nobody_waiting(log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the record cannot be written, the bug is told, the end has the death's cause, and stopping works."""

    def broken(*_: object) -> None:
        raise KeyError("secret")

    async with rig() as run:
        monkeypatch.setattr("service.engine.record_fields", broken)
        await error_of(run.generate(poisoned(1, Trigger.CLOSE_SOCKET)))
        end = await run.given_up()
        assert run.deaths[0].cause in end.root_cause
        assert run.replica.state is EngineState.FAILED
    (bug,) = log.of("internal error")
    assert bug["exception_type"] == "builtins.KeyError"
    assert "secret" not in log.text


async def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where starts fail for want of descriptors, each failure must not take some more."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    num_before = num_open()
    for culprit in ("subprocess.Popen", "os.pidfd_open"):
        with monkeypatch.context() as patch:
            patch.setattr(culprit, refuse)
            with pytest.raises(OSError, match="open files"):
                EngineProcess(fake_engine(), num_threads=1)
        assert num_open() == num_before
