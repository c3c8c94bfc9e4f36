"""Who computes what in the next step, and what came of the last one.

What lives here: the decisions. What must not: a clock, I/O, threads, randomness, logging, tensors; the same calls in
the same order give the same plans.

**One step is one forward pass.** There is no prefill phase and no decode phase: each running sequence's
`num_computed_tokens` catches up with its tokens under the budget `max_num_batched_tokens`. A sequence that has caught
up takes one token of every step, so a long prompt is chunked around the decodes, never ahead of them. What is left
goes out in order of precedence.

**Order of precedence**: higher priority, then earlier arrival; fixed for life. Admissions come from the front of the
line and skip nobody; victims come off the end of the running list. So those who run come before all of their own
priority who wait, and a waiting sequence of higher priority than the last running one takes its place as soon as it
needs its seat or blocks.

**Why everything ends.** A sequence is let in with the blocks of all its known tokens and asks for more only as its
output grows. If there are none, the last running sequence is preempted: it loses its blocks, keeps its tokens and
recomputes later. The first in precedence is thus never a victim while anyone else runs; alone it fits, or it would
have been refused (`RequestNeverFitsError`, or CONTEXT_LIMIT at the pool's size). It gets a token in every step: the
budget is at least the number of seats and it sits on one. When it ends, the next is first.

**Why there is little thrash.** Nobody is let in beside others unless the pool could then feed the growth of all for
`_HEADROOM_STEPS` more steps (at most an eighth of the pool is kept for that). A victim needs again all that it gave up,
part of which went to another, so it cannot come back before somebody ends; until then the line is not even looked at.

**Between schedule() and update_from_output()** requests may be added and aborted. An abort frees blocks at once though
the step in flight may still write to them. That is safe because (1) they can be handed out by the next plan at the
earliest, and steps run in the order of their plans, so the late write lands before the new holder's; (2) a block
becomes findable only when all its tokens' steps were updated, and nobody writes to it afterwards; (3) the update
ignores the sequence. None of these needs the step to be over when the next one is planned. What does need it is that
the tokens to compute are known: so schedule() and update_from_output() alternate, which is asserted.

**Steps alone.** A sequence that must share no step yet (`Submit.alone_until`) runs like any other, with a seat and
blocks, but outside the batch: a step holds either it or the batch, by turns when there are both. One such sequence runs
at a time; the others of its kind wait in a line of their own, and whoever is first in precedence of those who may be
let in is still let in first. Once it has its tokens it joins the batch. All of the argument above holds, with "in every
step" become "in every other step".

**When a step fails** it is dropped (`drop_step`): nothing of it counts, what its sequences had computed is found by
nobody, and since the runner is reset, everyone who had run starts anew from its known tokens. `confine` then lets only
some requests run, `limit` makes steps smaller. Both may leave later arrivals running while earlier ones wait. The
first in precedence of those who run is safe all the same, so it ends, and the first in line is next.

**Why a steady step is cheap.** While the same sequences decode, the plan's lists are those of the last plan, and the
sequences that need a block in this step are found in `_growth`, by the number of the batch step, without looking at the
others. Batch steps have numbers of their own because a sequence that sits a step out does not grow in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from scheduler.core.config import SchedulerConfig
from scheduler.core.kv_cache_manager import KVCacheManager
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.plan_draft import Chunk, PlanDraft
from scheduler.core.request import Request, Sequence, SequenceStatus, make_request
from scheduler.core.stopping import finish_reason_after
from scheduler.core.waiting_lines import WaitingLines
from scheduler.messages import (
    EngineStats,
    FailureKind,
    FinishReason,
    RequestFailure,
    SequenceOutput,
    SequenceStart,
    Submit,
    TokenLogprobs,
)

_HEADROOM_STEPS = 32
"""Steps of everyone's growth that must be free when one more sequence is let in."""
_HEADROOM_POOL_SHARE = 8
"""The headroom is at most the pool divided by this."""

_NOBODY: tuple[int, ...] = ()
_RUNNING = SequenceStatus.RUNNING
_order_of = attrgetter("order")


class RequestNeverFitsError(Exception):
    """A request needs more than the whole KV pool, or than the longest context."""


class Scheduler:
    """See the module's docstring for the policy. Not thread-safe; nothing blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises `ValueError` for bounds no step can respect."""
        if min(config.max_num_seqs, config.max_model_len, config.block_size, config.num_kv_blocks) < 1:
            raise ValueError("max_num_seqs, max_model_len, block_size and num_kv_blocks must be at least 1")
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({config.max_num_seqs}): every running sequence takes a token of each step"
            )
        self._config = config
        self.max_num_seqs = config.max_num_seqs
        """At present; see `limit`."""
        self.max_num_batched_tokens = config.max_num_batched_tokens
        """At present; see `limit`."""
        self._max_model_len = min(config.max_model_len, config.num_kv_blocks * config.block_size)
        self._kv = KVCacheManager(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingLines()
        self._running: list[Sequence] = []
        """In order of precedence."""
        self._alone: Sequence | None = None
        """The one of them that is outside the batch, if any."""
        self._num_behind = 0
        """Running sequences of the batch that have not caught up."""
        self._growth: dict[int, list[Sequence]] = {}
        """Number of a batch step → sequences that need a block then. Entries of those that left are void."""
        self._admission_open = True
        """False once the first in line found no room; true again when somebody ends or arrives, or the rules change."""
        self._finished_seq_ids: list[int] = []
        """Sequences the runner knows and has not been told to forget."""

        self._step_id = 0
        self._is_in_flight = False
        self._was_alone = False
        """Whether the last plan held a sequence outside the batch; the next one is the batch's then."""
        self._num_batch_steps = 0
        self._decodes: list[Sequence] = []
        """Of the last batch step: the running sequences that had caught up. Replaced, never changed."""
        self._decode_ids: tuple[int, ...] = ()
        self._decode_request_ids: tuple[int, ...] = ()
        self._ones: tuple[int, ...] = ()
        self._decodes_changed = False
        self._step_decodes: list[Sequence] = []
        """Of the last plan: those that decoded in it."""
        self._chunks: list[Chunk] = []
        """Of the last plan."""
        self._step_request_ids: tuple[int, ...] = ()

        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_preemptions_total = 0
        self._num_prompt_tokens_total = 0
        self._num_cached_tokens_total = 0

    # ------------------------------------------------------------------------------------------ requests in and out

    @property
    def has_work(self) -> bool:
        """Whether schedule() would return a plan."""
        return bool(self._running) or self._waiting.has_candidates

    @property
    def step_request_ids(self) -> tuple[int, ...]:
        """The requests of the last plan, in its order. The very same object while the same sequences decode."""
        return self._step_request_ids

    @property
    def is_limited(self) -> bool:
        """Whether `limit` holds steps below the configured bounds."""
        return (
            self.max_num_seqs < self._config.max_num_seqs
            or self.max_num_batched_tokens < self._config.max_num_batched_tokens
        )

    def num_output_tokens(self, request_id: int) -> dict[int, int] | None:
        """Index of each unfinished sequence of this request → output tokens it has so far, resumed ones included; None
        if the request is not (or no longer) here.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        return {
            sequence.index: len(sequence.token_ids) - sequence.num_prompt_tokens
            for sequence in request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        }

    def add_request(self, submit: Submit) -> tuple[SequenceOutput, ...]:
        """Put a request in line.

        Returns the only outputs of those of its sequences that their resumed tokens have already brought to their end:
        they are over without tokens and without a step. Where logprobs of the prompt are asked for, such sequences run,
        too, but no further than through their known tokens: so nothing is told before the prompt is.

        Raises `RequestNeverFitsError` if one of the others could not get a single token even alone, `ValueError` for an
        empty prompt or no sequences. After any error the request is unknown, and all else as it was: whatever can raise
        comes before the first change.
        """
        assert submit.request_id not in self._requests, f"request {submit.request_id} is already here"
        if not submit.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty; there is nothing to compute logits from")
        indexes = [start.index for start in submit.sequences]
        if not indexes or indexes != sorted(set(indexes)):
            raise ValueError(f"the indexes of the sequences are {indexes}; they must be ascending, and at least one")
        outputs, unfinished = [], []
        for start in submit.sequences:
            reason = self._finish_reason_at(submit, start)
            if reason is None or submit.sampling.num_prompt_logprobs is not None:
                unfinished.append(start)
            else:
                output = SequenceOutput(submit.request_id, start.index, (), finish_reason=reason, num_cached_tokens=0)
                outputs.append(output)
        if unfinished:
            self._add_unfinished(replace(submit, sequences=tuple(unfinished)))
        return tuple(outputs)

    def _finish_reason_at(self, submit: Submit, start: SequenceStart) -> FinishReason | None:
        """Why a sequence that begins there is over already, or None. Raises `RequestNeverFitsError`."""
        num_tokens = len(submit.prompt_token_ids) + len(start.resume_token_ids)
        if start.resume_token_ids and num_tokens <= self._max_model_len:
            reason = finish_reason_after(
                start.resume_token_ids[-1],
                num_prompt_tokens=len(submit.prompt_token_ids),
                num_tokens=num_tokens,
                stopping=submit.stopping,
                max_model_len=self._max_model_len,
            )
            if reason is not None:
                return reason
        if num_tokens + 1 > self._max_model_len:
            raise RequestNeverFitsError(
                f"{num_tokens} tokens and one to come exceed the limit of {self._max_model_len} tokens "
                f"(max_model_len {self._config.max_model_len}, KV pool "
                f"{self._config.num_kv_blocks * self._config.block_size} tokens)"
            )
        return FinishReason.MAX_TOKENS if submit.stopping.max_tokens == 0 else None

    def _add_unfinished(self, submit: Submit) -> None:
        arrival, first_seq_id = self._num_arrivals + 1, self._num_sequences + 1
        request = make_request(submit, arrival=arrival, first_seq_id=first_seq_id, max_model_len=self._max_model_len)
        self._num_arrivals = arrival
        self._num_sequences += len(request.sequences)
        self._requests[request.request_id] = request
        for sequence, start in zip(request.sequences, submit.sequences, strict=True):
            sequence.start_reason = self._finish_reason_at(submit, start)
            self._waiting.push(sequence)
        self._admission_open = True

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget these requests and free their blocks, now. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                for sequence in request.sequences:
                    self._end(sequence)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_used_kv_blocks=self._kv.pool.num_used,
            num_kv_blocks=self._config.num_kv_blocks,
            num_preemptions_total=self._num_preemptions_total,
            num_prompt_tokens_total=self._num_prompt_tokens_total,
            num_cached_tokens_total=self._num_cached_tokens_total,
        )

    # ------------------------------------------------------------------------------------------- after a failed step

    def drop_step(self) -> tuple[int, ...]:
        """The plan in flight failed: nothing of it counts. Returns `step_request_ids`; schedule() may be called next.

        What its sequences had computed, in this step or before, is taken out of the prefix cache; that of one aborted
        since then stays, which is only as good as the runner's word that a step writes to no full block. The runner
        must be reset: see `vacate`.
        """
        assert self._is_in_flight, "there is no plan in flight"
        self._is_in_flight = False
        for sequence in self._in_step():
            if sequence.status is _RUNNING:
                self._kv.free_and_forget(sequence)
        self.vacate()
        return self._step_request_ids

    def vacate(self) -> None:
        """Nobody runs any more, and the runner, which must be reset, knows nobody. All keep tokens and precedence."""
        assert not self._is_in_flight, "update_from_output() or drop_step() comes first"
        for request in self._requests.values():
            for sequence in request.sequences:
                if sequence.status is _RUNNING:
                    self._kv.free(sequence)  # nothing to do for one that has just lost its blocks
                    sequence.is_caught_up = False
                    sequence.growth_batch_step = 0
                    sequence.move_to(SequenceStatus.WAITING)
                    self._waiting.push(sequence)
                elif sequence.status is SequenceStatus.PREEMPTED:
                    sequence.move_to(SequenceStatus.WAITING)
        self._running.clear()
        self._alone = None
        self._num_behind = 0
        self._growth.clear()
        self._finished_seq_ids.clear()
        self._decodes_changed = True
        self._admission_open = True

    def confine(self, request_ids: Iterable[int]) -> None:
        """Until `unconfine`, schedule none but these requests; the others, also those to come, wait in their order.

        Takes the place of a confinement before it. Nothing may be running.
        """
        assert not self._running, "vacate() comes first"
        self._waiting.confine(request_ids)

    def unconfine(self) -> None:
        """Schedule everybody again. Who runs goes on."""
        self._waiting.unconfine()
        self._admission_open = True

    def limit(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Hold steps to these bounds from now on, or to the configured ones where those are lower.

        Bounds may be raised at any time, and lowered while nothing runs.
        """
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        max_num_seqs = min(max_num_seqs, self._config.max_num_seqs)
        max_num_batched_tokens = min(max_num_batched_tokens, self._config.max_num_batched_tokens)
        is_lower = max_num_seqs < self.max_num_seqs or max_num_batched_tokens < self.max_num_batched_tokens
        assert not (is_lower and self._running), "vacate() comes first"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._admission_open = True

    # ----------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute.

        Sequences that ended are named in the next plan there is: a runner may hold their state while nothing runs.
        """
        assert not self._is_in_flight, "update_from_output() of the last plan comes first"
        if not self.has_work:
            return None
        self._step_id += 1
        self._is_in_flight = True
        draft = PlanDraft()
        is_alone = not self._was_alone and self._schedule_alone(draft)
        if not is_alone and not self._schedule_batch(draft):
            is_alone = self._schedule_alone(draft)
        self._was_alone = is_alone
        finished_seq_ids = tuple(self._finished_seq_ids)
        self._finished_seq_ids.clear()
        self._chunks = draft.chunks
        if is_alone:
            self._step_decodes = []
            decode_ids = request_ids = ones = _NOBODY
        else:
            self._step_decodes = self._decodes
            decode_ids, request_ids, ones = self._decode_ids, self._decode_request_ids, self._ones
        if draft.chunks:
            request_ids += tuple([chunk.sequence.request_id for chunk in draft.chunks])
        self._step_request_ids = request_ids
        return draft.plan(self._step_id, decode_ids=decode_ids, ones=ones, finished_seq_ids=finished_seq_ids)

    def _schedule_batch(self, draft: PlanDraft) -> bool:
        """Give this step to the batch. False if there is none: nobody in it runs, and nobody could be let in."""
        self._num_batch_steps += 1
        due = self._growth.pop(self._num_batch_steps, None)
        if due is not None:
            self._grow(due, draft)
        if self._num_behind or (self._admission_open and self._waiting.batch):
            self._spend_budget(draft)
        if self._decodes_changed:
            self._decodes = [sequence for sequence in self._running if sequence.is_caught_up]
            self._decode_ids = tuple([sequence.seq_id for sequence in self._decodes])
            self._decode_request_ids = tuple([sequence.request_id for sequence in self._decodes])
            self._ones = (1,) * len(self._decodes)
            self._decodes_changed = False
        return bool(self._decodes or draft.chunks)

    def _schedule_alone(self, draft: PlanDraft) -> bool:
        """Give this step to the sequence outside the batch. False if there is none, and none could be let in."""
        if self._alone is None:
            front = self._front()
            if front is None or not front.is_alone:
                return False
            prefix = self._make_room(front, draft)
            if prefix is None:
                self._admission_open = False
                return False
            self._admit(front, prefix, draft)
        sequence = self._alone
        assert sequence is not None
        if self._kv.num_slots_left(sequence) == 0:
            self._append_block(sequence, draft)
        if sequence.status is not _RUNNING:
            return False
        draft.add_chunk(sequence, self.max_num_batched_tokens)
        return True

    def _front(self) -> Sequence | None:
        """Who is to be let in next, if anybody is."""
        return self._waiting.front(is_alone_taken=self._alone is not None) if self._admission_open else None

    def _grow(self, due: list[Sequence], draft: PlanDraft) -> None:
        """Give a block to each decoding sequence whose table is full."""
        due.sort(key=_order_of)
        for sequence in due:
            if sequence.growth_batch_step != self._num_batch_steps:
                continue  # it has left since
            self._append_block(sequence, draft)
            if sequence.status is _RUNNING:
                self._foresee_growth(sequence, self._num_batch_steps)

    def _append_block(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Give a running sequence one more block, if need be at the cost of the last ones, of which it may be one."""
        self._kv.register(sequence)
        while not self._kv.can_append() and sequence.status is _RUNNING:
            self._preempt(self._running[-1], draft)
        if sequence.status is _RUNNING:
            draft.new_block_ids[sequence.seq_id] = (self._kv.append(sequence),)

    def _spend_budget(self, draft: PlanDraft) -> None:
        """Give the tokens that the decodes leave to the other sequences, running or waiting, in order of precedence."""
        behind = deque(s for s in self._running if not s.is_caught_up and s is not self._alone)
        while True:
            front = self._front()
            if front is not None and front.is_alone:
                front = None  # it gets the next step, and nobody behind it is let in before
            num_decodes = len(self._running) - self._num_behind - (self._alone is not None)
            num_tokens_left = self.max_num_batched_tokens - num_decodes - draft.num_chunk_tokens
            if num_tokens_left == 0 and draft.chunks:
                return
            if behind and (front is None or behind[0].order < front.order):
                sequence = behind.popleft()
                if sequence.status is _RUNNING:
                    draft.add_chunk(sequence, num_tokens_left)
            elif front is None:
                return
            elif (prefix := self._make_room(front, draft)) is None:
                self._admission_open = False
            elif num_tokens_left > 0:
                self._admit(front, prefix, draft)
                draft.add_chunk(front, num_tokens_left)
            # Otherwise the decodes had taken the whole budget, one of them has just been preempted, and the next
            # round finds its token.

    def _make_room(self, sequence: Sequence, draft: PlanDraft) -> list[int] | None:
        """See to a seat and blocks for a waiting sequence, if need be by preempting those of lower priority.

        Returns its cached prefix, or None if there is no room; nobody is preempted in vain for want of blocks.
        """
        prefix = self._kv.find_prefix(sequence)
        if self._has_room(sequence, prefix):
            return prefix
        num_outranked = 0
        num_reclaimable_blocks = self._kv.num_free_blocks
        for running in reversed(self._running):
            if running.order[0] <= sequence.order[0]:
                break
            num_outranked += 1
            num_reclaimable_blocks += len(running.block_table)
        num_blocks_needed = self._kv.num_free_blocks_needed(sequence, prefix)
        if num_blocks_needed + self._headroom(len(self._running) - num_outranked + 1) > num_reclaimable_blocks:
            return None
        for _ in range(num_outranked):
            self._preempt(self._running[-1], draft)
            if self._has_room(sequence, prefix):
                return prefix
        return None

    def _has_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        num_running = len(self._running) + 1
        return num_running <= self.max_num_seqs and self._kv.can_allocate(sequence, prefix, self._headroom(num_running))

    def _headroom(self, num_running: int) -> int:
        """Blocks to be left free when the number of running sequences rises to `num_running`."""
        if num_running == 1:
            return 0
        num_growth_blocks = -(-num_running * _HEADROOM_STEPS // self._config.block_size)
        return min(num_growth_blocks, self._config.num_kv_blocks // _HEADROOM_POOL_SHARE)

    def _admit(self, sequence: Sequence, prefix: list[int], draft: PlanDraft) -> None:
        self._waiting.pop(sequence)
        self._kv.allocate(sequence, prefix)
        if not sequence.is_prompt_counted:
            sequence.is_prompt_counted = True
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self._num_prompt_tokens_total += sequence.num_prompt_tokens
            self._num_cached_tokens_total += sequence.num_cached_tokens
        if sequence.status is SequenceStatus.WAITING:
            draft.add_new(sequence)
        else:
            draft.add_resumed(sequence)
        sequence.move_to(_RUNNING)
        insort(self._running, sequence, key=_order_of)
        if sequence.is_alone:
            self._alone = sequence
        else:
            self._num_behind += 1

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        self._leave_running(sequence)
        self._kv.free(sequence)
        sequence.move_to(SequenceStatus.PREEMPTED)
        self._waiting.push(sequence)
        self._num_preemptions_total += 1
        draft.add_preempted(sequence)

    # ------------------------------------------------------------------------------------------------------- update

    def update_from_output(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[tuple[SequenceOutput, ...], tuple[RequestFailure, ...]]:
        """Take in what the runner found for the plan in flight. Sequences aborted since then are passed over."""
        assert self._is_in_flight, "there is no plan in flight"
        assert plan.step_id == self._step_id, f"step {plan.step_id} is not the one in flight"
        sampled_token_ids = result.sampled_token_ids
        assert len(sampled_token_ids) == len(plan.sampled_seq_ids), "one token for each sampled sequence"
        self._is_in_flight = False
        failures = self._fail_non_finite(result) + self._fail_others(result)
        outputs: list[SequenceOutput] = []
        logprobs = result.logprobs
        # The one loop that every running sequence costs in every step.
        for sequence, token_id in zip(self._step_decodes, sampled_token_ids, strict=False):
            if sequence.status is not _RUNNING:
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            sequence.num_computed_tokens += 1
            if logprobs or token_id in sequence.stop_ids or len(token_ids) >= sequence.num_tokens_max:
                outputs.append(self._output(sequence, logprobs.get(sequence.seq_id)))
            else:
                outputs.append(SequenceOutput(sequence.request_id, sequence.index, (token_id,)))
        if self._chunks:
            self._update_chunks(sampled_token_ids[len(self._step_decodes) :], result, outputs)
        return tuple(outputs), failures

    def _update_chunks(
        self, sampled_token_ids: Iterable[int], result: StepResult, outputs: list[SequenceOutput]
    ) -> None:
        sampled = iter(sampled_token_ids)
        for sequence, num_tokens, is_sampled in self._chunks:
            token_id = next(sampled) if is_sampled else None
            if sequence.status is not _RUNNING:
                continue
            sequence.num_computed_tokens += num_tokens
            self._kv.register(sequence)
            prompt_logprobs = result.prompt_logprobs.get(sequence.seq_id)
            if prompt_logprobs is not None:
                sequence.add_prompt_logprobs(prompt_logprobs)
            if token_id is not None and sequence.start_reason is not None:
                outputs.append(self._told(sequence, (), None, sequence.start_reason))
            elif token_id is not None:
                sequence.token_ids.append(token_id)
                if not sequence.is_alone:
                    self._catch_up(sequence)
                outputs.append(self._output(sequence, result.logprobs.get(sequence.seq_id)))

    def _catch_up(self, sequence: Sequence) -> None:
        """From the next batch step on, `sequence` computes its newest token in each."""
        if sequence is self._alone:
            self._alone = None
            self._admission_open = True  # the next one of its kind may be let in
        else:
            self._num_behind -= 1
        sequence.is_caught_up = True
        self._decodes_changed = True
        self._foresee_growth(sequence, self._num_batch_steps + 1)

    def _output(self, sequence: Sequence, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """The newest token as an output; ends the sequence if it was its last."""
        reason: FinishReason | None = finish_reason_after(
            sequence.token_ids[-1],
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_tokens=len(sequence.token_ids),
            stopping=sequence.request.stopping,
            max_model_len=self._max_model_len,
        )
        return self._told(sequence, (sequence.token_ids[-1],), None if logprobs is None else (logprobs,), reason)

    def _told(
        self,
        sequence: Sequence,
        new_token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
    ) -> SequenceOutput:
        """An output of this sequence, with what only the first one tells; ends it if there is a reason."""
        output = SequenceOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens if sequence.is_first_output_due else None,
            prompt_logprobs=sequence.take_prompt_logprobs(),
        )
        sequence.is_first_output_due = False
        if reason is not None:
            self._end(sequence)
        return output

    def _fail_non_finite(self, result: StepResult) -> tuple[RequestFailure, ...]:
        """End the requests whose logits were no numbers, and distrust all that they computed."""
        if not result.non_finite_seq_ids:
            return ()
        failures = []
        by_seq_id = {sequence.seq_id: sequence for sequence in self._in_step()}
        for seq_id in result.non_finite_seq_ids:
            request = by_seq_id[seq_id].request
            if not request.is_finished:
                for sequence in request.sequences:
                    self._end(sequence, distrust=True)
                failures.append(RequestFailure(request.request_id, FailureKind.NON_FINITE))
        return tuple(failures)

    def _fail_others(self, result: StepResult) -> tuple[RequestFailure, ...]:
        """End the requests that cannot go on; what they computed is good."""
        if not result.failures:
            return ()
        failures = []
        by_seq_id = {sequence.seq_id: sequence for sequence in self._in_step()}
        for seq_id, failure in result.failures.items():
            request = by_seq_id[seq_id].request
            if not request.is_finished:
                for sequence in request.sequences:
                    self._end(sequence)
                failures.append(RequestFailure(request.request_id, failure.kind, failure.incident_id))
        return tuple(failures)

    def _in_step(self) -> list[Sequence]:
        """The sequences of the last plan, in its order, those included that have ended since."""
        return [*self._step_decodes, *(chunk.sequence for chunk in self._chunks)]

    # ------------------------------------------------------------------------------------------ where sequences end

    def _end(self, sequence: Sequence, *, distrust: bool = False) -> None:
        """Finish a sequence, wherever it is. `distrust` keeps its blocks' contents out of the prefix cache."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is not SequenceStatus.WAITING:
            self._finished_seq_ids.append(sequence.seq_id)
        if sequence.status is not _RUNNING:
            self._waiting.remove(sequence)
        elif distrust:
            self._kv.free_and_forget(sequence)
        else:
            self._kv.free(sequence)
        if sequence.status is _RUNNING:
            self._leave_running(sequence)
        sequence.move_to(SequenceStatus.FINISHED)
        self._admission_open = True
        if sequence.request.is_finished:
            del self._requests[sequence.request_id]

    def _leave_running(self, sequence: Sequence) -> None:
        position = bisect_left(self._running, sequence.order, key=_order_of)
        assert self._running[position] is sequence
        del self._running[position]
        if sequence is self._alone:
            self._alone = None
        elif sequence.is_caught_up:
            self._decodes_changed = True
        else:
            self._num_behind -= 1
        sequence.is_caught_up = False
        sequence.growth_batch_step = 0

    def _foresee_growth(self, sequence: Sequence, batch_step: int) -> None:
        """Note when `sequence`, which from this batch step on computes one token in each, needs its next block."""
        sequence.growth_batch_step = batch_step + self._kv.num_slots_left(sequence)
        self._growth.setdefault(sequence.growth_batch_step, []).append(sequence)
