"""The life of the engine: started, watched, found dead, buried with one record.

What lives here: the states and their one table, the four ways a death is found, and the order of what follows. What
must not: gRPC, text, the socket's details (`engine_client.py`), the process's (`engine_process.py`).

A death is found by whichever comes first: end of file on the socket, the engine's own report, a reaped exit status, or
a step past its deadline. At that moment, within one callback of the loop: the state is DEAD, the observer knows (health
says NOT_SERVING, new calls are told), and every open stream is ended. Then the engine is fenced (SIGKILL, after a
moment in which it may end by itself, so that its own exit status is not overwritten), reaped, and one record
`fatal error` is written: the only one, and the only place of a traceback.

Which streams may have killed it? Those whose request the engine had taken off its socket; the flight recorder counts
messages, so this is known exactly. Which of these were in the dying step is not known in this version, so all of them
are told not to retry (pushback −1); a request that the engine never saw is told when to come back.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from scheduler import logs
from scheduler.config import EngineConfig
from scheduler.flight_record import FlightRecord
from scheduler.messages import EngineFailed, LoadProgress, Phase, Ready, Submit
from service.engine_client import EngineClient, EngineStream
from service.engine_process import ENGINE_COMMAND, EngineProcess, signal_name
from service.errors import DrainingError, EngineDeadError, EngineStartingError
from service.journal import Journal, JournalEntry

WATCH_INTERVAL_S = 0.1
EXIT_GRACE_S = 0.25
"""How long a dead engine may take to end by itself before it is killed."""
REAP_TIMEOUT_S = 1.0
"""From the kill on; the kernel can keep a process in an uninterruptible wait."""
OUTPUT_TIMEOUT_S = 0.1
SHUTDOWN_TIMEOUT_S = 1.0
STARTING_RETRY_AFTER_S = 1.0
DRAINING_RETRY_AFTER_S = 1.0
"""Another server behind the same name is ready at once; one that is restarted in place is not."""
STEPS_IN_RECORD_MAX = 4
LINES_IN_RECORD_MAX = 50
EXIT_CONFIGURATION_TYPES = ("ConfigurationError", "ModelUnsupportedError")
FORESEEN_TYPES = ("StartupError", *EXIT_CONFIGURATION_TYPES)


class EngineState(IntEnum):
    """The numbers are those of `emberline.v1.EngineState`."""

    STARTING = 1
    READY = 2
    DEAD = 4
    FAILED = 6
    STOPPING = 7


NEXT_STATES: dict[EngineState, tuple[EngineState, ...]] = {
    EngineState.STARTING: (EngineState.READY, EngineState.DEAD, EngineState.STOPPING),
    EngineState.READY: (EngineState.DEAD, EngineState.STOPPING),
    EngineState.DEAD: (EngineState.FAILED,),
    EngineState.FAILED: (),
    EngineState.STOPPING: (),
}
"""The table. A dead engine is given up once its record is written: this version starts none again."""


@dataclass(frozen=True, slots=True)
class Death:
    """One engine's end, as far as it is known at once."""

    death_id: str
    cause: str
    was_starting: bool
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Burial:
    """What is known of a death once its record is written."""

    death: Death
    root_cause: str
    """One line, for the termination log."""
    is_configuration: bool = False
    """The engine refused its configuration while starting."""


class SupervisorObserver(Protocol):
    """Told within the same callback of the loop; the server is the real one."""

    def on_engine_ready(self, ready: Ready) -> None: ...

    def on_engine_death(self, death: Death) -> None: ...


class Supervisor:
    """Keeps one engine."""

    def __init__(
        self,
        config: EngineConfig,
        journal: Journal,
        observer: SupervisorObserver,
        *,
        step_deadline_s: float,
        command: Sequence[str] = ENGINE_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._observer = observer
        self._step_deadline_s = step_deadline_s
        self._command = command
        self._clock = clock
        self._report: EngineFailed | None = None
        self._death: Death | None = None
        self._num_streams_ended = 0
        self._watch: asyncio.Task[None] | None = None
        self._funeral: asyncio.Task[None] | None = None
        self.client = EngineClient(journal, self)
        self.process: EngineProcess | None = None
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        """What the engine said of itself; None until it was ready."""
        self.burial: asyncio.Future[Burial] = asyncio.get_running_loop().create_future()
        """Done once a death's record is written."""

    async def start(self) -> None:
        """Start the process and begin to watch it. From the main thread."""
        self.process = EngineProcess(self._command, self._config)
        logs.get_logger().info("engine starting", engine=0, pid=self.process.pid, model=self._config.model)
        await self.client.connect(self.process.connection, self._config)
        self._watch = asyncio.create_task(self._watch_process(self.process))
        self._watch.add_done_callback(self._on_watch_done)

    def generate(self, submit: Submit) -> EngineStream:
        """Give the engine one request.

        Raises:
            CallError: there is no engine that could take it.
        """
        match self.state:
            case EngineState.READY:
                return self.client.generate(submit)
            case EngineState.STARTING:
                raise EngineStartingError(STARTING_RETRY_AFTER_S)
            case EngineState.STOPPING:
                raise DrainingError(DRAINING_RETRY_AFTER_S)
            case _:
                raise self.engine_dead_error()

    def engine_dead_error(self) -> EngineDeadError:
        """For a call that no engine ever had."""
        assert self._death is not None
        return EngineDeadError(self._death.death_id, in_step=False, retry_after_s=self._expected_restart_s())

    async def stop(self) -> None:
        """End the engine on purpose: by a message if it listens, else by SIGKILL. It is reaped on return."""
        if self.process is None:
            return
        if self._funeral is not None:
            await asyncio.wait({self._funeral})  # its failure is told where it is observed
        else:
            is_listening = self.state is EngineState.READY
            if self.state is not EngineState.STOPPING:
                self._move_to(EngineState.STOPPING)  # before anything is torn down, or this would look like a death
            if is_listening:
                self.client.shutdown()
                await self.process.wait(SHUTDOWN_TIMEOUT_S)
            self.process.kill()
            await self.process.wait(REAP_TIMEOUT_S)
            self.client.close()
        if self._watch is not None:
            self._watch.cancel()
        self.process.close()

    def kill(self) -> None:
        """End the engine on purpose and at once."""
        if self.state in (EngineState.STARTING, EngineState.READY):
            self._move_to(EngineState.STOPPING)
        if self.process is not None:
            self.process.kill()

    # What the client tells

    def on_progress(self, progress: LoadProgress) -> None:
        """Show that loading goes on."""
        logs.get_logger().info("engine loading", engine=0, stage=progress.stage, elapsed_s=round(progress.elapsed_s, 2))

    def on_ready(self, ready: Ready) -> None:
        """It serves from now on."""
        if self.state is EngineState.STARTING:
            self.ready = ready
            self._move_to(EngineState.READY)
            self._observer.on_engine_ready(ready)

    def on_failed(self, report: EngineFailed) -> None:
        """Its last word; the process exits right after."""
        self._report = report
        self._die(f"{report.exception_type} in phase {report.phase.name}")

    def on_lost(self, cause: str) -> None:
        """The connection is over."""
        self._die(cause)

    # Death

    def _move_to(self, state: EngineState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state.name} → {state.name}"
        self.state = state

    def _die(self, cause: str, *, kill_now: bool = False) -> None:
        if self.state not in (EngineState.STARTING, EngineState.READY):
            return
        assert self.process is not None
        was_starting = self.state is EngineState.STARTING
        self._death = Death(uuid.uuid4().hex, cause, was_starting, self._clock())
        self._move_to(EngineState.DEAD)
        if kill_now:
            self.process.kill()
        self._observer.on_engine_death(self._death)  # first, whatever the rest does
        record = self.process.flight.read()
        self._num_streams_ended = self.client.end_streams(lambda entry: self._error_for(entry, record))
        self.client.close()
        self._funeral = asyncio.create_task(self._bury(self._death, self.process))
        self._funeral.add_done_callback(self._on_funeral_done)

    def _error_for(self, entry: JournalEntry, record: FlightRecord) -> EngineDeadError:
        assert self._death is not None
        in_step = entry.has_output or entry.was_received(record.num_messages_received)
        retry_after_s = None if in_step else self._expected_restart_s()
        return EngineDeadError(self._death.death_id, in_step=in_step, retry_after_s=retry_after_s)

    def _expected_restart_s(self) -> float:
        """This process ends; whoever starts the next one waits about as long for it as for this one."""
        return self.ready.startup_s + 1.0 if self.ready is not None else 5.0

    async def _bury(self, death: Death, process: EngineProcess) -> None:
        if await process.wait(EXIT_GRACE_S) is None:
            process.kill()
            await process.wait(REAP_TIMEOUT_S)
        await process.wait_output(OUTPUT_TIMEOUT_S)
        report = self._report
        kind = report.exception_type.rpartition(".")[2] if report is not None and report.starting else ""
        if report is not None and kind in FORESEEN_TYPES:
            root_cause = " ".join(report.message.split())  # considered words; the server says them, in one line
        else:
            fields = self._record_fields(death, process)
            root_cause = _root_cause(death, report, process.returncode)
            logs.get_logger().critical("fatal error", **fields)
        self._move_to(EngineState.FAILED)
        self.burial.set_result(Burial(death, root_cause, kind in EXIT_CONFIGURATION_TYPES))

    def _on_funeral_done(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for the burial must not wait for ever because of a bug in it."""
        if self.burial.done() or self._death is None:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logs.get_logger().error("internal error", **logs.describe(error))
        if self.process is not None:
            self.process.kill()
        if self.state is EngineState.DEAD:
            self._move_to(EngineState.FAILED)
        self.burial.set_result(Burial(self._death, self._death.cause))

    def _record_fields(self, death: Death, process: EngineProcess) -> dict[str, Any]:
        record, report, status = process.flight.read(), self._report, process.returncode
        fields: dict[str, Any] = {
            "death_id": death.death_id,
            "cause": death.cause,
            "engine": 0,
            "pid": process.pid,
            "exit_status": status if status is not None and status >= 0 else None,
            "signal": signal_name(-status) if status is not None and status < 0 else None,
            "oom_kills": process.oom_kills(),
            "starting": death.was_starting,
            "phase": report.phase.name if report is not None else record.phase.name,
            "step_id": report.step_id if report is not None else record.step_id,
            "batch": report.batch if report is not None else record.batch,
            "recent_steps": [str(step) for step in record.steps[:STEPS_IN_RECORD_MAX]],
            "num_messages_received": record.num_messages_received,
            "num_streams_ended": self._num_streams_ended,
        }
        if report is not None:
            fields |= {"exception_type": report.exception_type, "message": report.message}
            fields["traceback"] = report.traceback
        else:
            fields["last_lines"] = list(process.last_lines)[-LINES_IN_RECORD_MAX:]
        return fields

    # The watch

    async def _watch_process(self, process: EngineProcess) -> None:
        """Find the deaths that the socket does not tell: an exit that leaves it open, and a step without progress.

        Only time that this watch itself has lived through counts against the deadline: after both processes were
        frozen together (a paused container, a suspended machine), an innocent engine must not be killed.
        """
        stall = _StallWatch(self._step_deadline_s)
        before_s = self._clock()
        while self.state in (EngineState.STARTING, EngineState.READY):
            status = await process.wait(WATCH_INTERVAL_S)
            if status is not None:
                # Its last words may still be in the socket; end of file follows them at once, if it follows at all.
                await asyncio.sleep(WATCH_INTERVAL_S)
                self._die("the engine process ended")
                return
            now_s = self._clock()
            elapsed_s, before_s = min(now_s - before_s, 2 * WATCH_INTERVAL_S), now_s
            stalled = stall.observe(process.flight.read(), self.client.num_messages_sent, elapsed_s)
            if stalled is not None:
                self._die(stalled, kill_now=True)

    def _on_watch_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # An engine that nobody watches must not live on.
            logs.get_logger().error("internal error", **logs.describe(error))
            self._die("the watch of the engine ended", kill_now=True)


class _StallWatch:
    """How long the engine has been in one phase with something to do. Pure: time is handed in."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._seen: tuple[Phase, int, int] | None = None
        self._stalled_s = 0.0

    def observe(self, record: FlightRecord, num_messages_sent: int, elapsed_s: float) -> str | None:
        """What is wrong, if the deadline is passed. `elapsed_s` is since the last observation."""
        # Nothing is sent before READY, so an engine that is "loading" with messages waiting has stopped right after it.
        is_waiting = record.phase in (Phase.LOADING, Phase.IDLE)
        is_deaf = is_waiting and num_messages_sent > record.num_messages_received
        is_busy = not is_waiting
        seen = (record.phase, record.since_monotonic_ns, record.step_id)
        if seen != self._seen or not (is_busy or is_deaf):
            self._seen = seen
            self._stalled_s = 0.0
            return None
        self._stalled_s += elapsed_s
        if self._stalled_s <= self._deadline_s:
            return None
        if is_deaf:
            return f"step deadline: the engine has not taken a message for {self._deadline_s:g} s"
        return f"step deadline: no progress in phase {record.phase.name} for {self._deadline_s:g} s"


def _root_cause(death: Death, report: EngineFailed | None, status: int | None) -> str:
    """One line, whatever the exception's message holds."""
    if report is not None:
        where = ", ".join(part for part in (f"phase {report.phase.name}", report.batch) if part)
        return " ".join(f"{report.exception_type}: {report.message} ({where})".split())
    ending = "not reaped" if status is None else f"exit status {status}" if status >= 0 else signal_name(-status)
    return f"{death.cause} ({ending})"
