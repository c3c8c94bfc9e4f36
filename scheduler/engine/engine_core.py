"""The engine's loop body: drain, schedule, execute, update. Nothing else advances a request.

What lives here: the order of the four verbs and what is said to the front end. What must not: policy (the
scheduler's), tensors (the runner's), sockets and signals (`process.py`'s). Scheduler, runner, inbox and clock are
handed in, so that all of it runs in a test without a process or a model.

An exception of the runner is contained where the process is healthy: the step is dropped, the runner reset, and
`containment.py` finds out whom it concerns. An exception over one Submit fails that request. Any other leaves unknown
state behind, so it is not caught here: it is the death of this engine, and `process.py` reports it.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler import logs
from scheduler.codec import Message
from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.scheduler import Scheduler
from scheduler.engine.containment import Cause, Containment, cause_of
from scheduler.flight_record import StepShape
from scheduler.messages import (
    Abort,
    EngineStats,
    FailureKind,
    Phase,
    RequestFailure,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    Submit,
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


class EngineCore:
    """One engine: takes messages, makes steps, gives back what each step has to say."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        receive: Callable[[], Sequence[Message]],
        recorder: Recorder,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._receive = receive
        self._recorder = recorder
        self._containment = Containment(scheduler)
        self._submits_waiting: list[Submit] = []
        self._held_up: list[Submit] = []
        """Those whose guides are being read."""
        self._outputs: list[SequenceOutput] = []
        self._failures: list[RequestFailure] = []
        self._stats_sent = EngineStats()
        self._step_id = 0
        self.is_shutting_down = False

    @property
    def has_work(self) -> bool:
        """True if a step would compute something."""
        return (
            bool(self._submits_waiting or self._held_up) or self._scheduler.has_work or self._containment.is_isolating
        )

    @property
    def is_held_up(self) -> bool:
        """True if all there is to do waits for guides to be read, so that a step would compute nothing yet."""
        is_busy = self._submits_waiting or self._scheduler.has_work or self._containment.is_isolating
        return bool(self._held_up) and not is_busy

    def step(self) -> StepOutputs | None:
        """Make one step over whatever there is to do.

        Returns what the front end must be told, or None if nothing changed. With no work it only drains the inbox.
        Raises what the runner raised if the process is not healthy any more.
        """
        self._recorder.enter(Phase.DRAIN, self._step_id)
        self._take(self._receive())
        self._submit_waiting()

        self._recorder.enter(Phase.SCHEDULE, self._step_id)
        if self._containment.settle():
            self._runner.reset()
        plan = self._scheduler.schedule()
        if plan is None:
            return self._collect()
        self._step_id = plan.step_id
        shape = shape_of(plan)
        self._recorder.record(shape, self._scheduler.step_request_ids)

        self._recorder.enter(Phase.EXECUTE, self._step_id)
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            if not self._contain(error, shape):
                raise
            return self._collect()

        self._recorder.enter(Phase.UPDATE, self._step_id)
        self._take(self._receive())  # aborts that came meanwhile: their results are dropped, their blocks freed now
        outputs, failures = self._scheduler.update_from_output(plan, result)
        self._outputs += outputs
        self._failures += failures
        self._containment.step_succeeded()
        return self._collect()

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
        """Apply aborts at once, ahead of the Submits that wait; keep Submits for the next step."""
        aborted: set[int] = set()
        for message in messages:
            match message:
                case Submit():
                    self._submits_waiting.append(message)
                case Abort():
                    aborted.update(message.request_ids)
                case Shutdown():
                    self.is_shutting_down = True
                case _:
                    raise TypeError(f"an engine is not told {type(message).__name__}")
        if aborted:
            self._submits_waiting = [s for s in self._submits_waiting if s.request_id not in aborted]
            self._held_up = [s for s in self._held_up if s.request_id not in aborted]
            self._scheduler.abort(aborted)

    def _submit_waiting(self) -> None:
        held_up: list[Submit] = []
        for submit in self._held_up + self._submits_waiting:
            if submit.guide and not self._runner.is_guide_ready(submit.guide, submit.stopping.eos_token_ids):
                held_up.append(submit)
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
        self._held_up = held_up
        self._submits_waiting.clear()

    def _collect(self) -> StepOutputs | None:
        stats = self._scheduler.stats()
        if not self._outputs and not self._failures and stats == self._stats_sent:
            return None
        message = StepOutputs(self._step_id, tuple(self._outputs), tuple(self._failures), stats)
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
