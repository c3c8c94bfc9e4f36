"""scheduler/engine/engine_core.py: drain, schedule, execute, update; and what the front end is told of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler.codec import Message
from scheduler.core.config import SchedulerConfig
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.scheduler import Scheduler
from scheduler.engine.engine_core import EngineCore
from scheduler.engine.queue_times import QueueTimes
from scheduler.flight_record import StepShape
from scheduler.messages import (
    Abort,
    FailureKind,
    FinishReason,
    LoadProgress,
    Pause,
    Phase,
    RequestFailure,
    Shutdown,
    StepOutputs,
    Unpause,
)
from tests.core.failing_runner import FailingRunner
from tests.fakes import FakeClock, make_submit, reference_output

NUM_KV_BLOCKS = 16
BLOCK_SIZE = 4


class Recorder:
    """Keeps what a flight recorder would be told."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.shapes: list[StepShape] = []
        self.request_ids: list[Sequence[int]] = []

    def enter(self, phase: Phase, step_id: int) -> None:
        self.phases.append(phase)

    def record(self, shape: StepShape, request_ids: Sequence[int]) -> None:
        self.shapes.append(shape)
        self.request_ids.append(request_ids)


class HookedRunner(FailingRunner):
    """A fake runner during whose steps something may happen."""

    during_step: Callable[[], None] = staticmethod(lambda: None)

    def execute(self, plan: StepPlan) -> StepResult:
        self.during_step()
        return super().execute(plan)


class World:
    """An engine core on fakes, with its inbox."""

    def __init__(self, *, poison_token_id: int | None = None) -> None:
        self.inbox: deque[Message] = deque()
        self.recorder = Recorder()
        self.runner = HookedRunner(num_kv_blocks=NUM_KV_BLOCKS, block_size=BLOCK_SIZE, poison_token_id=poison_token_id)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=8,
                max_model_len=NUM_KV_BLOCKS * BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                num_kv_blocks=NUM_KV_BLOCKS,
            )
        )
        self.clock = FakeClock()
        self.core = EngineCore(self.scheduler, self.runner, self.receive, self.recorder, self.clock)

    def receive(self) -> list[Message]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def run(self) -> list[StepOutputs]:
        """Steps until there is nothing to do; all that was said."""
        said = []
        for _ in range(1000):
            outputs = self.core.step()
            if outputs is not None:
                said.append(outputs)
            if not self.core.has_work and not self.inbox:
                return said
        raise AssertionError("the engine never came to rest")


def test_a_step_walks_the_phases_in_order_and_records_its_shape_before_it_runs() -> None:
    """Drain, schedule, execute, update; the shape is on record when the runner is called."""
    world = World()
    world.inbox.append(make_submit(1, range(5), max_tokens=1))
    seen: list[list[StepShape]] = []
    world.runner.during_step = lambda: seen.append(list(world.recorder.shapes))
    world.core.step()
    assert world.recorder.phases == [Phase.DRAIN, Phase.SCHEDULE, Phase.EXECUTE, Phase.UPDATE]
    assert seen == [[StepShape(1, num_seqs=1, num_batched_tokens=5, num_new=1, num_preempted=0, max_query_len=5)]]
    assert world.recorder.request_ids == [(1,)]


def test_a_steady_batch_is_recorded_as_the_same_object() -> None:
    """While the same requests decode, the recorder is given the very tuple of the step before."""
    world = World()
    world.inbox.extend([make_submit(7, [1], max_tokens=9), make_submit(3, [2], max_tokens=9)])
    for _ in range(5):
        world.core.step()
    _, *steady = world.recorder.request_ids
    assert steady[0] == (7, 3)
    assert all(request_ids is steady[0] for request_ids in steady)


def test_requests_get_their_tokens_one_message_a_step() -> None:
    """All that one step brings to all sequences is one message, and the tokens are those of each request alone."""
    world = World()
    submits = [make_submit(i, range(i, i + 3), max_tokens=5) for i in (1, 2)]
    world.inbox.extend(submits)
    said = world.run()
    for submit in submits:
        mine = [o for message in said for o in message.outputs if o.request_id == submit.request_id]
        expected = reference_output(submit, vocab_size=50, max_model_len=NUM_KV_BLOCKS * BLOCK_SIZE)
        assert (tuple(t for o in mine for t in o.new_token_ids), mine[-1].finish_reason) == expected
    assert [len(message.outputs) for message in said] == [2] * 5
    assert said[-1].stats.num_used_kv_blocks == 0


def test_a_requests_first_output_tells_how_long_it_queued() -> None:
    """Whoever begins a step later has waited longer; later outputs say nothing, and nothing is kept of anyone, nor
    of one that was aborted in the queue.
    """
    world = World()
    world.core._queue_times = QueueTimes(lambda: float(world.core._step_id))
    world.inbox.extend(make_submit(i, range(i, i + 8), max_tokens=3) for i in range(1, 7))
    said = [world.core.step()]
    world.inbox.append(Abort((6,)))
    said += world.run()
    times: dict[int, list[float | None]] = {}
    for output in (output for message in said if message is not None for output in message.outputs):
        times.setdefault(output.request_id, []).append(output.queue_s)
    assert sorted(times) == [1, 2, 3, 4, 5]
    assert all(rest == [None, None] for _, *rest in times.values())
    firsts = [told[0] or 0.0 for told in times.values()]
    assert firsts[0] == 1
    assert firsts == sorted(firsts)
    assert firsts[-1] > firsts[0]
    assert len(world.core._queue_times) == 0


def test_an_abort_overtakes_queued_submits() -> None:
    """A request aborted before its first step never runs, though its Submit came first."""
    world = World()
    world.inbox.extend([make_submit(1, range(4)), make_submit(2, range(4), max_tokens=2), Abort((1,))])
    said = world.run()
    assert {o.request_id for message in said for o in message.outputs} == {2}


def test_an_abort_during_a_step_frees_the_blocks_with_that_step() -> None:
    """What arrives while the runner works is applied before the update: no output, no blocks held, and it is told."""
    world = World()
    world.inbox.append(make_submit(1, range(5), max_tokens=50))
    world.runner.during_step = lambda: world.inbox.append(Abort((1, 77)))
    message = world.core.step()
    assert message is None or message.outputs == ()
    assert world.scheduler.stats().num_used_kv_blocks == 0
    assert not world.core.has_work


def test_changed_stats_are_told_without_outputs() -> None:
    """The abort of the last request is told by the stats alone; a second idle step says nothing."""
    world = World()
    world.inbox.append(make_submit(1, range(5), max_tokens=50))
    first = world.core.step()
    assert first is not None
    assert first.stats.num_used_kv_blocks > 0
    world.inbox.append(Abort((1,)))
    told = world.core.step()
    assert told is not None
    assert (told.outputs, told.stats.num_used_kv_blocks, told.stats.num_running) == ((), 0, 0)
    assert world.core.step() is None


def test_what_never_fits_fails_alone() -> None:
    """A request larger than the pool is one failure; its neighbour runs."""
    world = World()
    world.inbox.extend([make_submit(1, range(NUM_KV_BLOCKS * BLOCK_SIZE + 1)), make_submit(2, range(4), max_tokens=1)])
    (message,) = world.run()
    assert message.failures == (RequestFailure(1, FailureKind.NEVER_FITS),)
    assert [o.request_id for o in message.outputs] == [2]


def test_non_finite_logits_fail_one_request() -> None:
    """A poisoned row is a failure of its request; the others in the step get their tokens."""
    world = World(poison_token_id=49)
    world.inbox.extend([make_submit(1, [1, 2, 49]), make_submit(2, [3, 4, 5], max_tokens=1)])
    (message, *_) = world.run()
    assert message.failures == (RequestFailure(1, FailureKind.NON_FINITE),)
    assert [o.request_id for o in message.outputs] == [2]


def test_resumed_tokens_that_end_a_request_are_answered_without_a_step() -> None:
    """max_tokens reached by resumed tokens is an output with a finish reason and no new token; nothing is computed."""
    world = World()
    world.inbox.append(make_submit(1, range(4), max_tokens=2, resume_token_ids=(7, 8)))
    (message,) = world.run()
    (output,) = message.outputs
    assert (output.new_token_ids, output.finish_reason) == ((), FinishReason.MAX_TOKENS)
    assert world.runner.num_tokens_computed_total == 0


@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
def test_an_exception_of_the_scheduler_is_not_caught_here(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that raises is in an unknown state: the core lets it through to the process's fatal boundary."""
    world = World()

    def explode(*_: object) -> None:
        raise RuntimeError("bug")

    world.inbox.append(make_submit(1, range(4)))
    monkeypatch.setattr(world.scheduler, method, explode)
    with pytest.raises(RuntimeError, match="bug"):
        world.core.step()
    assert world.runner.num_resets == 0


def test_what_ends_a_process_is_not_contained() -> None:
    """SystemExit and its like in a step go through: only an Exception is a failure of the step."""
    world = World()

    def leave() -> None:
        raise SystemExit(1)

    world.runner.during_step = leave
    world.inbox.append(make_submit(1, range(4)))
    with pytest.raises(SystemExit):
        world.core.step()
    assert world.runner.num_resets == 0


@pytest.mark.parametrize("broken", [{"sequences": ()}, {"prompt_token_ids": ()}, {"priority": None}])
def test_a_request_that_raises_on_arrival_fails_alone(broken: dict[str, Any]) -> None:
    """A bug met over one Submit fails that request with an incident id, which one log record tells; others run on."""
    world = World()
    before = make_submit(1, range(4), max_tokens=6)
    world.inbox.append(before)
    world.core.step()
    world.inbox.extend([replace(make_submit(2, [5]), **broken), make_submit(3, [6], max_tokens=1)])
    with capture_logs() as records:
        said = world.run()
    (failure,) = [failure for message in said for failure in message.failures]
    assert (failure.request_id, failure.kind) == (2, FailureKind.INTERNAL)
    (record,) = records
    assert (record["event"], record["log_level"], record["incident_id"]) == (
        "request failed",
        "error",
        failure.incident_id,
    )
    assert record["where"]
    assert len(failure.incident_id) == 16
    assert sum(len(o.new_token_ids) for message in said for o in message.outputs if o.request_id == 1) == 5
    assert world.scheduler.stats().num_used_kv_blocks == 0
    assert not world.core.has_work


def test_a_request_that_is_here_already_fails_and_is_gone() -> None:
    """Two of one number are a bug of ours that no answer can tell apart: both are over."""
    world = World()
    world.inbox.append(make_submit(1, range(4), max_tokens=50))
    world.core.step()
    world.inbox.append(make_submit(1, range(4)))
    with capture_logs():
        message = world.core.step()
    assert message is not None
    assert [failure.kind for failure in message.failures] == [FailureKind.INTERNAL]
    assert world.scheduler.num_output_tokens(1) is None
    assert not world.core.has_work


# ------------------------------------------------------------------------------------------- time-outs of the queue


def test_what_expires_in_the_queue_reaches_no_step() -> None:
    """A request that is still without a step when its time is over fails; one that has had a step does not."""
    world = World()
    blocker = make_submit(1, range(40), max_tokens=20)
    late = replace(make_submit(2, range(40), max_tokens=2), queue_timeout_s=5.0)
    started = replace(make_submit(3, [3], max_tokens=30, priority=1), queue_timeout_s=5.0)
    world.inbox.extend([blocker, late, started])
    for _ in range(3):
        world.core.step()
    world.clock.advance(4.9)
    world.core.step()
    world.clock.advance(0.1)
    said = world.run()
    assert [failure for message in said for failure in message.failures] == [
        RequestFailure(2, FailureKind.QUEUE_TIMEOUT)
    ]
    assert all(2 not in request_ids for request_ids in world.recorder.request_ids)
    assert {o.request_id for m in said for o in m.outputs if o.finish_reason is not None} == {1, 3}


def test_no_time_to_wait_is_no_step() -> None:
    """Where the clock has passed the deadline when the request is looked at first, it is not even put in line."""
    world = World()
    world.inbox.append(replace(make_submit(1, [1]), queue_timeout_s=0.0))
    (message,) = world.run()
    assert message.failures == (RequestFailure(1, FailureKind.QUEUE_TIMEOUT),)
    assert world.runner.num_tokens_computed_total == 0


def test_an_idle_engine_knows_when_to_look_again() -> None:
    """While the only request that has never run is paused, the loop may sleep until its deadline, and no longer."""
    world = World()
    assert world.core.idle_timeout_s() is None
    world.inbox.extend([replace(make_submit(1, [1]), queue_timeout_s=5.0), Pause((1,))])
    world.core.step()
    assert not world.core.has_work
    world.clock.advance(2.0)
    assert world.core.idle_timeout_s() == 3.0
    world.clock.advance(3.5)
    assert world.core.idle_timeout_s() == 0.0
    message = world.core.step()
    assert message is not None
    assert message.failures == (RequestFailure(1, FailureKind.QUEUE_TIMEOUT),)
    assert world.core.idle_timeout_s() is None


# ------------------------------------------------------------------------------------------------------------ pauses


def test_a_paused_request_gets_no_steps_and_is_no_work() -> None:
    """From the step after on: it says nothing, the engine has nothing to do, and Unpause goes on with the very token
    that was next."""
    world = World()
    submit = make_submit(1, range(5), max_tokens=9)
    world.inbox.append(submit)
    said = [world.core.step() for _ in range(3)]
    world.inbox.append(Pause((1, 77)))
    said.append(world.core.step())
    assert not world.core.has_work
    held = world.scheduler.stats().num_used_kv_blocks
    assert held > 0
    assert world.core.step() is None
    world.inbox.append(Unpause((1, 77)))
    said += world.run()
    tokens = tuple(t for message in said if message is not None for o in message.outputs for t in o.new_token_ids)
    assert tokens == reference_output(submit, vocab_size=50, max_model_len=NUM_KV_BLOCKS * BLOCK_SIZE)[0]
    assert world.runner.num_tokens_computed_total == 5 + 8, "nothing was computed twice"


def test_a_pause_during_a_step_loses_nothing_of_it() -> None:
    """The token of the step in flight is told, and what comes after it follows after Unpause."""
    world = World()
    submit = make_submit(1, range(5), max_tokens=4)
    world.inbox.append(submit)
    world.runner.during_step = lambda: world.inbox.append(Pause((1,)))
    first = world.core.step()
    assert first is not None
    assert len(first.outputs) == 1
    world.runner.during_step = lambda: None
    world.core.step()
    assert not world.core.has_work
    world.inbox.append(Unpause((1,)))
    tokens = [t for message in [first, *world.run()] for o in message.outputs for t in o.new_token_ids]
    assert tuple(tokens) == reference_output(submit, vocab_size=50, max_model_len=NUM_KV_BLOCKS * BLOCK_SIZE)[0]


def test_a_step_tells_its_time_and_its_size() -> None:
    """By the clock that is handed in, from the plan to the update; a message without a step tells nothing."""
    world = World()
    world.inbox.extend([make_submit(1, range(5), max_tokens=9), make_submit(2, [1], max_tokens=9)])
    world.runner.during_step = lambda: world.clock.advance(0.25)
    message = world.core.step()
    assert message is not None
    assert (message.step_s, message.num_seqs, message.num_batched_tokens) == (0.25, 2, 6)
    world.inbox.append(Abort((1, 2)))
    message = world.core.step()
    assert message is not None
    assert (message.step_s, message.num_seqs, message.num_batched_tokens) == (0.0, 0, 0)


def test_shutdown_is_noticed_with_the_step_it_arrives_in() -> None:
    """After the step that drains a Shutdown the loop is told to end."""
    world = World()
    world.inbox.append(Shutdown())
    world.core.step()
    assert world.core.is_shutting_down


def test_a_message_for_the_other_side_is_a_bug() -> None:
    """An engine that is told what only engines say fails loudly."""
    world = World()
    world.inbox.append(LoadProgress("weights", 0.0))
    with pytest.raises(TypeError, match="LoadProgress"):
        world.core.step()
