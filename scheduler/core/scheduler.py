"""Who computes what in the next step, and what came of the last one.

What lives here: the decisions. What must not: a clock, I/O, threads, randomness, logging, tensors; the same calls in
the same order give the same plans.

**One step is one forward pass.** There is no prefill phase and no decode phase: each running sequence's
`num_computed_tokens` catches up with its tokens under the budget `max_num_batched_tokens`. A sequence that has caught
up takes one token of every step, so a long prompt is chunked around the decodes, never ahead of them. What is left
goes out in order of precedence.

**Order of precedence**: higher priority, then earlier arrival, where waiting makes up for priority (see `request.py`);
fixed for life. Admissions come from the front of the line and skip nobody; victims come off the end of the running
list. So those who run come before all of their own priority who wait. A waiting sequence takes the seat or blocks that
it needs from the last running one if that comes behind it and is of lower priority.

**Why everything ends.** A sequence is let in with the blocks of all its known tokens and asks for more only as its
output grows. If there are none, the last running sequence is preempted: it loses its blocks, keeps its tokens and
recomputes later. The first in precedence is thus never a victim while anyone else runs; alone it fits, or it would
have been refused (`RequestNeverFitsError`, or CONTEXT_LIMIT at the pool's size). It gets a token in every step: the
budget is at least the number of seats and it sits on one. When it ends, the next is first.

**Why there is little thrash.** Nobody is let in beside others unless the pool could then feed the growth of all for
some more steps (see `room.py`). A victim needs again all that it gave up, part of which went to another, so it cannot
come back before somebody ends; until then the line is not even looked at.

**Sequences of one request** stand in line, sit and are preempted each for itself; what they share is in
`kv_cache_manager.py`. One whose sibling is still computing the prompt for it has a seat and waits: it comes behind that
sibling in precedence, which computes in every step and is preempted later. A failure of one ends the request.

**Pauses.** A paused request gives up its seats and stands in no line, so it holds nobody up and is no work. Its
sequences keep their blocks (they are parked), but not against anybody: whoever needs blocks takes theirs before those
of any that runs, whatever the priorities, so that the argument above does not change. `unpause` puts it back in line.

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
some requests run, `limit` makes steps smaller. Both may leave later arrivals running while earlier ones wait, as a
pause may. The first in precedence of those who run is safe all the same, so it ends, and the first in line is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from scheduler.core.arrivals import sort_out
from scheduler.core.config import SchedulerConfig
from scheduler.core.kv_cache_manager import KVCacheManager, Start
from scheduler.core.output import StepPlan, StepResult
from scheduler.core.plan_draft import Chunk, PlanDraft
from scheduler.core.request import Request, Sequence, SequenceStatus, make_request
from scheduler.core.room import Room
from scheduler.core.roster import Roster
from scheduler.core.stopping import finish_reason_after
from scheduler.messages import (
    EngineStats,
    FailureKind,
    FinishReason,
    RequestFailure,
    SequenceOutput,
    Submit,
    TokenLogprobs,
)

_NOBODY: tuple[int, ...] = ()
_RUNNING = SequenceStatus.RUNNING


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
        self._roster = Roster(self._kv)
        self._room = Room(config, self._kv, self._roster)
        self._seats = self._roster.seats
        self._waiting = self._roster.waiting

        self._step_id = 0
        self._is_in_flight = False
        self._was_alone = False
        """Whether the last plan held a sequence outside the batch; the next one is the batch's then."""
        self._step_decodes: list[Sequence] = []
        """Of the last plan: those that decoded in it."""
        self._chunks: list[Chunk] = []
        """Of the last plan."""
        self._step_request_ids: tuple[int, ...] = ()

        self._num_arrivals = 0
        self._num_sequences = 0

    # ------------------------------------------------------------------------------------------ requests in and out

    @property
    def has_work(self) -> bool:
        """Whether schedule() would return a plan."""
        return bool(self._seats.sequences) or self._waiting.has_candidates

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
        request = self._roster.requests.get(request_id)
        if request is None:
            return None
        return {
            sequence.index: len(sequence.token_ids) - sequence.num_prompt_tokens
            for sequence in request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        }

    def has_run(self, request_id: int) -> bool:
        """Whether any of it has ever had a seat. Of one that is not here: yes."""
        request = self._roster.requests.get(request_id)
        return request is None or request.has_run

    def add_request(self, submit: Submit) -> tuple[SequenceOutput, ...]:
        """Put a request in line. Returns the only outputs of those of its sequences that are over before they begin.

        Raises what `sort_out` does. After any error the request is unknown, and all else as it was: whatever can raise
        comes before the first change.
        """
        assert submit.request_id not in self._roster.requests, f"request {submit.request_id} is already here"
        arrival = sort_out(submit, max_model_len=self._max_model_len)
        if not arrival.unfinished:
            return arrival.over
        request = make_request(
            replace(submit, sequences=arrival.unfinished),
            step_id=self._step_id,
            arrival=self._num_arrivals + 1,
            first_seq_id=self._num_sequences + 1,
            max_model_len=self._max_model_len,
        )
        self._num_arrivals += 1
        self._num_sequences += len(request.sequences)
        for sequence, start_reason in zip(request.sequences, arrival.start_reasons, strict=True):
            sequence.start_reason = start_reason
        self._roster.arrive(request)
        return arrival.over

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget these requests and free their blocks, now. Unknown ids are ignored."""
        for request in self._known(request_ids):
            self._roster.end_all(request)

    def abort_sequences(self, sequences: Iterable[tuple[int, int]]) -> None:
        """Forget these of their requests' sequences, by request and index. Unknown ones are ignored."""
        for request_id, index in sequences:
            request = self._roster.requests.get(request_id)
            for sequence in () if request is None else request.unfinished:
                if sequence.index == index:
                    self._roster.end(sequence)

    def pause(self, request_ids: Iterable[int]) -> None:
        """No more steps for these until `unpause`. Between steps only. Unknown and paused ones are ignored."""
        assert not self._is_in_flight, "update_from_output() or drop_step() comes first"
        for request in self._known(request_ids):
            self._roster.pause(request)

    def unpause(self, request_ids: Iterable[int]) -> None:
        """These go on where they were, once they have seats again. Unknown ones and those that run are ignored."""
        for request in self._known(request_ids):
            self._roster.unpause(request)

    def _known(self, request_ids: Iterable[int]) -> Iterator[Request]:
        return (request for request_id in request_ids if (request := self._roster.requests.get(request_id)) is not None)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._seats),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_used_kv_blocks=self._kv.pool.num_used,
            num_kv_blocks=self._config.num_kv_blocks,
            num_preemptions_total=self._roster.num_preemptions_total,
            num_prompt_tokens_total=self._roster.num_prompt_tokens_total,
            num_cached_tokens_total=self._roster.num_cached_tokens_total,
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
        # Others hold blocks of theirs, and offer what they hold once: now, or they would do so after it was forgotten.
        for sequence in (*self._seats.sequences, *self._roster.parked):
            self._kv.register(sequence)
        for sequence in self._in_step():
            if sequence.status is _RUNNING:
                self._kv.free_and_forget(sequence)
        self.vacate()
        return self._step_request_ids

    def vacate(self) -> None:
        """Nobody runs any more, and the runner, which must be reset, knows nobody. All keep tokens and precedence."""
        assert not self._is_in_flight, "update_from_output() or drop_step() comes first"
        self._roster.vacate()

    def confine(self, request_ids: Iterable[int]) -> None:
        """Until `unconfine`, schedule none but these requests; the others, also those to come, wait in their order.

        Takes the place of a confinement before it. Nothing may be running.
        """
        assert not self._seats.sequences, "vacate() comes first"
        self._waiting.confine(request_ids)

    def unconfine(self) -> None:
        """Schedule everybody again. Who runs goes on."""
        self._waiting.unconfine()
        self._roster.is_admission_open = True

    def limit(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Hold steps to these bounds from now on, or to the configured ones where those are lower.

        Bounds may be raised at any time, and lowered while nothing runs.
        """
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        max_num_seqs = min(max_num_seqs, self._config.max_num_seqs)
        max_num_batched_tokens = min(max_num_batched_tokens, self._config.max_num_batched_tokens)
        is_lower = max_num_seqs < self.max_num_seqs or max_num_batched_tokens < self.max_num_batched_tokens
        assert not (is_lower and self._seats.sequences), "vacate() comes first"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._roster.is_admission_open = True

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
        finished_seq_ids = tuple(self._roster.finished_seq_ids)
        self._roster.finished_seq_ids.clear()
        self._chunks = draft.chunks
        if is_alone:
            self._step_decodes = []
            decode_ids = request_ids = ones = _NOBODY
        else:
            seats = self._seats
            self._step_decodes = seats.decodes
            decode_ids, request_ids, ones = seats.decode_ids, seats.decode_request_ids, seats.ones
        if draft.chunks:
            request_ids += tuple([chunk.sequence.request_id for chunk in draft.chunks])
        self._step_request_ids = request_ids
        return draft.plan(self._step_id, decode_ids=decode_ids, ones=ones, finished_seq_ids=finished_seq_ids)

    def _schedule_batch(self, draft: PlanDraft) -> bool:
        """Give this step to the batch. False if there is none: nobody in it runs, and nobody could be let in."""
        seats = self._seats
        for sequence in seats.begin_batch_step():
            if not seats.is_due(sequence):
                continue  # it has just been preempted
            self._append_block(sequence, draft)
            if sequence.status is _RUNNING:
                seats.has_grown(sequence, self._kv.num_slots_left(sequence))
        if seats.num_behind or (self._roster.is_admission_open and self._waiting.batch):
            self._spend_budget(draft)
        seats.refresh_decodes()
        return bool(seats.decodes or draft.chunks)

    def _schedule_alone(self, draft: PlanDraft) -> bool:
        """Give this step to the sequence outside the batch. False if there is none that can go on, nor could be let
        in.
        """
        if self._seats.alone is None:
            front = self._front()
            if front is None or not front.is_alone:
                return False
            start = self._make_room(front, draft)
            if start is None:
                self._roster.is_admission_open = False
                return False
            self._admit(front, start, draft)
        sequence = self._seats.alone
        assert sequence is not None
        if sequence.provider is not None:
            return False
        if self._kv.num_slots_left(sequence) == 0:
            self._append_block(sequence, draft)
        if sequence.status is not _RUNNING:
            return False
        self._add_chunk(sequence, self.max_num_batched_tokens, draft)
        return True

    def _front(self) -> Sequence | None:
        """Who is to be let in next, if anybody is."""
        if not self._roster.is_admission_open:
            return None
        return self._waiting.front(is_alone_taken=self._seats.alone is not None)

    def _append_block(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Give a running sequence one more block, if need be at the cost of the last ones, of which it may be one."""
        self._kv.register(sequence)
        while not self._kv.can_append() and sequence.status is _RUNNING:
            self._preempt(self._roster.parked[-1] if self._roster.parked else self._seats.sequences[-1], draft)
        if sequence.status is _RUNNING:
            draft.new_block_ids[sequence.seq_id] = (self._kv.append(sequence),)

    def _spend_budget(self, draft: PlanDraft) -> None:
        """Give the tokens that the decodes leave to the other sequences, running or waiting, in order of precedence."""
        behind = deque(self._seats.behind())
        admitted: set[Sequence] = set()
        while True:
            front = self._front()
            if front is not None and front.is_alone:
                front = None  # it gets the next step, and nobody behind it is let in before
            num_tokens_left = self.max_num_batched_tokens - self._seats.num_decodes - draft.num_chunk_tokens
            if num_tokens_left == 0 and draft.chunks:
                self._seat_siblings(draft)
                return
            if behind and (front is None or behind[0].order < front.order):
                sequence = behind.popleft()
                # One that was preempted a moment ago may have been let in again, and has its tokens then.
                if sequence.status is _RUNNING and sequence not in admitted:
                    self._add_chunk(sequence, num_tokens_left, draft)
            elif front is None:
                return
            elif (start := self._make_room(front, draft)) is None:
                self._roster.is_admission_open = False
            elif num_tokens_left > 0:
                self._admit(front, start, draft)
                admitted.add(front)
                if front.provider is None:
                    self._add_chunk(front, num_tokens_left, draft)
            # Otherwise the decodes had taken the whole budget, one of them has just been preempted, and the next
            # round finds its token.

    def _seat_siblings(self, draft: PlanDraft) -> None:
        """Let those in, while there is room, whose prompt a sibling is computing: they need nothing of the budget, and
        hold the prompt's blocks should that one end before them.
        """
        while (front := self._front()) is not None and not front.is_alone:
            start = self._kv.find_start(front) if len(front.request.sequences) > 1 else Start([])
            if start.provider is None or not self._room.is_enough(front, start, self.max_num_seqs):
                return
            self._admit(front, start, draft)

    def _add_chunk(self, sequence: Sequence, num_tokens_max: int, draft: PlanDraft) -> None:
        """Let a running sequence compute; the runner learns where, if it has not yet."""
        if not sequence.is_placed:
            sequence.is_placed = True
            if sequence.is_known:
                draft.add_resumed(sequence)
            else:
                sequence.is_known = True
                draft.add_new(sequence)
        draft.add_chunk(sequence, num_tokens_max)

    def _make_room(self, sequence: Sequence, draft: PlanDraft) -> Start | None:
        """See to a seat and blocks for a waiting sequence, if need be at the cost of others.

        Returns what it can begin with, or None if there is no room; nobody loses blocks in vain.
        """
        start = self._kv.find_start(sequence)
        if self._room.is_enough(sequence, start, self.max_num_seqs):
            return start
        victims = self._room.victims(sequence, start, self.max_num_seqs)
        if victims is None:
            return None
        for victim in victims:
            self._preempt(victim, draft)
            if self._room.is_enough(sequence, start, self.max_num_seqs):
                return start
        raise AssertionError("there was to be room")

    def _admit(self, sequence: Sequence, start: Start, draft: PlanDraft) -> None:
        block_ids = self._roster.admit(sequence, start)
        if block_ids:
            draft.new_block_ids[sequence.seq_id] = tuple(block_ids)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        if sequence.is_placed:
            draft.add_preempted(sequence)
        self._roster.preempt(sequence)

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
        failures = self._fail(result)
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
            if len(sequence.request.sequences) > 1:
                self._kv.provide(sequence)
            prompt_logprobs = result.prompt_logprobs.get(sequence.seq_id)
            if prompt_logprobs is not None:
                sequence.add_prompt_logprobs(prompt_logprobs)
            if token_id is not None and sequence.start_reason is not None:
                outputs.append(self._told(sequence, (), None, sequence.start_reason))
            elif token_id is not None:
                sequence.token_ids.append(token_id)
                if not sequence.is_alone:
                    if sequence is self._seats.alone:
                        self._roster.is_admission_open = True  # the next one of its kind may be let in
                    self._seats.catch_up(sequence, self._kv.num_slots_left(sequence))
                outputs.append(self._output(sequence, result.logprobs.get(sequence.seq_id)))

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
            self._roster.end(sequence)
        return output

    def _fail(self, result: StepResult) -> tuple[RequestFailure, ...]:
        """End the requests of sequences that cannot go on. What those have computed whose logits were no numbers is not
        to be trusted.
        """
        if not (result.non_finite_seq_ids or result.failures):
            return ()
        by_seq_id = {sequence.seq_id: sequence for sequence in self._in_step()}
        causes = [(seq_id, FailureKind.NON_FINITE, "") for seq_id in result.non_finite_seq_ids]
        causes += [(seq_id, failure.kind, failure.incident_id) for seq_id, failure in result.failures.items()]
        failures = []
        for seq_id, kind, incident_id in causes:
            request = by_seq_id[seq_id].request
            if not request.is_finished:
                self._roster.end_all(request, distrust=kind is FailureKind.NON_FINITE)
                failures.append(RequestFailure(request.request_id, kind, incident_id))
        return tuple(failures)

    def _in_step(self) -> list[Sequence]:
        """The sequences of the last plan, in its order, those included that have ended since."""
        return [*self._step_decodes, *(chunk.sequence for chunk in self._chunks)]
