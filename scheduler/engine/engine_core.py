"""The engine's loop body: drain, schedule, execute, update. Nothing else advances a request.

What lives here: the order of the four verbs and what is said to the front end. What must not: policy (the
scheduler's), tensors (the runner's), sockets and signals (`process.py`'s). Scheduler, runner, inbox and clock are
handed in, so that all of it runs in a test without a process or a model.

**Pauses** are applied between steps, and not while requests are isolated: the isolation of one that gets no steps would
never end, and all others would wait for it. That of a request whose guide is still being read waits with it. **What
waits too long** for its first step fails before a step is planned, so it is never in one; `idle_timeout_s` says when a
loop that has nothing to do must look again.

An exception of the runner is contained where the process is healthy: the step is dropped, the runner reset, and
`containment.py` finds out whom it concerns. An exception over one Submit fails that request. Any other leaves unknown
state behind, so it is not caught here: it is the death of this engine, and `process.py` reports it.
"""

from __future__ import annotations

import math
import secrets
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from scheduler import logs
from scheduler.codec import Message
from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.scheduler import Scheduler
from scheduler.engine.containment import Cause, Containment, cause_of
from scheduler.engine.queue_deadlines import QueueDeadlines
from scheduler.engine.queue_times import QueueTimes
from scheduler.flight_record import StepShape
from scheduler.messages import (
    Abort,
    EngineStats,
    FailureKind,
    Pause,
    Phase,
    RequestFailure,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    Submit,
    Unpause,
)


class Runner(Protocol):
    """Computes a step; `scheduler/model/model_runner.py` is the real one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. If it raises an `Exception`, `reset` and `probe` come next."""
        ...

    def is_guide_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether a request with this guide would make no step wait. If not, its reading has begun: ask again."""
        ...

    def reset(self) -> None:
        """Forget every sequence, whatever state a failed step left them in; KV blocks keep what is in them."""
        ...

    def probe(self) -> None:
        """Compute a tiny step that no sequence has a part in. Raises if this process cannot compute any more."""
        ...


class Recorder(Protocol):
    """Told where the loop is; `flight_recorder.py` is the real one."""

    def enter(self, phase: Phase, step_id: int) -> None: ...

    def record(self, shape: StepShape, request_ids: Sequence[int]) -> None: ...


class _Arrival(NamedTuple):
    """A Submit that the scheduler has not got yet."""

    submit: Submit
    expires_s: float
    """When its `queue_timeout_s` is over; infinite if it has none."""


class EngineCore:
    """One engine: takes messages, makes steps, gives back what each step has to say."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        receive: Callable[[], Sequence[Message]],
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._receive = receive
        self._recorder = recorder
        self._clock = clock
        self._containment = Containment(scheduler)
        self._queue_times = QueueTimes(clock)
        self._deadlines = QueueDeadlines(scheduler.has_run)
        self._submits_waiting: list[_Arrival] = []
        self._held_up: list[_Arrival] = []
        """Those whose guides are being read."""
        self._pauses_waiting: dict[int, bool] = {}
        """Request → whether it is to be paused."""
        self._pauses_held_up: dict[int, bool] = {}
        """The same of those whose guides are being read: the scheduler does not know them yet, nor are they work."""
        self._outputs: list[SequenceOutput] = []
        self._failures: list[RequestFailure] = []
        self._stats_sent = EngineStats()
        self._step_id = 0
        self.is_shutting_down = False

    @property
    def has_work(self) -> bool:
        """True if a step would compute something."""
        return bool(self._held_up) or self._is_busy

    @property
    def _is_busy(self) -> bool:
        is_told = bool(self._submits_waiting or self._pauses_waiting)
        return is_told or self._scheduler.has_work or self._containment.is_isolating

    @property
    def is_held_up(self) -> bool:
        """True if all there is to do waits for guides to be read, so that a step would compute nothing yet."""
        return bool(self._held_up) and not self._is_busy

    def idle_timeout_s(self) -> float | None:
        """Without work: seconds until there is something to do though no message comes; None: for ever."""
        next_s = self._deadlines.next_s()
        return None if next_s is None else max(0.0, next_s - self._clock())

    def step(self) -> StepOutputs | None:
        """Make one step over whatever there is to do.

        Returns what the front end must be told, or None if nothing changed. With no work it only drains the inbox.
        Raises what the runner raised if the process is not healthy any more.
        """
        self._recorder.enter(Phase.DRAIN, self._step_id)
        self._take(self._receive())
        begun_s = self._clock()
        self._submit_waiting(begun_s)
        self._fail_expired(begun_s)

        self._recorder.enter(Phase.SCHEDULE, self._step_id)
        if self._containment.settle():
            self._runner.reset()
        if not self._containment.is_isolating:
            self._apply_pauses()
        plan = self._scheduler.schedule()
        if plan is None:
            return self._collect()
        self._step_id = plan.step_id
        shape = shape_of(plan)
        self._recorder.record(shape, self._scheduler.step_request_ids)
        self._queue_times.scheduled(self._scheduler.step_request_ids)

        self._recorder.enter(Phase.EXECUTE, self._step_id)
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            if not self._contain(error, shape):
                raise
            return self._collect(shape, begun_s)

        self._recorder.enter(Phase.UPDATE, self._step_id)
        self._take(self._receive())  # aborts that came meanwhile: their results are dropped, their blocks freed now
        outputs, failures = self._scheduler.update_from_output(plan, result)
        self._outputs += outputs
        self._failures += failures
        self._containment.step_succeeded()
        return self._collect(shape, begun_s)

    def _contain(self, error: Exception, shape: StepShape) -> bool:
        """Drop the failed step and go on without it. False if the process is in no state to go on."""
        cause = cause_of(error)
        if cause is Cause.DEVICE:
            return False
        is_news = self._containment.is_quiet
        description = logs.describe(error)
        _clear_frames(error)
        num_requests = len(set(self._scheduler.step_request_ids))
        failures = self._containment.step_failed(cause, shape)
        try:
            self._runner.reset()
            self._runner.probe()
        except Exception:  # noqa: BLE001 - whatever it is, the step's own failure is the cause to be told
            return False
        self._failures += failures
        if not is_news:
            del description["where"]  # the halves of one step fail in one place
        logs.get_logger().warning(
            "step contained",
            step_id=shape.step_id,
            shape=str(shape),
            cause=cause.name.lower(),
            num_requests=num_requests,
            num_requests_failed=len(failures),
            **description,
        )
        return True

    def _take(self, messages: Iterable[Message]) -> None:
        """Apply aborts at once, ahead of the Submits that wait; keep Submits and pauses for the next step."""
        aborted: set[int] = set()
        for message in messages:
            match message:
                case Submit():
                    timeout_s = math.inf if message.queue_timeout_s is None else message.queue_timeout_s
                    self._submits_waiting.append(_Arrival(message, self._clock() + timeout_s))
                    self._queue_times.arrived(message.request_id)
                case Abort():
                    aborted.update(message.request_ids)
                    self._scheduler.abort_sequences(message.sequences)
                case Pause():
                    self._pauses_waiting.update(dict.fromkeys(message.request_ids, True))
                case Unpause():
                    self._pauses_waiting.update(dict.fromkeys(message.request_ids, False))
                case Shutdown():
                    self.is_shutting_down = True
                case _:
                    raise TypeError(f"an engine is not told {type(message).__name__}")
        if aborted:
            self._submits_waiting = [one for one in self._submits_waiting if one.submit.request_id not in aborted]
            self._held_up = [one for one in self._held_up if one.submit.request_id not in aborted]
            self._scheduler.abort(aborted)
            self._queue_times.forget(aborted)

    def _submit_waiting(self, now_s: float) -> None:
        held_up: list[_Arrival] = []
        for arrival in self._held_up + self._submits_waiting:
            submit = arrival.submit
            if arrival.expires_s <= now_s:
                self._failures.append(RequestFailure(submit.request_id, FailureKind.QUEUE_TIMEOUT))
                continue
            if submit.guide and not self._runner.is_guide_ready(submit.guide, submit.stopping.eos_token_ids):
                held_up.append(arrival)
                continue
            try:
                outputs = self._scheduler.add_request(submit)
            except RequestNeverFitsError:
                self._failures.append(RequestFailure(submit.request_id, FailureKind.NEVER_FITS))
            except Exception as error:  # noqa: BLE001 - a request that we have no place for is not the engine's death
                incident_id = secrets.token_hex(8)
                logs.get_logger().error("request failed", incident_id=incident_id, **logs.describe(error))
                self._scheduler.abort((submit.request_id,))  # should it have been here before, nothing of it is now
                self._failures.append(RequestFailure(submit.request_id, FailureKind.INTERNAL, incident_id))
            else:
                self._outputs += outputs  # of sequences whose resumed tokens were already all there is
                if submit.queue_timeout_s is not None:
                    self._deadlines.add(submit.request_id, arrival.expires_s)
        self._held_up = held_up
        self._submits_waiting.clear()

    def _fail_expired(self, now_s: float) -> None:
        expired = self._deadlines.take_expired(now_s)
        self._scheduler.abort(expired)
        self._failures += [RequestFailure(request_id, FailureKind.QUEUE_TIMEOUT) for request_id in expired]

    def _apply_pauses(self) -> None:
        pauses = self._pauses_held_up | self._pauses_waiting
        if not pauses:
            return
        self._pauses_held_up, self._pauses_waiting = {}, {}
        held_up = {arrival.submit.request_id for arrival in self._held_up}
        for request_id, is_paused in pauses.items():
            if request_id in held_up:
                self._pauses_held_up[request_id] = is_paused
            elif is_paused:
                self._scheduler.pause((request_id,))
            else:
                self._scheduler.unpause((request_id,))

    def _collect(self, shape: StepShape | None = None, begun_s: float = 0.0) -> StepOutputs | None:
        """All there is to say; `shape` is that of the step that was made, if one was."""
        stats = self._scheduler.stats()
        if not self._outputs and not self._failures and stats == self._stats_sent:
            return None
        self._queue_times.forget(failure.request_id for failure in self._failures)
        outputs = tuple(self._queue_times.stamp(self._outputs))
        message = StepOutputs(
            self._step_id,
            outputs,
            tuple(self._failures),
            stats,
            step_s=0.0 if shape is None else self._clock() - begun_s,
            num_seqs=0 if shape is None else shape.num_seqs,
            num_batched_tokens=0 if shape is None else shape.num_batched_tokens,
        )
        self._outputs.clear()
        self._failures.clear()
        self._stats_sent = stats
        return message


def shape_of(plan: StepPlan) -> StepShape:
    """What a step is made of, in counts."""
    return StepShape(
        step_id=plan.step_id,
        num_seqs=len(plan.seq_ids),
        num_batched_tokens=plan.num_batched_tokens,
        num_new=len(plan.new),
        num_preempted=len(plan.preempted_seq_ids),
        max_query_len=max(plan.num_scheduled_tokens),
    )


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames that raised still hold: after running out of memory that may be most of it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
