"""The engine's loop body: drain, schedule, execute, update. Nothing else advances a request.

What lives here: the order of the four verbs and what is said to the front end. What must not: policy (the
scheduler's), tensors (the runner's), sockets and signals (`process.py`'s). Scheduler, runner, inbox and clock are
handed in, so that all of it runs in a test without a process or a model.

An exception anywhere in a step leaves the state of scheduler and runner unknown, so it is not caught here: it is the
death of this engine, and `process.py` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler.codec import Message
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.scheduler import RequestNeverFitsError, Scheduler
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

    def execute(self, plan: StepPlan) -> StepResult: ...


class Recorder(Protocol):
    """Told where the loop is; `flight_recorder.py` is the real one."""

    def enter(self, phase: Phase, step_id: int) -> None: ...

    def record(self, shape: StepShape) -> None: ...


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
        self._submits_waiting: list[Submit] = []
        self._outputs: list[SequenceOutput] = []
        self._failures: list[RequestFailure] = []
        self._stats_sent = EngineStats()
        self._step_id = 0
        self.is_shutting_down = False

    @property
    def has_work(self) -> bool:
        """True if a step would compute something."""
        return bool(self._submits_waiting) or self._scheduler.has_work

    def step(self) -> StepOutputs | None:
        """Make one step over whatever there is to do.

        Returns what the front end must be told, or None if nothing changed. With no work it only drains the inbox.
        """
        self._recorder.enter(Phase.DRAIN, self._step_id)
        self._take(self._receive())
        self._submit_waiting()

        self._recorder.enter(Phase.SCHEDULE, self._step_id)
        plan = self._scheduler.schedule()
        if plan is None:
            return self._collect()
        self._step_id = plan.step_id
        self._recorder.record(shape_of(plan))

        self._recorder.enter(Phase.EXECUTE, self._step_id)
        result = self._runner.execute(plan)

        self._recorder.enter(Phase.UPDATE, self._step_id)
        self._take(self._receive())  # aborts that came meanwhile: their results are dropped, their blocks freed now
        outputs, failures = self._scheduler.update_from_output(plan, result)
        self._outputs += outputs
        self._failures += failures
        return self._collect()

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
            self._scheduler.abort(aborted)

    def _submit_waiting(self) -> None:
        for submit in self._submits_waiting:
            try:
                output = self._scheduler.add_request(submit)
            except RequestNeverFitsError:
                self._failures.append(RequestFailure(submit.request_id, FailureKind.NEVER_FITS))
            else:
                if output is not None:  # its resumed tokens were already all there is
                    self._outputs.append(output)
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
