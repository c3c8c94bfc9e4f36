"""Keeps the engines: starts them, starts them again, and knows when to give up.

What lives here: which engine fills which replica's place, when the next one is started, the spare, the end of patience.
What must not: how a death is found (`engine.py`), what becomes of streams (`dispatch.py`), gRPC.

    STARTING ─► READY ⇄ SUSPECT
        └──────────┴───────┴──► DEAD ─► BACKOFF ─► STARTING …
                                  └───────┴──────► FAILED         (and STOPPING from anywhere: no death counts any more)

**Who is started when.** A death is recorded in one window for the whole server (`restart_policy.py`). While the window
has room, the place is filled again after a delay that grows with the deaths in it. When it is spent, a place waits
until deaths leave it, as long as another replica serves or starts; if none does, the server gives up. A replica whose
very first engine fails to start ends the server at once: what did not work once is not tried again.

**The spare.** Beside the replicas one more process is kept, if any restart is allowed at all: without `--standby` one
that has done its imports (the longest part of a start), with it one that has loaded all it may hold while others
serve. It takes the place of the next engine that dies, and another spare is made. Its own death is no engine death.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from scheduler import logs
from scheduler.config import EngineConfig
from scheduler.messages import Ready
from service.death import Death, Decision
from service.engine import Engine, EngineSettings
from service.errors import CallError, DrainingError, EngineDeadError, EngineStartingError
from service.replica import EngineState, Replica
from service.restart_policy import DELAY_S_MAX, WINDOW_S, RestartPolicy
from service.stream import RequestStream

DRAINING_RETRY_AFTER_S = 1.0
"""Another server behind the same name is ready at once; one that is restarted in place is not."""
START_S_UNKNOWN = 5.0
"""What a start is expected to take before any was measured."""
ACTIVATION_S = 1.0
"""What a standby is expected to take."""
IMPORTED_SHARE = 0.6
"""Of a cold start, what is left to do once the imports are done."""
LOAD_TIMEOUT_S_MIN = 60.0
LOAD_TIMEOUT_STARTS = 10
"""A stage of a restart's loading may take this many first starts; the first one may have to download."""
SPARE_DELAY_S = 5.0
"""After the engines are ready: the first requests should not share the cores with a spare's imports."""
SPARE_RETRY_S_MIN = 1.0
SPARE_RETRY_S_MAX = 60.0
SPARE_DOUBLINGS_MAX = 10
"""More would overflow one day; SPARE_RETRY_S_MAX is reached after six."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Why the server ends."""

    root_cause: str
    """One line, for the termination log."""
    is_first_start: bool
    is_configuration: bool = False
    """The engine refused its configuration while starting."""


class SupervisorObserver(Protocol):
    """Told within the same callback of the loop; the server is the real one."""

    def on_replica_ready(self, replica: Replica, ready: Ready) -> None: ...

    def on_replica_death(self, replica: Replica, death: Death) -> None: ...

    def on_replica_stall(self, replica: Replica) -> None: ...

    def on_replica_output(self, replica: Replica, stream: RequestStream, num_tokens: int) -> None: ...

    def on_last_hope_lost(self) -> None:
        """No engine serves and none will be started."""


class Supervisor:
    """Keeps `num_replicas` engines."""

    def __init__(
        self,
        config: EngineConfig,
        observer: SupervisorObserver,
        settings: EngineSettings,
        *,
        max_restarts: int,
        device_indices: Sequence[int | None] = (None,),
        keeps_standby: bool = False,
        spare_delay_s: float = SPARE_DELAY_S,
    ) -> None:
        """`device_indices`: one per replica, which GPU is its; None: no choice."""
        self._config = config
        self._observer = observer
        self._settings = settings
        self._max_restarts = max_restarts
        self._keeps_standby = keeps_standby
        self._clock = settings.clock
        self._spare_delay_s = spare_delay_s
        self._policy = RestartPolicy(max_restarts, settings.clock, random.random)
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare: Engine | None = None
        self._spare_due: asyncio.TimerHandle | None = None
        self._num_spares_lost = 0
        self._cold_start_s = START_S_UNKNOWN
        self._last_death: Death | None = None
        self._dying: set[Engine] = set()
        self.replicas = tuple(Replica(index, device_index) for index, device_index in enumerate(device_indices))
        self.gave_up: asyncio.Future[GiveUp] = asyncio.get_running_loop().create_future()
        """Done once nothing can be served any more and the last record is written."""

    # What others ask

    @property
    def is_serving(self) -> bool:
        """Whether a request sent now would be served."""
        return not self._is_stopping and any(replica.is_serving for replica in self.replicas)

    @property
    def can_recover(self) -> bool:
        """Whether an engine serves or another one will be started."""
        return any(replica.state is not EngineState.FAILED for replica in self.replicas) and not self._has_given_up

    @property
    def ready(self) -> Ready | None:
        """What the engine with the least room said of itself: what it takes, all take. None until one was ready."""
        readies = [replica.ready for replica in self.replicas if replica.ready is not None]
        return min(readies, key=lambda ready: ready.max_model_len, default=None)

    @property
    def has_standby(self) -> bool:
        """Whether a spare has all loaded that it may."""
        spare = self._spare  # looked at once: a scrape asks from a thread of its own
        return spare is not None and spare.is_standing_by

    @property
    def spare_pid(self) -> int:
        """Of the spare's process; 0 if there is none."""
        return 0 if self._spare is None else self._spare.pid

    def refusal(self) -> CallError:
        """What a call is told while nobody serves. Fresh for each."""
        retry_after_s = self.expected_serving_s()
        if self._is_stopping and not self._has_given_up:
            return DrainingError(DRAINING_RETRY_AFTER_S)
        if self._last_death is None or any(replica.state is EngineState.STARTING for replica in self.replicas):
            return EngineStartingError(retry_after_s)
        return EngineDeadError(self._last_death.death_id, in_step=False, retry_after_s=retry_after_s)

    def expected_serving_s(self) -> float:
        """Expected time until a request would be served. After giving up it is this process's successor who does."""
        if self.is_serving:
            return 0.1
        now_s = self._clock()
        load_s = self._cold_start_s
        if self._spare is not None:
            load_s = ACTIVATION_S if self.has_standby else IMPORTED_SHARE * load_s
        waits_s = [self._cold_start_s + 1.0]
        for replica in self.replicas:
            match replica.state:
                case EngineState.STARTING:
                    waits_s.append(max(self._cold_start_s - (now_s - replica.state_since_s), 0.5))
                case EngineState.BACKOFF if replica.next_start_s is not None:
                    waits_s.append(max(replica.next_start_s - now_s, 0.0) + load_s)
                case EngineState.DEAD if not self._has_given_up:
                    waits_s.append((self._policy.expected_delay_s() or 0.0) + load_s)
                case _:
                    pass
        return min(waits_s)

    # Starting and stopping

    async def start(self) -> None:
        """Start all engines and begin to watch them. From the main thread. Raises OSError."""
        for replica in self.replicas:
            replica.state_since_s = self._clock()
            await self._fill(replica)

    async def stop(self) -> None:
        """End all engines on purpose; they are reaped on return."""
        self._begin_to_stop()
        engines = [replica.engine for replica in self.replicas if replica.engine is not None]
        if self._spare is not None:
            engines.append(self._spare)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(engine.stop() for engine in {*engines, *self._dying}))

    def kill(self) -> None:
        """End all engines on purpose and at once."""
        self._begin_to_stop()
        for replica in self.replicas:
            if replica.engine is not None:
                replica.engine.kill()
        if self._spare is not None:
            self._spare.kill()

    def _begin_to_stop(self) -> None:
        self._is_stopping = True  # before anything is torn down, or this would look like a death
        if self._spare_due is not None:
            self._spare_due.cancel()
        for replica in self.replicas:
            if replica.state is not EngineState.STOPPING:
                replica.move_to(EngineState.STOPPING, self._clock())

    async def _fill(self, replica: Replica) -> None:
        """Put an engine into the replica's place: the spare, if it is there, else a new process."""
        spare = self._take_spare()
        is_new = spare is None
        engine = replica.engine = spare or self._new_engine(str(replica.index))
        engine.rename(str(replica.index))
        if replica.ready is not None:
            engine.load_timeout_s = self._load_timeout_s()
        if is_new:
            await engine.start()
        logs.get_logger().info(
            "engine starting",
            engine=engine.name,
            pid=engine.pid,
            model=self._config.model,
            spare="none" if is_new else "imports" if engine.config is None else "standby",
        )
        if engine.config is None:
            engine.configure(replace(self._config, device_index=replica.device_index))
        else:
            engine.activate(replica.device_index)

    def _load_timeout_s(self) -> float:
        return max(LOAD_TIMEOUT_S_MIN, LOAD_TIMEOUT_STARTS * self._cold_start_s)

    def _new_engine(self, name: str) -> Engine:
        return Engine(name, self, self._settings)

    def _replica_of(self, engine: Engine) -> Replica | None:
        return next((replica for replica in self.replicas if replica.engine is engine), None)

    # What engines tell

    def on_engine_standing_by(self, engine: Engine) -> None:
        """A spare has loaded all it may."""
        if engine is self._spare:
            self._num_spares_lost = 0
            logs.get_logger().info("standby ready", pid=engine.pid)

    def on_engine_ready(self, engine: Engine, ready: Ready) -> None:
        """A place is filled again."""
        replica = self._replica_of(engine)
        if replica is None or self._is_stopping:
            return
        if not engine.is_standing_by:
            self._cold_start_s = ready.startup_s
        replica.ready = ready
        replica.move_to(EngineState.READY, self._clock())
        after = {}
        if self._last_death is not None:
            after = {"since_last_death_s": round(self._clock() - self._last_death.monotonic_s, 2)}
        startup_s = round(ready.startup_s, 2)
        logs.get_logger().info("engine ready", engine=engine.name, pid=ready.pid, startup_s=startup_s, **after)
        self._observer.on_replica_ready(replica, ready)
        self._plan_spare(0.0 if self._keeps_standby else self._spare_delay_s)

    def on_engine_suspect(self, engine: Engine, is_suspect: bool) -> None:
        """Its step takes long; or no longer."""
        replica = self._replica_of(engine)
        if replica is not None and replica.is_serving:
            replica.move_to(EngineState.SUSPECT if is_suspect else EngineState.READY, self._clock())
            logs.get_logger().warning("engine suspect" if is_suspect else "engine goes on", engine=engine.name)
            if is_suspect:
                self._observer.on_replica_stall(replica)

    def on_engine_output(self, engine: Engine, stream: RequestStream, num_tokens: int) -> None:
        """A step has brought a stream something."""
        replica = self._replica_of(engine)
        if replica is not None:
            self._observer.on_replica_output(replica, stream, num_tokens)

    def on_engine_death(self, engine: Engine, death: Death) -> None:
        """Decide what comes next, then tell; all before anybody waits."""
        replica = self._replica_of(engine)
        if replica is None or self._is_stopping:
            engine.is_spare = True
            return
        self._dying.add(engine)
        self._last_death = death
        replica.num_deaths += 1
        replica.last_death_id = death.death_id
        replica.move_to(EngineState.DEAD, self._clock())
        death.decision = self._decide(replica, engine.served_s)
        self._foresee_start(replica, death.decision.restart_in_s)
        self._observer.on_replica_death(replica, death)
        if death.decision.gives_up:
            self._observer.on_last_hope_lost()

    def on_engine_fenced(self, engine: Engine, death: Death) -> None:
        """It is gone, and its memory with it."""
        replica = self._replica_of(engine)
        if replica is None:
            self._lose_spare(engine, death)
            return
        if self._is_stopping:
            return
        replica.engine = None
        delay_s = death.decision.restart_in_s
        if delay_s is None:
            replica.move_to(EngineState.FAILED, self._clock())
            return
        self._foresee_start(replica, delay_s)
        replica.move_to(EngineState.BACKOFF, self._clock())
        self._spawn(self._restart(replica, delay_s))

    def on_engine_buried(self, engine: Engine, death: Death) -> None:
        """Its record is written."""
        self._dying.discard(engine)
        if death.decision.gives_up and not self.gave_up.done():
            decision, cause = death.decision, death.root_cause
            if not decision.is_first_start:
                cause += (
                    f"; gave up after {decision.num_deaths_in_window} engine deaths within {WINDOW_S:g} s "
                    f"(--max-engine-restarts {self._max_restarts}); death_id {death.death_id}"
                )
            end = GiveUp(cause, decision.is_first_start, death.is_configuration)
            self.gave_up.set_result(end)

    # Starting again

    @property
    def _has_given_up(self) -> bool:
        return self.gave_up.done() or (self._last_death is not None and self._last_death.decision.gives_up)

    def _decide(self, replica: Replica, served_s: float) -> Decision:
        """When the next engine is started in this place, if ever."""
        if replica.ready is None:
            return Decision(gives_up=True, is_first_start=True)
        self._policy.record_death(served_s)
        delay_s = self._policy.delay_s()
        gives_up = False
        if delay_s is None:
            others = (other for other in self.replicas if other is not replica)
            gives_up = not any(other.is_serving or self._is_due(other) for other in others)
            delay_s = None if gives_up else self._policy.window_frees_in_s()
        return Decision(
            restart_in_s=None if delay_s is None else round(delay_s, 3),
            gives_up=gives_up,
            num_deaths_in_window=self._policy.num_deaths,
            num_restarts_max=self._max_restarts,
        )

    def _is_due(self, replica: Replica) -> bool:
        """Whether its next engine starts now or soon, not when the window has room again."""
        if replica.state is EngineState.STARTING:
            return True
        return replica.next_start_s is not None and replica.next_start_s - self._clock() <= DELAY_S_MAX

    def _foresee_start(self, replica: Replica, delay_s: float | None) -> None:
        """From the decision on: another death in the same moment must find it."""
        replica.next_start_s = None if delay_s is None else self._clock() + delay_s

    async def _restart(self, replica: Replica, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        replica.next_start_s = None
        replica.move_to(EngineState.STARTING, self._clock())
        try:
            await self._fill(replica)
        except OSError as error:
            self._could_not_fill(replica, error)

    def _could_not_fill(self, replica: Replica, error: OSError) -> None:
        """The system has no process for us: one more failed start."""
        replica.engine = None
        replica.move_to(EngineState.BACKOFF, self._clock())
        decision = self._decide(replica, 0.0)
        logs.get_logger().error(
            "engine not started", engine=str(replica.index), reason=error.strerror, restart_in_s=decision.restart_in_s
        )
        delay_s = decision.restart_in_s
        if delay_s is not None:
            self._foresee_start(replica, delay_s)
            self._spawn(self._restart(replica, delay_s))
            return
        replica.move_to(EngineState.FAILED, self._clock())
        if decision.gives_up and not self.gave_up.done():
            self.gave_up.set_result(GiveUp(f"cannot start the engine process: {error.strerror}", is_first_start=False))
            self._observer.on_last_hope_lost()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.get_logger().error("internal error", **logs.describe(error))
            if not self.gave_up.done():  # or the place would stay empty without anybody knowing
                self.gave_up.set_result(GiveUp("the supervisor failed", is_first_start=False))
                self._observer.on_last_hope_lost()

    # The spare

    def _plan_spare(self, delay_s: float) -> None:
        """Make a spare in a while, unless there is one."""
        if self._max_restarts == 0 or self._is_stopping or self._spare is not None or self._spare_due is not None:
            return
        self._spare_due = asyncio.get_running_loop().call_later(delay_s, self._begin_spare)

    def _begin_spare(self) -> None:
        self._spare_due = None
        if all(replica.is_serving or replica.state is EngineState.FAILED for replica in self.replicas):
            self._spawn(self._make_spare())
        # Else somebody starts, who should not share the cores; a spare is planned again when that one is ready.

    async def _make_spare(self) -> None:
        if self._spare is not None or self._is_stopping:
            return
        spare = self._spare = self._new_engine("spare")
        try:
            await spare.start()
        except OSError as error:
            self._spare = None
            logs.get_logger().warning("spare not started", reason=error.strerror)
            self._plan_spare(SPARE_RETRY_S_MAX)
            return
        if self._keeps_standby:
            spare.load_timeout_s = self._load_timeout_s()
            spare.configure(replace(self._config, standby=True))

    def _take_spare(self) -> Engine | None:
        """The spare, if it is of use now; one whose process is being started at this moment stays what it is."""
        spare = self._spare
        if spare is None or not spare.is_started:
            return None
        self._spare = None
        if spare.is_dead:
            return None
        if spare.is_stopped:
            logs.get_logger().warning("spare lost", cause="stopped from outside", next_in_s=None)
            spare.kill()
            self._spawn(spare.stop())
            return None
        self._num_spares_lost = 0
        return spare

    def _lose_spare(self, spare: Engine, death: Death) -> None:
        if spare is not self._spare:
            return
        self._spare = None
        if self._is_stopping:
            return
        self._num_spares_lost += 1
        doublings = min(self._num_spares_lost - 1, SPARE_DOUBLINGS_MAX)
        retry_s = min(SPARE_RETRY_S_MIN * 2.0**doublings, SPARE_RETRY_S_MAX)
        logs.get_logger().warning("spare lost", cause=death.root_cause, next_in_s=retry_s)
        self._plan_spare(retry_s)
