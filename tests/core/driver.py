"""Drives a scheduler over a `FakeRunner`, and holds it to its invariants after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.config import SchedulerConfig
from scheduler.core.output import StepPlan
from scheduler.core.request import SequenceStatus
from scheduler.core.scheduler import Scheduler
from scheduler.messages import FailureKind, FinishReason, RequestFailure, SequenceOutput, Submit
from tests.fakes import FakeRunner, reference_output

VOCAB_SIZE = 50


def make_config(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    block_size: int = 4,
    num_kv_blocks: int = 64,
    enable_prefix_caching: bool = True,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_kv_blocks, enable_prefix_caching
    )


@dataclass
class Answer:
    """What came back for one request."""

    submit: Submit
    token_ids: list[int] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    end: FinishReason | FailureKind | None = None
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.end is not None


class Driver:
    """The engine's loop body without an engine."""

    def __init__(
        self, config: SchedulerConfig, *, vocab_size: int = VOCAB_SIZE, poison_token_id: int | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            vocab_size=vocab_size,
            poison_token_id=poison_token_id,
        )
        self.max_model_len = min(config.max_model_len, config.num_kv_blocks * config.block_size)
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []

    def submit(self, submit: Submit) -> Answer:
        """Errors of `add_request` pass through; the request is then unknown here too."""
        output = self.scheduler.add_request(submit)
        answer = self.answers[submit.request_id] = Answer(submit)
        if output is not None:
            self._take(output)
        self.check_invariants()
        return answer

    def abort(self, *request_ids: int) -> None:
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            answer = self.answers.get(request_id)
            if answer is not None and not answer.is_over:
                answer.is_aborted = True
        self.check_invariants()

    def step(self, while_in_flight: Callable[[], None] | None = None) -> StepPlan | None:
        """schedule, execute, `while_in_flight`, update."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        assert plan.num_batched_tokens <= self.config.max_num_batched_tokens
        assert len(plan.seq_ids) <= self.config.max_num_seqs
        result = self.runner.execute(plan)
        if while_in_flight is not None:
            while_in_flight()
        outputs, failures = self.scheduler.update_from_output(plan, result)
        for output in outputs:
            self._take(output)
        for failure in failures:
            self._fail(failure)
        self.check_invariants()
        return plan

    def run(self, num_steps_max: int = 1000) -> int:
        """Step until nothing is left to do. Returns the number of steps."""
        for num_steps in range(num_steps_max):
            if self.step() is None:
                return num_steps
        raise AssertionError(f"still at work after {num_steps_max} steps")

    def expected(self, request_id: int) -> tuple[tuple[int, ...], FinishReason | FailureKind]:
        """What the request would get alone."""
        return reference_output(
            self.answers[request_id].submit,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            poison_token_id=self.runner.poison_token_id,
        )

    def check_answers(self) -> None:
        """Every request ended, and as it would have alone; an aborted one had a beginning of that."""
        for request_id, answer in self.answers.items():
            token_ids, end = self.expected(request_id)
            assert answer.is_over, f"request {request_id} never ended"
            assert tuple(answer.token_ids) == token_ids[: len(answer.token_ids)]
            if not answer.is_aborted:
                assert (tuple(answer.token_ids), answer.end) == (token_ids, end)

    def _take(self, output: SequenceOutput) -> None:
        answer = self.answers[output.request_id]
        assert not answer.is_over, f"an output for request {output.request_id} after its end"
        assert (output.num_cached_tokens is None) == bool(answer.outputs), "the first output, and no other, tells it"
        assert output.num_cached_tokens is None or output.num_cached_tokens <= len(answer.submit.prompt_token_ids)
        wants_logprobs = answer.submit.sampling.num_logprobs is not None
        assert (output.logprobs is not None) == (wants_logprobs and bool(output.new_token_ids))
        answer.outputs.append(output)
        answer.token_ids += output.new_token_ids
        answer.end = output.finish_reason

    def _fail(self, failure: RequestFailure) -> None:
        answer = self.answers[failure.request_id]
        assert not answer.is_over, f"request {failure.request_id} failed after its end"
        answer.end = failure.kind

    def check_invariants(self) -> None:
        self._check_pool()
        self._check_lists()

    def _check_pool(self) -> None:
        pool = self.scheduler._kv.pool
        holders = Counter(block_id for sequence in self.scheduler._running for block_id in sequence.block_table)
        assert pool._ref_counts == [holders[block_id] for block_id in range(pool.num_blocks)]
        blank, evictable = set(pool._blank), set(pool._evictable)
        assert len(blank) == len(pool._blank)
        assert not blank & evictable
        assert blank | evictable == set(range(pool.num_blocks)) - set(holders)
        assert pool.num_used == len(holders)
        assert pool.num_used + pool.num_free == pool.num_blocks
        assert all(pool._keys[block_id] is None for block_id in blank)
        assert all(pool._keys[block_id] is not None for block_id in evictable)
        assert {key: block_id for block_id, key in enumerate(pool._keys) if key is not None} == pool._cached

    def _check_lists(self) -> None:
        scheduler = self.scheduler
        running = scheduler._running
        live = [sequence for request in scheduler._requests.values() for sequence in request.sequences]
        waiting = [sequence for sequence in live if sequence.status is not SequenceStatus.RUNNING]
        assert len(running) <= self.config.max_num_seqs
        assert running == sorted(running, key=lambda sequence: sequence.order)
        assert set(running) == {sequence for sequence in live if sequence.status is SequenceStatus.RUNNING}
        assert scheduler._num_behind == sum(not sequence.is_caught_up for sequence in running)
        for sequence in running:
            assert (sequence.growth_step_id > 0) == sequence.is_caught_up
            assert len(sequence.block_table) <= -(-len(sequence.token_ids) // self.config.block_size), "idle blocks"
        for sequence in waiting:
            assert sequence.status in {SequenceStatus.WAITING, SequenceStatus.PREEMPTED}
            assert not sequence.block_table
            assert not sequence.is_caught_up
        for ahead in running:
            for behind in waiting:
                assert ahead.order[0] != behind.order[0] or ahead.order < behind.order, "overtaken within a priority"
        stats = scheduler.stats()
        assert stats.num_running == len(running)
        assert stats.num_waiting == len(waiting)
        assert stats.num_waiting_tokens == sum(len(sequence.token_ids) for sequence in waiting)
        assert scheduler.has_work == bool(live)
        live_answers = {request_id for request_id, answer in self.answers.items() if not answer.is_over}
        assert set(scheduler._requests) == live_answers


def scheduled(driver: Driver) -> dict[int, int]:
    """request_id → tokens in the last plan; the scheduler numbers sequences as the tests number requests."""
    plan = driver.plans[-1]
    return dict(zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True))
