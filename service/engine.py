"""One engine's one life, seen from the front end: started, watched, found dead, buried with one record.

What lives here: the ways a death is found, and the order of what follows. What must not: what becomes of its streams
(`dispatch.py`), whether another one is started (`supervisor.py`), the socket's details (`engine_client.py`), the
process's (`engine_process.py`).

A death is found by whichever comes first: end of file on the socket, the engine's own report, a reaped exit status, or
a step past its deadline. At that moment, within one callback of the loop, the observer is told, which moves health and
the streams. Then the engine is fenced (SIGKILL, after a moment in which it may end by itself, so that its own exit
status is not overwritten; a hung one is asked for its stacks first), reaped, told of as `on_fenced` (its memory is free
for the next one), and one record `fatal error` is written: the only one, and the only place of a traceback.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scheduler import logs
from scheduler.config import EngineConfig
from scheduler.flight_record import FlightRecord
from scheduler.messages import (
    Activate,
    EngineFailed,
    EngineStats,
    LoadProgress,
    Phase,
    Ready,
    StandingBy,
    StepOutputs,
    Submit,
)
from service import crash_report
from service.death import Death, cause_kind, crash_facts, record_fields, root_cause
from service.engine_client import EngineClient
from service.engine_process import ENGINE_COMMAND, EngineProcess
from service.hang_watch import Finding, HangWatch
from service.metrics.recorder import Metrics
from service.stream import RequestStream

WATCH_INTERVAL_S = 0.1
EXIT_GRACE_S = 0.25
"""How long a dead engine may take to end by itself before it is killed."""
STACKS_TIMEOUT_S = 0.4
REAP_TIMEOUT_S = 1.0
"""From the kill on; the kernel can keep a process in an uninterruptible wait."""
OUTPUT_TIMEOUT_S = 0.1
REPORT_TIMEOUT_S = 1.0
SHUTDOWN_TIMEOUT_S = 1.0
NOTE_MEMORY_INTERVAL_S = 1.0
_PHASES_OF_A_STEP = (Phase.EXECUTE, Phase.UPDATE, Phase.SEND)
_PHASES_OF_ANYONE = (Phase.DRAIN, Phase.SCHEDULE)


class EngineObserver(Protocol):
    """Told within the same callback of the loop; the supervisor is the real one."""

    def on_engine_standing_by(self, engine: Engine) -> None: ...

    def on_engine_ready(self, engine: Engine, ready: Ready) -> None: ...

    def on_engine_suspect(self, engine: Engine, is_suspect: bool) -> None: ...

    def on_engine_output(self, engine: Engine, stream: RequestStream, num_tokens: int) -> None: ...

    def on_engine_death(self, engine: Engine, death: Death) -> None: ...

    def on_engine_fenced(self, engine: Engine, death: Death) -> None: ...

    def on_engine_buried(self, engine: Engine, death: Death) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines of a server have in common."""

    command: Sequence[str] = ENGINE_COMMAND
    num_threads: int | None = None
    """Compute threads; None: one per usable core."""
    step_deadline_s: float = 10.0
    """Beside what a step's work takes."""
    crash_dir: Path | None = None
    """Where each death leaves a report; None: nowhere."""
    model: str = ""
    """The name it is served under."""
    clock: Callable[[], float] = time.monotonic
    metrics: Metrics = field(default_factory=Metrics)


class Engine:
    """A process, its socket, and the watch over both. Made for one life."""

    def __init__(self, name: str, observer: EngineObserver, settings: EngineSettings) -> None:
        """`name`: which replica, or `spare`."""
        self.name = name
        self._observer = observer
        self._settings = settings
        self._clock = settings.clock
        self._report: EngineFailed | None = None
        self._watch: asyncio.Task[None] | None = None
        self._funeral: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_fenced = False
        self._activation: Activate | None = None
        self._ready_s = self._clock()
        self._still_s = 0.0
        """Since its last sign of life in loading, as far as the watch itself was running."""
        self._owes_sign = False
        """It was waiting to be told what to do, and has been: its answer is due within the step deadline."""
        self.load_timeout_s: float | None = None
        """How long a stage of loading may take; None: as long as it likes."""
        self.client = EngineClient(self, clock=self._clock, on_step=self._note_step)
        self.process: EngineProcess | None = None
        self.config: EngineConfig | None = None
        """None until it was told what to load: until then it is a process with its imports done."""
        self.is_standing_by = False
        self.is_spare = False
        """Set at its death, if it filled no replica's place: that is no engine death, and has no record."""
        self.ready: Ready | None = None
        """What it said of itself; None until it was ready."""
        self.death: Death | None = None

    @property
    def is_dead(self) -> bool:
        return self.death is not None

    @property
    def pid(self) -> int:
        return 0 if self.process is None or self.is_dead else self.process.pid

    @property
    def is_started(self) -> bool:
        """Whether its process is there, and what it is told is sent."""
        return self._watch is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it does nothing because somebody stopped its process."""
        return self.process is not None and self.process.is_stopped

    @property
    def served_s(self) -> float:
        """How long it has served; 0 before it was ready."""
        return 0.0 if self.ready is None else self._clock() - self._ready_s

    # From start to ready

    async def start(self) -> None:
        """Start the process and begin to watch it. From the main thread. Raises OSError, and nothing is left then."""
        self.process = EngineProcess(self._settings.command, num_threads=self._settings.num_threads, name=self.name)
        try:
            await self.client.connect(self.process.connection)
        except OSError:
            self.process.connection.close()
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._watch_process(self.process))
        self._watch.add_done_callback(self._on_watch_done)

    def configure(self, config: EngineConfig) -> None:
        """Tell it what to load."""
        assert self.config is None
        self.config = config
        self._still_s = 0.0
        self.client.configure(config)

    def activate(self, device_index: int | None) -> None:
        """Let a standby serve, as soon as it stands by."""
        self._activation = Activate(device_index)
        self._still_s = 0.0
        if self.is_standing_by:
            self._owes_sign = True
            self.client.activate(self._activation)

    def rename(self, name: str) -> None:
        """A spare has become a replica."""
        self.name = name
        if self.process is not None:
            self.process.name = name

    def send(self, stream: RequestStream, submit: Submit) -> None:
        """Give it one request; it is ready."""
        self.client.send(stream, submit)

    # Stopping

    async def stop(self) -> None:
        """End it on purpose: by a message if it listens, else by SIGKILL. It is reaped on return."""
        if self._funeral is not None:
            await asyncio.wait({self._funeral})  # its failure is told where it is observed
        elif self.process is not None:
            self._is_stopping = True  # before anything is torn down, or this would look like a death
            if self.ready is not None:
                self.client.shutdown()
                await self.process.wait(SHUTDOWN_TIMEOUT_S)
            self.process.kill()
            await self.process.wait(REAP_TIMEOUT_S)
            self.client.close()
        self._let_go()

    def kill(self) -> None:
        """End it on purpose and at once."""
        self._is_stopping = True
        if self.process is not None:
            self.process.kill()

    def _let_go(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.process is not None:
            self.process.close()

    # What the client tells

    def on_progress(self, progress: LoadProgress) -> None:
        """Show that loading goes on."""
        self._still_s = 0.0
        self._owes_sign = False
        log = logs.get_logger().debug if self.config is None or self.config.standby else logs.get_logger().info
        log("engine loading", engine=self.name, stage=progress.stage, elapsed_s=round(progress.elapsed_s, 2))

    def on_standing_by(self, _standing_by: StandingBy) -> None:
        """It has loaded all it may hold while another serves."""
        self.is_standing_by = True
        self._still_s = 0.0
        if self._activation is not None:
            self.client.activate(self._activation)
        self._observer.on_engine_standing_by(self)

    def on_ready(self, ready: Ready) -> None:
        """It serves from now on."""
        if self.ready is None and not self._is_stopping:
            self.ready = ready
            self._ready_s = self._clock()
            self._observer.on_engine_ready(self, ready)

    def on_output(self, stream: RequestStream, num_tokens: int) -> None:
        """A step has brought a stream something."""
        self._observer.on_engine_output(self, stream, num_tokens)

    def on_failed(self, report: EngineFailed) -> None:
        """Its last word; the process exits right after."""
        self._report = report
        self._die(f"{report.exception_type} in phase {report.phase.name}")

    def on_lost(self, cause: str) -> None:
        """The connection is over."""
        self._die(cause)

    def _note_step(self, before: EngineStats, step: StepOutputs) -> None:
        self._settings.metrics.step(self.name, before, step)

    # Death

    def request_ids_in_step(self, record: FlightRecord) -> frozenset[int] | None:
        """The requests of the dying step; None: whatever the engine had taken, for no step was made yet."""
        assert self.process is not None
        if record.phase in _PHASES_OF_A_STEP:
            request_ids = self.process.flight.request_ids(record.step_id)
            return None if request_ids is None else frozenset(request_ids)
        return None if record.phase in _PHASES_OF_ANYONE else frozenset()

    def _die(self, cause: str, *, is_hang: bool = False, kill_now: bool = False) -> None:
        if self.is_dead or self._is_stopping:
            return
        assert self.process is not None
        record = self.process.flight.read()
        death = self.death = Death(
            uuid.uuid4().hex, cause, self.ready is None, is_hang, self._clock(), record, self._report
        )
        if kill_now:
            self.process.kill()
        try:
            self._observer.on_engine_death(self, death)  # first, whatever the rest does
        finally:
            self.client.close()
            self._funeral = asyncio.create_task(self._bury(death, self.process))
            self._funeral.add_done_callback(self._on_funeral_done)

    async def _bury(self, death: Death, process: EngineProcess) -> None:
        if death.is_hang:
            death.stacks = await process.stacks(STACKS_TIMEOUT_S)
        if death.is_hang or await process.wait(EXIT_GRACE_S) is None:
            process.kill()
            await process.wait(REAP_TIMEOUT_S)
        death.report = self._report  # it may have been on its way when the end of file was seen
        death.root_cause = root_cause(death, process.returncode)
        self._fence(death)
        await process.wait_output(OUTPUT_TIMEOUT_S)
        if self.is_spare or (death.is_foreseen and death.decision.is_first_start):
            return  # the latter is told as what the server could not start for
        self._settings.metrics.engine_died(cause_kind(death, process))
        fields = record_fields(death, self.name, process)
        path = await self._write_report(death, process)
        logs.get_logger().critical("fatal error", **fields, crash_report=path)

    async def _write_report(self, death: Death, process: EngineProcess) -> str | None:
        """Its path; off the loop, and not for long: the record must not wait for a slow disk."""
        if self._settings.crash_dir is None:
            return None
        facts = crash_facts(death, self.name, process, self._settings.model, self.ready)
        writing = asyncio.to_thread(
            crash_report.write_report, self._settings.crash_dir, crash_report.build_report(facts)
        )
        try:
            path = await asyncio.wait_for(writing, REPORT_TIMEOUT_S)
        except TimeoutError:
            logs.get_logger().warning("crash report not written", reason="it took too long")
            return None
        return None if path is None else str(path)

    def _on_funeral_done(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for the burial must not wait for ever because of a bug in it."""
        assert self.death is not None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logs.get_logger().error("internal error", **logs.describe(error))
            self.death.root_cause = self.death.root_cause or self.death.cause
        if self.process is not None:
            self.process.kill()
        self._fence(self.death)
        self._observer.on_engine_buried(self, self.death)
        self._let_go()

    def _fence(self, death: Death) -> None:
        """It is gone: the observer is told once."""
        if not self._is_fenced:
            self._is_fenced = True
            self._observer.on_engine_fenced(self, death)

    # The watch

    async def _watch_process(self, process: EngineProcess) -> None:
        """Find the deaths that the socket does not tell: an exit that leaves it open, and a step without progress.

        Only time that this watch itself has lived through counts against the deadline: after both processes were
        frozen together (a paused container, a suspended machine), an innocent engine must not be killed.
        """
        hangs = HangWatch(self._settings.step_deadline_s)
        before_s = noted_s = self._clock()
        was_suspect = False
        while not (self.is_dead or self._is_stopping):
            status = await process.wait(WATCH_INTERVAL_S)
            if status is not None:
                # Its last words may still be in the socket; end of file follows them at once, if it follows at all.
                await asyncio.sleep(WATCH_INTERVAL_S)
                self._die("the engine process ended")
                return
            now_s = self._clock()
            elapsed_s, before_s = min(now_s - before_s, 2 * WATCH_INTERVAL_S), now_s
            if now_s - noted_s > NOTE_MEMORY_INTERVAL_S:
                noted_s = now_s
                process.note_memory()
            if self.ready is None:
                self._check_loading(process, elapsed_s)
                continue
            verdict = hangs.observe(
                process.flight.read(), self.client.num_messages_sent, elapsed_s, self.ready.step_s_per_token
            )
            if verdict.finding is Finding.HUNG:
                self._die(verdict.cause, is_hang=True)
            elif was_suspect is not (verdict.finding is Finding.SUSPECT):
                was_suspect = not was_suspect
                self._observer.on_engine_suspect(self, was_suspect)

    def _check_loading(self, process: EngineProcess, elapsed_s: float) -> None:
        if self.config is None or (self.is_standing_by and self._activation is None):
            return
        self._still_s += elapsed_s
        deadline_s = self._settings.step_deadline_s
        timeout_s = deadline_s if self._owes_sign else self.load_timeout_s
        if timeout_s is not None and self._still_s > timeout_s:
            self._die(f"no progress in loading for {timeout_s:g} s", is_hang=True)
        elif self._still_s > deadline_s and process.is_stopped:
            self._die(f"stopped from outside while loading, for {deadline_s:g} s", is_hang=True)

    def _on_watch_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # An engine that nobody watches must not live on.
            logs.get_logger().error("internal error", **logs.describe(error))
            self._die("the watch of the engine ended", kill_now=True)
