"""The runner's memory between steps, and the flat inputs of one step made from it.

What must live here: per known sequence its token ids, block table, `num_computed_tokens` and sampling parameters, in
numpy arrays with one slot per sequence, and the order in which a `StepPlan` changes them. What must not: torch,
decisions (those are the scheduler's), anything a plan could have said but did not.

Work per step is a few array operations over the whole batch; Python touches single sequences only where a plan
changes them, and where a sequence asks for controls that are ragged by nature (`SequenceControls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.core.output import NewSequence, SequenceFailure, StepPlan
from scheduler.messages import SamplingParams
from scheduler.model import kv_cache
from scheduler.model.guided.matcher import EveryToken, GuidedSequence, Guides
from scheduler.model.noise import position_keys, sequence_key
from scheduler.model.sampler import BiasList, GuideMask, PenaltyList, SamplingRows, TokenList

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_SLOT = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_prompt_tokens", np.int64),
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("num_logprobs", np.int64),
        ("num_prompt_logprobs", np.int64),
        ("num_scored_tokens", np.int64),
        ("key", np.uint64),
        ("has_guide", np.bool_),
        ("has_allowed", np.bool_),
        ("has_bias", np.bool_),
        ("has_penalties", np.bool_),
    ]
)
"""What is kept of one sequence beside its token ids, block table and controls."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """P positions of the flat row whose next token, one of the prompt, is to be scored. They belong to W sequences."""

    rows: Int64Array
    """[P]: positions in the flat row."""
    next_token_ids: Int64Array
    """[P]"""
    sequences: Int64Array
    """[W]: which of the B sequences."""
    lengths: Int64Array
    """[W]: how many of the P each has, at least one; in order."""
    num_top: Int64Array
    """[W]: how many best tokens each wants."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One flat row of T tokens that belong to B sequences, and where in it S tokens are sampled."""

    token_ids: Int64Array
    """[T]"""
    positions: Int64Array
    """[T]: absolute, each sequence's own."""
    query_lens: Int32Array
    """[B]"""
    context_lens: Int32Array
    """[B]: computed before this step, plus the query length."""
    block_table: Int32Array
    """[B, blocks of the longest context]"""
    slot_mapping: Int64Array
    """[T]: the KV pool slot of each token."""
    slots: Int64Array
    """[B]: the batch's slots, the rows of its own arrays."""
    sampled: Int64Array
    """[S]: which of the B sequences are sampled."""
    sampled_rows: Int64Array
    """[S]: positions in the flat row whose logits are wanted."""
    scored: ScoredRows | None = None
    """None: no prompt is scored in this step."""


class TokenCounts:
    """The distinct tokens of one sequence and how often each is in its output; kept only for penalties."""

    def __init__(self, prompt_ids: Int32Array, output_ids: Int32Array) -> None:
        distinct = np.unique(prompt_ids).astype(np.int64)
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._ids = np.resize(distinct, 2 * len(distinct) + 16)
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        for token_id in output_ids.tolist():
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Counts one more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.resize(self._ids, 2 * place)
            self._counts = np.concatenate([self._counts, np.zeros(place, dtype=np.int64)])
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> Int64Array:
        """The distinct tokens of prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> Int64Array:
        """Parallel to `ids`; 0 for tokens of the prompt only."""
        return self._counts[: len(self._places)]


@dataclass(frozen=True, slots=True)
class SequenceControls:
    """The controls of one sequence that are lists of tokens, ready to be strung together over a batch."""

    sampling: SamplingParams
    allowed_ids: Int64Array
    bias_ids: Int64Array
    bias_values: npt.NDArray[np.float64]
    stop_ids: Int64Array
    token_counts: TokenCounts | None
    guided: GuidedSequence | None = None


class InputBatch:
    """All sequences the runner knows: running ones, and preempted ones that wait with their token ids."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        guides: Guides | None = None,
    ) -> None:
        """`max_num_seqs` sizes the arrays at first; preempted sequences beyond it make them grow. Without `guides` all
        allow every token.
        """
        self.block_size = block_size
        self._vocab_size = vocab_size
        self.guides: Guides = guides or EveryToken()
        # One past the limit: a sequence that reaches it may have one more token sampled.
        self._max_num_tokens = max_model_len + 1
        max_num_blocks = -(-self._max_num_tokens // block_size)
        self._slot_of: dict[int, int] = {}
        self._state = np.zeros(max_num_seqs, dtype=_SLOT)
        # np.zeros leaves pages untouched until they are used: a slot costs what its sequence is long.
        self._token_ids = np.zeros((max_num_seqs, self._max_num_tokens), dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._controls: list[SequenceControls | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def token_ids(self, seq_id: int) -> list[int]:
        """Prompt and output tokens of a known sequence, in order."""
        slot = self._slot_of[seq_id]
        return self._token_ids[slot, : self._state["num_tokens"][slot]].tolist()

    def reset(self) -> None:
        """Forgets every sequence, whatever half of a plan has been applied."""
        num_slots = len(self._state)
        self._slot_of = {}
        self._controls = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    # ------------------------------------------------------------------------------------------ a plan's changes

    def apply(self, plan: StepPlan) -> None:
        """Changes the state as the plan says, in the order that `StepPlan` promises."""
        for seq_id in plan.finished_seq_ids:
            self._forget(seq_id)
        for seq_id in plan.preempted_seq_ids:
            self._place(self._slot_of[seq_id], (), 0)
        for new in plan.new:
            self._add(new)
        for resumed in plan.resumed:
            self._place(self._slot_of[resumed.seq_id], resumed.block_ids, resumed.num_computed_tokens)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._slot_of[seq_id], block_ids)

    def _forget(self, seq_id: int) -> None:
        slot = self._slot_of.pop(seq_id, None)
        if slot is None:  # it ended before any plan had it
            return
        self._controls[slot] = None
        self._free_slots.append(slot)

    def _place(self, slot: int, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._state["num_blocks"][slot] = 0
        self._append_blocks(slot, block_ids)
        self._state["num_computed_tokens"][slot] = num_computed_tokens

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = int(self._state["num_blocks"][slot])
        end = start + len(block_ids)
        self._block_table[slot, start:end] = block_ids
        self._state["num_blocks"][slot] = end

    def _add(self, new: NewSequence) -> None:
        num_tokens = len(new.token_ids)
        assert new.seq_id not in self._slot_of, f"sequence {new.seq_id} is new twice"
        assert 0 < num_tokens < self._max_num_tokens, f"sequence {new.seq_id} has {num_tokens} tokens"
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._slot_of[new.seq_id] = slot
        self._token_ids[slot, :num_tokens] = new.token_ids
        controls = self._controls_of(new, self._token_ids[slot, :num_tokens])
        self._controls[slot] = controls
        sampling = new.sampling
        state = self._state[slot : slot + 1]
        state["num_tokens"] = num_tokens
        state["num_prompt_tokens"] = new.num_prompt_tokens
        state["min_tokens"] = new.stopping.min_tokens if len(controls.stop_ids) else 0
        state["temperature"] = sampling.temperature
        state["top_k"] = sampling.top_k
        state["top_p"] = sampling.top_p
        state["min_p"] = sampling.min_p
        state["num_logprobs"] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        state["num_prompt_logprobs"] = -1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        state["num_scored_tokens"] = new.num_scored_tokens
        state["key"] = sequence_key(sampling.seed, new.index)
        state["has_guide"] = controls.guided is not None
        state["has_allowed"] = len(controls.allowed_ids) > 0
        state["has_bias"] = len(controls.bias_ids) > 0
        state["has_penalties"] = controls.token_counts is not None
        self._place(slot, new.block_ids, new.num_computed_tokens)

    def _controls_of(self, new: NewSequence, token_ids: Int32Array) -> SequenceControls:
        sampling, stopping = new.sampling, new.stopping
        stop_ids = _distinct((*stopping.eos_token_ids, *stopping.stop_token_ids))
        prompt_ids, output_ids = token_ids[: new.num_prompt_tokens], token_ids[new.num_prompt_tokens :]
        return SequenceControls(
            sampling=sampling,
            allowed_ids=_distinct(sampling.allowed_token_ids),
            bias_ids=np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64),
            bias_values=np.array([value for _, value in sampling.logit_bias], dtype=np.float64),
            # A model's files may name an EOS that its vocabulary lacks: it is never sampled, nor can it be masked.
            stop_ids=stop_ids[(stop_ids >= 0) & (stop_ids < self._vocab_size)],
            token_counts=TokenCounts(prompt_ids, output_ids) if has_penalties(sampling) else None,
            guided=(
                GuidedSequence(self.guides, new.guide, new.stopping.eos_token_ids, len(output_ids))
                if new.guide
                else None
            ),
        )

    def _grow(self) -> None:
        """Doubles the slots. Rare: only preempted sequences can be more than `max_num_seqs`."""
        num_slots = len(self._state)
        token_ids, block_table = self._token_ids, self._block_table
        self._state = np.concatenate([self._state, np.zeros(num_slots, dtype=_SLOT)])
        self._token_ids = np.zeros((2 * num_slots, token_ids.shape[1]), dtype=np.int32)
        self._block_table = np.zeros((2 * num_slots, block_table.shape[1]), dtype=np.int32)
        for slot in self._slot_of.values():  # only what is in use, so that unused pages stay untouched
            num_tokens, num_blocks = self._state["num_tokens"][slot], self._state["num_blocks"][slot]
            self._token_ids[slot, :num_tokens] = token_ids[slot, :num_tokens]
            self._block_table[slot, :num_blocks] = block_table[slot, :num_blocks]
        self._controls.extend([None] * num_slots)
        self._free_slots.extend(range(2 * num_slots - 1, num_slots - 1, -1))

    # ---------------------------------------------------------------------------------------------- a step's arrays

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of the step; `plan` has been applied and schedules at least one token."""
        slots = np.array([self._slot_of[seq_id] for seq_id in plan.seq_ids], dtype=np.int64)
        state = self._state[slots]
        query_lens = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        starts = state["num_computed_tokens"]
        context_lens = (starts + query_lens).astype(np.int32)
        # A wrong plan must not write into another sequence's blocks.
        assert query_lens.min() >= 1, "a sequence is scheduled without tokens"
        assert query_lens.sum() == plan.num_batched_tokens, "num_batched_tokens is not the sum of its parts"
        assert (context_lens <= state["num_tokens"]).all(), "tokens are scheduled that nobody knows"
        assert (context_lens <= state["num_blocks"] * self.block_size).all(), "tokens are scheduled without blocks"
        sampled = np.flatnonzero(context_lens == state["num_tokens"])
        assert [plan.seq_ids[i] for i in sampled.tolist()] == list(plan.sampled_seq_ids), (
            "the wrong sequences are sampled"
        )
        row_ends = np.cumsum(query_lens, dtype=np.int64)
        positions = np.arange(plan.num_batched_tokens) + np.repeat(starts - (row_ends - query_lens), query_lens)
        block_table = self._block_table[slots, : -(-int(context_lens.max()) // self.block_size)]
        return StepInputs(
            token_ids=self._token_ids[np.repeat(slots, query_lens), positions].astype(np.int64),
            positions=positions,
            query_lens=query_lens,
            context_lens=context_lens,
            block_table=block_table,
            slot_mapping=kv_cache.slot_mapping(
                query_lens=query_lens,
                context_lens=context_lens,
                block_table=block_table,
                block_size=self.block_size,
            ),
            slots=slots,
            sampled=sampled,
            sampled_rows=row_ends[sampled] - 1,
            scored=self._scored(slots, state, context_lens, row_ends),
        )

    def _scored(
        self, slots: Int64Array, state: npt.NDArray[np.void], context_lens: Int32Array, row_ends: Int64Array
    ) -> ScoredRows | None:
        """The prompt's last token is not scored: what follows it is output."""
        wanting = np.flatnonzero(state["num_prompt_logprobs"] >= 0)
        if len(wanting) == 0:
            return None
        of_wanting, context_lens = state[wanting], context_lens[wanting]
        ends = np.minimum(context_lens, of_wanting["num_prompt_tokens"] - 1)
        starts = of_wanting["num_scored_tokens"]
        lengths = ends - starts
        some = lengths > 0
        assert (of_wanting["num_computed_tokens"] <= starts)[some].all(), "tokens to be scored came from the cache"
        if not some.any():
            return None
        wanting, starts, lengths = wanting[some], starts[some], lengths[some]
        positions = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return ScoredRows(
            rows=positions + np.repeat(row_ends[wanting] - context_lens[some], lengths),
            next_token_ids=self._token_ids[np.repeat(slots[wanting], lengths), positions + 1].astype(np.int64),
            sequences=wanting,
            lengths=lengths,
            num_top=of_wanting["num_prompt_logprobs"][some],
        )

    def sampling_rows(self, inputs: StepInputs) -> SamplingRows:
        """What the sampler needs to know of the step's S sampled sequences."""
        slots = inputs.slots[inputs.sampled]
        state = self._state[slots]
        num_output_tokens = state["num_tokens"] - state["num_prompt_tokens"]
        return SamplingRows(
            temperature=state["temperature"],
            top_k=state["top_k"],
            top_p=state["top_p"],
            min_p=state["min_p"],
            num_logprobs=state["num_logprobs"],
            keys=position_keys(state["key"], state["num_tokens"]),
            guide=self._guide_mask(slots, np.flatnonzero(state["has_guide"])),
            allowed=self._allowed(slots, np.flatnonzero(state["has_allowed"])),
            bias=self._bias(slots, np.flatnonzero(state["has_bias"])),
            forbidden=self._forbidden(slots, np.flatnonzero(num_output_tokens < state["min_tokens"])),
            penalties=self._penalties(slots, np.flatnonzero(state["has_penalties"])),
        )

    def _controls_in(self, slots: Int64Array) -> list[SequenceControls]:
        found = [self._controls[slot] for slot in slots.tolist()]
        return [controls for controls in found if controls is not None]

    def _guide_mask(self, slots: Int64Array, rows: Int64Array) -> GuideMask | None:
        if len(rows) == 0:
            return None
        bitmask = np.full((len(rows), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        failures: dict[int, SequenceFailure] = {}
        for place, (row, controls) in enumerate(zip(rows.tolist(), self._controls_in(slots[rows]), strict=True)):
            assert controls.guided is not None
            state = self._state[slots[row]]
            output_ids = self._token_ids[slots[row], state["num_prompt_tokens"] : state["num_tokens"]]
            failure = controls.guided.fill(output_ids, bitmask, place)
            if failure is not None:
                bitmask[place] = -1
                failures[row] = failure
        return GuideMask(rows, bitmask, failures)

    def _allowed(self, slots: Int64Array, rows: Int64Array) -> TokenList | None:
        if len(rows) == 0:
            return None
        ids = [controls.allowed_ids for controls in self._controls_in(slots[rows])]
        return TokenList(_repeat(rows, ids), np.concatenate(ids))

    def _bias(self, slots: Int64Array, rows: Int64Array) -> BiasList | None:
        if len(rows) == 0:
            return None
        found = self._controls_in(slots[rows])
        ids = [controls.bias_ids for controls in found]
        return BiasList(_repeat(rows, ids), np.concatenate(ids), np.concatenate([c.bias_values for c in found]))

    def _forbidden(self, slots: Int64Array, rows: Int64Array) -> TokenList | None:
        if len(rows) == 0:
            return None
        ids = [controls.stop_ids for controls in self._controls_in(slots[rows])]
        return TokenList(_repeat(rows, ids), np.concatenate(ids))

    def _penalties(self, slots: Int64Array, rows: Int64Array) -> PenaltyList | None:
        if len(rows) == 0:
            return None
        found = self._controls_in(slots[rows])
        counts = [controls.token_counts for controls in found if controls.token_counts is not None]
        ids = [token_counts.ids for token_counts in counts]
        lengths = [len(row_ids) for row_ids in ids]
        return PenaltyList(
            rows=np.repeat(rows, lengths),
            ids=np.concatenate(ids),
            output_counts=np.concatenate([token_counts.output_counts for token_counts in counts]),
            repetition=np.repeat([controls.sampling.repetition_penalty for controls in found], lengths),
            frequency=np.repeat([controls.sampling.frequency_penalty for controls in found], lengths),
            presence=np.repeat([controls.sampling.presence_penalty for controls in found], lengths),
        )

    # ------------------------------------------------------------------------------------------------ after a step

    def commit(self, inputs: StepInputs, sampled_token_ids: Sequence[int]) -> None:
        """Records that the step has run: its tokens are computed; what it sampled (if not -1) is appended."""
        self._state["num_computed_tokens"][inputs.slots] += inputs.query_lens
        if inputs.scored is not None:
            self._state["num_scored_tokens"][inputs.slots[inputs.scored.sequences]] += inputs.scored.lengths
        token_ids = np.array(sampled_token_ids, dtype=np.int32)
        good = token_ids >= 0
        slots, token_ids = inputs.slots[inputs.sampled][good], token_ids[good]
        self._token_ids[slots, self._state["num_tokens"][slots]] = token_ids
        self._state["num_tokens"][slots] += 1
        for place in np.flatnonzero(self._state["has_penalties"][slots]).tolist():
            controls = self._controls[slots[place]]
            assert controls is not None
            assert controls.token_counts is not None
            controls.token_counts.append(int(token_ids[place]))


def has_penalties(sampling: SamplingParams) -> bool:
    """True if any of the three penalties changes anything."""
    neutral = (1.0, 0.0, 0.0)
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != neutral


def _distinct(token_ids: Sequence[int]) -> Int64Array:
    ids = np.sort(np.array(token_ids, dtype=np.int64))
    return ids[np.diff(ids, prepend=ids[:1] - 1) > 0]  # np.unique takes ten times as long


def _repeat(rows: Int64Array, lists: Sequence[Int64Array]) -> Int64Array:
    """Each row as often as its list has entries."""
    return np.repeat(rows, [len(entries) for entries in lists])
