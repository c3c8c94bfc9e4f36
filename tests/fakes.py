"""Stand-ins for the parts around the scheduler: a runner whose KV cache holds checkable contents, and a clock.

`FakeRunner` follows plans as the real runner must, and asserts on the way everything that a real one relies on. In
place of keys and values, a slot holds a digest of *all* tokens up to and including its own, since that is what real
keys and values depend on: a block hit under a wrong prefix, or overwritten by somebody else, is found out at once.
The sampled token is a function of the same digest, so a request's tokens are those it would get alone
(`reference_output`), in whatever company, or the cache is corrupt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.core.output import StepPlan, StepResult
from scheduler.core.packed_logprobs import PackedLogprobs
from scheduler.core.stopping import finish_reason_after
from scheduler.messages import (
    FailureKind,
    FinishReason,
    SamplingParams,
    SequenceStart,
    StoppingParams,
    Submit,
    TokenLogprobs,
)

_MASK = 2**64 - 1
_EMPTY_SLOT = -1


def digest_after(digest: int, token_id: int) -> int:
    """The digest of a token list that continues one of `digest` with `token_id` (an LCG step, then a mix)."""
    mixed = ((digest ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK
    return mixed ^ (mixed >> 29)


def next_token_id(digest: int, index: int, vocab_size: int, num_output_tokens: int, stopping: StoppingParams) -> int:
    """The token that sequence `index` "samples" after tokens of this digest; no stop token before `min_tokens`."""
    token_id = ((digest >> 17) + index) % vocab_size
    if num_output_tokens < stopping.min_tokens:
        masked = {*stopping.eos_token_ids, *stopping.stop_token_ids}
        while token_id in masked:
            token_id = (token_id + 1) % vocab_size
    return token_id


def reference_output(
    submit: Submit, index: int = 0, *, vocab_size: int, max_model_len: int, poison_token_id: int | None = None
) -> tuple[tuple[int, ...], FinishReason | FailureKind]:
    """The new tokens of one sequence when it is computed alone and in the most obvious way, and how it ends."""
    (start,) = (start for start in submit.sequences if start.index == index)
    token_ids = [*submit.prompt_token_ids, *start.resume_token_ids]
    num_known = len(token_ids)
    digest = 0
    for token_id in token_ids:
        digest = digest_after(digest, token_id)
    if submit.sampling.num_prompt_logprobs is not None and poison_token_id in token_ids:
        return (), FailureKind.NON_FINITE
    if submit.stopping.max_tokens == 0 and num_known == len(submit.prompt_token_ids):
        return (), FinishReason.MAX_TOKENS
    while True:
        if len(token_ids) > len(submit.prompt_token_ids):
            reason = finish_reason_after(
                token_ids[-1],
                num_prompt_tokens=len(submit.prompt_token_ids),
                num_tokens=len(token_ids),
                stopping=submit.stopping,
                max_model_len=max_model_len,
            )
            if reason is not None:
                return tuple(token_ids[num_known:]), reason
        if poison_token_id in token_ids:
            return tuple(token_ids[num_known:]), FailureKind.NON_FINITE
        num_output_tokens = len(token_ids) - len(submit.prompt_token_ids)
        token_ids.append(next_token_id(digest, index, vocab_size, num_output_tokens, submit.stopping))
        digest = digest_after(digest, token_ids[-1])


def make_submit(
    request_id: int,
    prompt_token_ids: Iterable[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    resume_token_ids: tuple[int, ...] = (),
    sequences: tuple[SequenceStart, ...] = (),
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    cache_bypass: bool = False,
) -> Submit:
    """A greedy request with everything else at its default; `resume_token_ids` are those of its only sequence."""
    return Submit(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(temperature=0.0, num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs),
        stopping=StoppingParams(max_tokens, min_tokens, eos_token_ids, stop_token_ids),
        sequences=sequences or (SequenceStart(0, resume_token_ids),),
        priority=priority,
        cache_salt=cache_salt,
        cache_bypass=cache_bypass,
    )


@dataclass(slots=True)
class _Placed:
    """What a runner keeps of one sequence."""

    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    block_table: list[int] | None
    """None while preempted."""
    num_computed_tokens: int
    num_scored_tokens: int
    digests: list[int] = field(default_factory=list)
    """`digests[i]` belongs to the tokens up to and including position i."""

    def __post_init__(self) -> None:
        token_ids, self.token_ids = self.token_ids, []
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self.digests.append(digest_after(self.digests[-1] if self.digests else 0, token_id))
        self.token_ids.append(token_id)


class FakeRunner:
    """Executes plans over a pretended KV pool, and asserts that they make sense.

    A sequence whose tokens include `poison_token_id` yields a row that is not finite.
    """

    def __init__(
        self, *, num_kv_blocks: int, block_size: int, vocab_size: int = 50, poison_token_id: int | None = None
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.poison_token_id = poison_token_id
        self.num_tokens_computed_total = 0
        self._slots = [_EMPTY_SLOT] * (num_kv_blocks * block_size)
        self._sequences: dict[int, _Placed] = {}
        self._prompt_logprobs: dict[int, PackedLogprobs] = {}
        """Of the present step."""
        self._last_step_id = 0

    @property
    def seq_ids(self) -> frozenset[int]:
        """The sequences this runner keeps state of."""
        return frozenset(self._sequences)

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's changes, write the step's slots, sample."""
        assert plan.step_id == self._last_step_id + 1, "each plan is executed once, in order"
        self._last_step_id = plan.step_id
        self._apply_changes(plan)
        self._check_shape(plan)
        self._check_contents()
        self._write(plan)
        self.num_tokens_computed_total += plan.num_batched_tokens
        return self._sample(plan)

    def _apply_changes(self, plan: StepPlan) -> None:
        for seq_id in plan.finished_seq_ids:
            del self._sequences[seq_id]
        for seq_id in plan.preempted_seq_ids:
            preempted = self._sequences[seq_id]
            assert preempted.block_table is not None, "preempted twice"
            preempted.block_table = None
            preempted.num_computed_tokens = 0
        for new in plan.new:
            assert new.seq_id not in self._sequences, "placed twice"
            self._sequences[new.seq_id] = _Placed(
                new.index,
                list(new.token_ids),
                new.num_prompt_tokens,
                new.sampling,
                new.stopping,
                list(new.block_ids),
                new.num_computed_tokens,
                new.num_scored_tokens,
            )
        for resumed in plan.resumed:
            sequence = self._sequences[resumed.seq_id]
            assert sequence.block_table is None, "resumed but not preempted"
            sequence.block_table = list(resumed.block_ids)
            sequence.num_computed_tokens = resumed.num_computed_tokens
        placed_now = {new.seq_id for new in plan.new} | {resumed.seq_id for resumed in plan.resumed}
        for seq_id, block_ids in plan.new_block_ids.items():
            assert seq_id not in placed_now, "a sequence placed in this step gets its blocks there"
            table = self._sequences[seq_id].block_table
            assert table is not None, "grown while preempted"
            table.extend(block_ids)

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.seq_ids, "an empty step"
        assert len(plan.seq_ids) == len(plan.num_scheduled_tokens) == len(set(plan.seq_ids))
        assert sum(plan.num_scheduled_tokens) == plan.num_batched_tokens
        assert min(plan.num_scheduled_tokens) >= 1
        expected_sampled = []
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            sequence = self._sequences[seq_id]
            assert sequence.block_table is not None, "scheduled while preempted"
            end = sequence.num_computed_tokens + num_tokens
            assert end <= len(sequence.token_ids), "tokens that do not exist yet"
            assert end <= len(sequence.block_table) * self.block_size, "block table too short"
            if end == len(sequence.token_ids):
                expected_sampled.append(seq_id)
        assert list(plan.sampled_seq_ids) == expected_sampled

    def _check_contents(self) -> None:
        """Every computed position of every placed sequence holds what it ought to."""
        size = self.block_size
        for seq_id, sequence in self._sequences.items():
            if sequence.block_table is None:
                continue
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block twice in one table"
            for index, start in enumerate(range(0, sequence.num_computed_tokens, size)):
                end = min(start + size, sequence.num_computed_tokens)
                slot = sequence.block_table[index] * size
                assert self._slots[slot : slot + end - start] == sequence.digests[start:end], (
                    f"the content of block {sequence.block_table[index]} is not that of sequence {seq_id}"
                )

    def _write(self, plan: StepPlan) -> None:
        holders: dict[int, list[int]] = {}
        for seq_id, sequence in self._sequences.items():
            for block_id in sequence.block_table or ():
                holders.setdefault(block_id, []).append(seq_id)
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            sequence = self._sequences[seq_id]
            assert sequence.block_table is not None
            self._score(seq_id, sequence, sequence.num_computed_tokens + num_tokens)
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens):
                block_id = sequence.block_table[position // self.block_size]
                assert holders[block_id] == [seq_id], f"block {block_id} is written while others hold it"
                self._slots[block_id * self.block_size + position % self.block_size] = sequence.digests[position]
            sequence.num_computed_tokens += num_tokens

    def _score(self, seq_id: int, sequence: _Placed, end: int) -> None:
        """The prompt tokens behind the computed ones, each with its position for a rank."""
        start, end = sequence.num_scored_tokens, min(end, sequence.num_prompt_tokens - 1)
        if sequence.sampling.num_prompt_logprobs is None or start >= end:
            return
        assert sequence.num_computed_tokens <= start, "what is to be scored was taken from the cache"
        sequence.num_scored_tokens = end
        positions = range(start + 1, end + 1)
        logprobs = array("f", [-float(sequence.token_ids[position]) for position in positions])
        self._prompt_logprobs[seq_id] = PackedLogprobs(0, logprobs, array("i", positions))

    def _sample(self, plan: StepPlan) -> StepResult:
        sampled_token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        non_finite_seq_ids: list[int] = []
        for seq_id in plan.sampled_seq_ids:
            sequence = self._sequences[seq_id]
            if self.poison_token_id in sequence.token_ids:
                sampled_token_ids.append(-1)
                non_finite_seq_ids.append(seq_id)
                continue
            num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            token_id = next_token_id(
                sequence.digests[-1], sequence.index, self.vocab_size, num_output_tokens, sequence.stopping
            )
            sequence.append(token_id)
            sampled_token_ids.append(token_id)
            if sequence.sampling.num_logprobs is not None:
                logprobs[seq_id] = TokenLogprobs(logprob=-float(token_id), rank=1)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, {}
        return StepResult(sampled_token_ids, logprobs, non_finite_seq_ids, prompt_logprobs)


class FakeClock:
    """Time that passes when told to. Call it for seconds since its beginning."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a monotonic clock"
        self._now_s += seconds
