"""Drives a scheduler over a `FakeRunner`, and holds it to its invariants after every call."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler.core.config import SchedulerConfig
from scheduler.core.output import StepPlan
from scheduler.core.request import Sequence, SequenceStatus
from scheduler.core.scheduler import Scheduler
from scheduler.messages import FailureKind, FinishReason, RequestFailure, SequenceOutput, Submit
from tests.core.failing_runner import FailingRunner, StepFailedError
from tests.fakes import reference_output

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
class SequenceAnswer:
    """What came back for one sequence."""

    num_resumed_tokens: int
    token_ids: list[int] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    end: FinishReason | None = None
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.end is not None


@dataclass
class Answer:
    """What came back for one request."""

    submit: Submit
    failure: FailureKind | None = None
    is_aborted: bool = False
    sequences: dict[int, SequenceAnswer] = field(init=False)

    def __post_init__(self) -> None:
        starts = self.submit.sequences
        self.sequences = {start.index: SequenceAnswer(len(start.resume_token_ids)) for start in starts}

    @property
    def is_over(self) -> bool:
        is_finished = all(sequence.is_over for sequence in self.sequences.values())
        return self.is_aborted or self.failure is not None or is_finished

    @property
    def only(self) -> SequenceAnswer:
        """Of a request of one sequence."""
        (sequence,) = self.sequences.values()
        return sequence

    @property
    def token_ids(self) -> list[int]:
        return self.only.token_ids

    @property
    def outputs(self) -> list[SequenceOutput]:
        return self.only.outputs

    @property
    def end(self) -> FinishReason | FailureKind | None:
        return self.failure or self.only.end

    @property
    def num_output_tokens(self) -> dict[int, int]:
        """Unfinished sequence → its output tokens, resumed ones included."""
        return {
            index: sequence.num_resumed_tokens + len(sequence.token_ids)
            for index, sequence in self.sequences.items()
            if not sequence.is_over
        }


class Driver:
    """The engine's loop body without an engine."""

    def __init__(
        self, config: SchedulerConfig, *, vocab_size: int = VOCAB_SIZE, poison_token_id: int | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.runner = FailingRunner(
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            vocab_size=vocab_size,
            poison_token_id=poison_token_id,
        )
        self.max_model_len = min(config.max_model_len, config.num_kv_blocks * config.block_size)
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []
        self.confined_to: frozenset[int] | None = None
        self.paused: set[int] = set()
        self.may_overtake = False
        """Whether something happened that may let a later request of a priority run while an earlier one waits."""

    def submit(self, submit: Submit) -> Answer:
        """Errors of `add_request` pass through; the request is then unknown here too."""
        outputs = self.scheduler.add_request(submit)
        answer = self.answers[submit.request_id] = Answer(submit)
        self.may_overtake |= submit.alone_until > 0
        for output in outputs:
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

    def end_sequences(self, *sequences: tuple[int, int]) -> None:
        """Abort single sequences, by request and index."""
        self.scheduler.abort_sequences(sequences)
        for request_id, index in sequences:
            answer = self.answers.get(request_id)
            if answer is not None and not answer.is_over and index in answer.sequences:
                sequence = answer.sequences[index]
                sequence.is_aborted = sequence.end is None
        self.check_invariants()

    def expire(self, *request_ids: int) -> None:
        """Fail requests that have waited too long; none of them may have been in a step."""
        for request_id in request_ids:
            assert not self.answers[request_id].is_over
            assert not self.scheduler.has_run(request_id)
            self.answers[request_id].failure = FailureKind.QUEUE_TIMEOUT
        self.scheduler.abort(request_ids)
        self.check_invariants()

    def pause(self, *request_ids: int) -> None:
        self.scheduler.pause(request_ids)
        self.paused |= {request_id for request_id in request_ids if request_id in self.answers}
        self.may_overtake = True
        self.check_invariants()

    def unpause(self, *request_ids: int) -> None:
        self.scheduler.unpause(request_ids)
        self.paused -= set(request_ids)
        self.check_invariants()

    def step(self, while_in_flight: Callable[[], None] | None = None) -> StepPlan | None:
        """schedule, execute, `while_in_flight`, update."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._check_plan(plan)
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

    def fail_step(self, while_in_flight: Callable[[], None] | None = None) -> tuple[int, ...]:
        """schedule, a step that fails after it has spoilt all that it could, `while_in_flight`, drop. Whose it was."""
        plan = self.scheduler.schedule()
        if plan is None:
            return ()
        self._check_plan(plan)
        with contextlib.suppress(StepFailedError):
            self.runner.fail(plan)
        if while_in_flight is not None:
            while_in_flight()
        in_step = self.scheduler.drop_step()
        self.runner.reset()
        assert in_step == self.scheduler.step_request_ids
        self._check_vacant()
        return in_step

    def vacate(self) -> None:
        self.scheduler.vacate()
        self.runner.reset()
        self._check_vacant()

    def confine(self, request_ids: Iterable[int]) -> None:
        self.confined_to = frozenset(request_ids)
        self.may_overtake = True
        self.scheduler.confine(self.confined_to)
        self.check_invariants()

    def unconfine(self) -> None:
        self.confined_to = None
        self.scheduler.unconfine()
        self.check_invariants()

    def run(self, num_steps_max: int = 1000) -> int:
        """Step until nothing is left to do. Returns the number of steps."""
        for num_steps in range(num_steps_max):
            if self.step() is None:
                return num_steps
        raise AssertionError(f"still at work after {num_steps_max} steps")

    def expected(self, request_id: int, index: int = 0) -> tuple[tuple[int, ...], FinishReason | FailureKind]:
        """What the sequence would get alone."""
        return reference_output(
            self.answers[request_id].submit,
            index,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            poison_token_id=self.runner.poison_token_id,
        )

    def check_answers(self) -> None:
        """Every sequence ended, and as it would have alone; of an aborted or failed request it had a beginning of that,
        and the request failed because one of them would have.
        """
        for request_id, answer in self.answers.items():
            assert answer.is_over, f"request {request_id} never ended"
            ends = set()
            for index, sequence in answer.sequences.items():
                token_ids, end = self.expected(request_id, index)
                assert tuple(sequence.token_ids) == token_ids[: len(sequence.token_ids)]
                is_cut = answer.is_aborted or sequence.is_aborted or answer.failure is FailureKind.QUEUE_TIMEOUT
                if sequence.end is not None or (len(answer.sequences) == 1 and not is_cut):
                    assert (tuple(sequence.token_ids), sequence.end or answer.failure) == (token_ids, end)
                ends.add(end)
            if answer.failure is FailureKind.QUEUE_TIMEOUT:
                assert not any(sequence.outputs for sequence in answer.sequences.values())
            else:
                assert answer.failure is None or answer.failure in ends

    def _take(self, output: SequenceOutput) -> None:
        answer = self.answers[output.request_id]
        sequence = answer.sequences[output.index]
        assert not answer.is_over, f"an output for request {output.request_id} after its end"
        assert not sequence.is_over, f"an output for sequence {output.index} after its end"
        assert (output.num_cached_tokens is None) == bool(sequence.outputs), "the first output, and no other, tells it"
        assert output.num_cached_tokens is None or output.num_cached_tokens <= len(answer.submit.prompt_token_ids)
        wants_logprobs = answer.submit.sampling.num_logprobs is not None
        assert (output.logprobs is not None) == (wants_logprobs and bool(output.new_token_ids))
        self._check_prompt_logprobs(output)
        sequence.outputs.append(output)
        sequence.token_ids += output.new_token_ids
        sequence.end = output.finish_reason

    def _check_prompt_logprobs(self, output: SequenceOutput) -> None:
        """Told with the first output of sequence 0, each token but the first once, in order."""
        answer = self.answers[output.request_id]
        asks = answer.submit.sampling.num_prompt_logprobs is not None and 0 in answer.sequences
        is_first = output.index == 0 and not answer.sequences[0].outputs
        told = output.prompt_logprobs
        assert (told is not None) == (asks and is_first)
        if told is not None:
            assert output.index == 0
            prompt = answer.submit.prompt_token_ids
            assert memoryview(told.ranks).cast("i").tolist() == list(range(1, len(prompt)))
            assert memoryview(told.logprobs).cast("f").tolist() == [-float(token_id) for token_id in prompt[1:]]

    def _fail(self, failure: RequestFailure) -> None:
        answer = self.answers[failure.request_id]
        assert not answer.is_over, f"request {failure.request_id} failed after its end"
        answer.failure = failure.kind

    def _check_plan(self, plan: StepPlan) -> None:
        """Within its bounds, of those who may run, and nobody beside one that must be alone."""
        self.plans.append(plan)
        scheduler = self.scheduler
        assert plan.num_batched_tokens <= scheduler.max_num_batched_tokens <= self.config.max_num_batched_tokens
        assert len(plan.seq_ids) <= scheduler.max_num_seqs <= self.config.max_num_seqs
        sequences = {s.seq_id: s for r in scheduler._roster.requests.values() for s in r.sequences}
        in_step = [sequences[seq_id] for seq_id in plan.seq_ids]
        request_ids = tuple(sequence.request_id for sequence in in_step)
        assert scheduler.step_request_ids == request_ids
        assert self.confined_to is None or self.confined_to.issuperset(request_ids)
        assert self.paused.isdisjoint(request_ids)
        for sequence in in_step:
            answer = self.answers[sequence.request_id]
            assert scheduler.num_output_tokens(sequence.request_id) == answer.num_output_tokens
            num_output_tokens = answer.num_output_tokens[sequence.index]
            assert num_output_tokens >= answer.submit.alone_until or len(in_step) == 1

    def _check_vacant(self) -> None:
        """Nobody runs, nothing is held, all who live wait as if they had never run."""
        assert not self.scheduler._seats.sequences
        assert self.scheduler.stats().num_used_kv_blocks == 0
        for request in self.scheduler._roster.requests.values():
            statuses = {sequence.status for sequence in request.sequences}
            assert statuses <= {SequenceStatus.WAITING, SequenceStatus.FINISHED}
        self.check_invariants()

    def _may_run(self, sequence: Sequence) -> bool:
        is_held = self.confined_to is not None and sequence.request_id not in self.confined_to
        return not sequence.request.is_paused and (not is_held or sequence.status is SequenceStatus.RUNNING)

    def check_invariants(self) -> None:
        self._check_pool()
        self._check_lists()

    def _check_pool(self) -> None:
        pool = self.scheduler._kv.pool
        known = [sequence for request in self.scheduler._roster.requests.values() for sequence in request.sequences]
        holders = Counter(block_id for sequence in known for block_id in sequence.block_table)
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
        seats = scheduler._seats
        running = seats.sequences
        known = [sequence for request in scheduler._roster.requests.values() for sequence in request.sequences]
        live = [sequence for sequence in known if sequence.status is not SequenceStatus.FINISHED]
        waiting = [sequence for sequence in live if sequence.status is not SequenceStatus.RUNNING]
        assert len(running) <= self.config.max_num_seqs
        assert running == sorted(running, key=lambda sequence: sequence.order)
        assert set(running) == {sequence for sequence in live if sequence.status is SequenceStatus.RUNNING}
        assert seats.num_behind == sum(not s.is_caught_up and s is not seats.alone for s in running)
        assert [s for s in running if s.is_alone] == ([] if seats.alone is None else [seats.alone])
        for sequence in running:
            assert not sequence.request.is_paused
            provider = sequence.provider
            assert provider is None or (provider in running and provider.provider is None and not sequence.is_placed)
            assert provider is None or provider.block_table[0] == sequence.block_table[0]
            assert (sequence.growth_batch_step > 0) == sequence.is_caught_up
            assert len(sequence.block_table) <= -(-len(sequence.token_ids) // self.config.block_size), "idle blocks"
        parked = [sequence for sequence in waiting if sequence.status is SequenceStatus.PARKED]
        assert set(parked) == set(scheduler._roster.parked)
        assert len(parked) == len(scheduler._roster.parked)
        for sequence in waiting:
            assert sequence.provider is None
            assert sequence.is_placed == (sequence.status is SequenceStatus.PARKED)
            assert sequence.is_known == (sequence.status is not SequenceStatus.WAITING)
            assert bool(sequence.block_table) == (sequence.status is SequenceStatus.PARKED)
            assert not sequence.is_caught_up
        if not self.may_overtake:
            for ahead in running:
                for behind in waiting:
                    is_rival = ahead.request.priority == behind.request.priority
                    assert not is_rival or ahead.order < behind.order, "overtaken within a priority"
        stats = scheduler.stats()
        assert stats.num_running == len(running)
        assert stats.num_waiting == len(waiting)
        assert stats.num_waiting_tokens == sum(sequence.num_uncomputed_tokens for sequence in waiting)
        assert scheduler.has_work == any(self._may_run(sequence) for sequence in live)
        live_answers = {request_id for request_id, answer in self.answers.items() if not answer.is_over}
        assert set(scheduler._roster.requests) == live_answers


def scheduled(driver: Driver) -> dict[int, int]:
    """request_id → tokens in the last plan; the scheduler numbers sequences as the tests number requests."""
    plan = driver.plans[-1]
    return dict(zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True))
