"""Which engine fills which place, and when: with real processes and made-up tokens, see `fake_engine.py`."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from service.engine_client import EngineClient
from service.engine_process import EngineProcess
from service.errors import EngineDeadError, EngineStartingError
from service.replica import NEXT_STATES, EngineState
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.rig import collect, error_of, rig
from tests.service.support import HANG_S, CapturedLogs, poisoned, submit, until


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_table_of_states_has_every_state() -> None:
    """Each state says what may follow; nothing follows the end."""
    assert set(NEXT_STATES) == set(EngineState)
    assert NEXT_STATES[EngineState.STOPPING] == ()
    assert all(EngineState.STOPPING in after for state, after in NEXT_STATES.items() if after)


async def test_a_dead_engine_is_replaced(log: CapturedLogs) -> None:
    """After a death another process serves, under the same index, and the record tells when it was to start."""
    async with rig(max_restarts=3) as run:
        first_pid = run.engine.pid
        await error_of(run.generate(poisoned(1, Trigger.SIGKILL)))
        await run.all_serving()
        assert run.engine.pid != first_pid
        assert await collect(run.generate(submit(2))) == tokens_of((1, 2), 4)
        (record,) = log.of("fatal error")
        assert record["restart_in_s"] < 0.1
        assert not run.supervisor.gave_up.done()


async def test_the_window_spent_is_the_end(log: CapturedLogs) -> None:
    """The third death within a window of two ends it, with the root cause of the last."""
    async with rig(max_restarts=2) as run:
        for number in (1, 2, 3):
            await run.all_serving()
            await error_of(run.generate(submit(number, Trigger.RAISE.value, number)))
        end = await run.given_up()
        assert not end.is_first_start
        assert "the root cause" in end.root_cause
        assert run.replica.state is EngineState.FAILED
        assert not run.supervisor.can_recover
        assert len(log.of("fatal error")) == 3
        await run.supervisor.stop()
        assert isinstance(run.supervisor.refusal(), EngineDeadError)  # until the very end: it does not drain


@pytest.mark.parametrize("fail_with", ["OddError:odd", "StartupError:odd"])
async def test_a_restart_that_fails_counts(fail_with: str, log: CapturedLogs, tmp_path: Path) -> None:
    """Later starts are tried again, with back-off, and each failure is a death in the window, with a record."""
    flag = tmp_path / "broken"
    async with rig(flags={"fail_if": flag, "fail_with": fail_with}, max_restarts=2) as run:
        flag.touch()
        await error_of(run.generate(poisoned(1, Trigger.SIGKILL)))
        end = await run.given_up()
        assert "odd" in end.root_cause
        assert [death.was_starting for death in run.deaths] == [False, True, True]
        assert len(log.of("fatal error")) == 3


async def test_a_process_that_cannot_be_talked_to_leaves_nothing(
    log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system takes the process but not its socket, the start has failed: no descriptor and no process is left,
    and the next try succeeds."""
    processes: list[EngineProcess] = []
    connect = EngineClient.connect

    async def fail_once(self: EngineClient, connection: socket.socket) -> None:
        if not processes:
            engine = run.replica.engine
            assert engine is not None
            assert engine.process is not None
            processes.append(engine.process)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        await connect(self, connection)

    async with rig(max_restarts=9) as run:
        num_open = num_descriptors()
        monkeypatch.setattr(EngineClient, "connect", fail_once)
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: log.of("engine not started"))
        await run.all_serving()
        assert processes[0].returncode == -signal.SIGKILL
        await until(lambda: num_descriptors() == num_open)


async def test_a_spare_that_is_just_being_started_stays_the_spare(
    log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is told before its socket is connected would be lost: a death in that moment has a new process."""
    connect, gate = EngineClient.connect, asyncio.Event()

    async def wait(self: EngineClient, connection: socket.socket) -> None:
        spare = run.supervisor._spare
        if spare is not None and spare.client is self:
            await gate.wait()
        await connect(self, connection)

    async with rig(max_restarts=3, spare_delay_s=0.3) as run:
        monkeypatch.setattr(EngineClient, "connect", wait)
        await until(lambda: run.supervisor.spare_pid)
        spare_pid = run.supervisor.spare_pid
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: run.deaths)
        await run.all_serving()
        assert run.engine.pid != spare_pid
        gate.set()
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: len(run.deaths) == 2)
        await run.all_serving()
        assert run.engine.pid == spare_pid


async def test_calls_between_two_engines_are_told_when_to_come_back(log: CapturedLogs) -> None:
    """While the next engine is due or loads, the refusal names the death or the start, with a time."""
    async with rig(flags={"load_s": 0.5}, max_restarts=3) as run:
        await error_of(run.generate(poisoned(1, Trigger.SIGKILL)))
        refusal = run.supervisor.refusal()
        assert isinstance(refusal, EngineDeadError)
        assert not refusal.in_step
        assert refusal.retry_after_s is not None
        await run.in_state(EngineState.STARTING)
        assert isinstance(run.supervisor.refusal(), EngineStartingError)
        await run.all_serving()


async def test_what_no_engine_had_waits_for_the_next_one(log: CapturedLogs) -> None:
    """A request that comes to the dispatcher while none serves is not failed if one is coming."""
    async with rig(flags={"load_s": 0.3}, max_restarts=3) as run:
        await error_of(run.generate(poisoned(1, Trigger.SIGKILL)))
        stream = run.generate(submit(2))
        assert run.dispatcher.num_waiting == 1
        assert await collect(stream) == tokens_of((1, 2), 4)


@pytest.mark.parametrize("keeps_standby", [False, True], ids=["imports", "standby"])
async def test_the_spare_takes_the_dead_ones_place(keeps_standby: bool, log: CapturedLogs) -> None:
    """The spare's process serves after the death, and another spare is made."""
    async with rig(max_restarts=3, keeps_standby=keeps_standby, spare_delay_s=0) as run:
        await until(lambda: run.supervisor.has_standby if keeps_standby else run.supervisor.spare_pid)
        spare_pid = run.supervisor.spare_pid
        await error_of(run.generate(poisoned(1, Trigger.SIGKILL)))
        await run.all_serving()
        assert run.engine.pid == spare_pid
        assert await collect(run.generate(submit(2))) == tokens_of((1, 2), 4)
        await until(lambda: run.supervisor.spare_pid not in (0, spare_pid))


async def test_a_standby_that_does_not_answer_is_a_death(log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds it up when its turn comes: found at the step deadline, not at that of loading."""
    monkeypatch.setattr(EngineProcess, "is_stopped", False)
    async with rig(max_restarts=3, keeps_standby=True, spare_delay_s=0, step_deadline_s=0.5) as run:
        await until(lambda: run.supervisor.has_standby)
        os.kill(run.supervisor.spare_pid, signal.SIGSTOP)
        os.kill(run.engine.pid, signal.SIGKILL)
        assert await collect(run.generate(submit(1), replay=True)) == tokens_of((1, 2), 4)
        first, second = log.of("fatal error")
        assert first["signal"] == second["signal"] == "SIGKILL"
        assert "no progress in loading" in second["cause"]


async def test_a_lost_spare_is_replaced_and_is_no_death(log: CapturedLogs) -> None:
    """A killed spare is told in a warning, not as a death, and a new one is made."""
    async with rig(max_restarts=3, spare_delay_s=0) as run:
        await until(lambda: run.supervisor.spare_pid)
        spare_pid = run.supervisor.spare_pid
        os.kill(spare_pid, signal.SIGKILL)
        await until(lambda: run.supervisor.spare_pid not in (0, spare_pid))
        assert len(log.of("spare lost")) == 1
        assert log.of("fatal error") == run.deaths == []
        assert await collect(run.generate(submit(1))) == tokens_of((1, 2), 4)


@pytest.mark.parametrize("keeps_standby", [False, True], ids=["imports", "standby"])
async def test_a_stopped_spare_is_not_given_a_place(keeps_standby: bool, log: CapturedLogs) -> None:
    """Nobody waits for a spare that somebody has stopped: a new process serves, and the spare is ended."""
    async with rig(max_restarts=3, keeps_standby=keeps_standby, spare_delay_s=0) as run:
        await until(lambda: run.supervisor.has_standby if keeps_standby else run.supervisor.spare_pid)
        spare = run.supervisor._spare
        assert spare is not None
        assert spare.process is not None
        spare_pid = spare.pid
        os.kill(spare_pid, signal.SIGSTOP)
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: run.deaths)
        await run.all_serving()
        assert run.engine.pid != spare_pid
        assert len(run.deaths) == len(log.of("spare lost")) == 1
        assert await spare.process.wait(HANG_S) == -signal.SIGKILL


async def test_an_engine_stopped_while_loading_is_a_death(log: CapturedLogs) -> None:
    """It is found at the step deadline; one that merely loads for longer is not."""
    async with rig(flags={"load_s": 2}, max_restarts=3, step_deadline_s=0.5) as run:
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: run.deaths and run.replica.state is EngineState.STARTING and run.engine.config)
        os.kill(run.engine.pid, signal.SIGSTOP)
        await until(lambda: len(run.deaths) == 2)
        assert "stopped from outside while loading" in run.deaths[1].cause
        await run.all_serving()
        assert len(run.deaths) == 2


async def test_frozen_together_while_loading_is_no_death(log: CapturedLogs) -> None:
    """Time in which the watch itself did not run does not count."""
    async with rig(flags={"load_s": 0.5}, max_restarts=3) as run:
        os.kill(run.engine.pid, signal.SIGKILL)
        await until(lambda: run.deaths and run.replica.state is EngineState.STARTING and run.engine.config)
        run.engine.load_timeout_s = 1.5
        pid = run.engine.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)  # noqa: ASYNC251 - the loop is frozen, too
        os.kill(pid, signal.SIGCONT)
        await run.all_serving()
        assert run.engine.pid == pid
        assert len(run.deaths) == 1


async def test_no_spare_where_nothing_is_restarted(log: CapturedLogs) -> None:
    """Without restarts a spare would be of no use."""
    async with rig(max_restarts=0, spare_delay_s=0) as run:
        await asyncio.sleep(0.2)
        assert run.supervisor.spare_pid == 0


async def test_one_of_two_replicas_keeps_the_server_alive(log: CapturedLogs) -> None:
    """With the window spent, the place stays empty and the other serves; when that one dies, it is over."""
    async with rig(2, max_restarts=0) as run:
        first, second = run.supervisor.replicas
        assert first.engine is not None
        assert second.engine is not None
        os.kill(first.engine.pid, signal.SIGKILL)
        await until(lambda: first.state is EngineState.FAILED)
        assert run.supervisor.is_serving
        assert not run.supervisor.gave_up.done()
        assert await collect(run.generate(submit(1))) == tokens_of((1, 2), 4)
        os.kill(second.engine.pid, signal.SIGKILL)
        assert "SIGKILL" in (await run.given_up()).root_cause


async def test_two_that_die_at_once_are_no_reason_to_give_up(log: CapturedLogs) -> None:
    """The second death spends the window, but the next engine in the first one's place is decided already."""
    async with rig(2, max_restarts=1) as run:
        for replica in run.supervisor.replicas:
            assert replica.engine is not None
            os.kill(replica.engine.pid, signal.SIGKILL)
        await until(lambda: len(run.deaths) == 2)
        assert not any(death.decision.gives_up for death in run.deaths)
        await until(lambda: run.supervisor.is_serving)
        assert not run.supervisor.gave_up.done()
        assert await collect(run.generate(submit(1))) == tokens_of((1, 2), 4)
