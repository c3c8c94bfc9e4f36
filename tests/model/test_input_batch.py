"""The runner's memory: what is counted and strung together is what a plain count would be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.output import NewSequence, StepPlan
from scheduler.messages import SamplingParams, StoppingParams
from scheduler.model.input_batch import InputBatch, TokenCounts

TOKENS = st.lists(st.integers(0, 50), max_size=120)


@given(prompt=TOKENS, resumed=TOKENS, sampled=TOKENS)
def test_token_counts_are_counts(prompt: list[int], resumed: list[int], sampled: list[int]) -> None:
    """However many tokens come, each distinct one is listed once with its number in the output."""
    counts = TokenCounts(np.array(prompt, dtype=np.int32), np.array(resumed, dtype=np.int32))
    for token_id in sampled:
        counts.append(token_id)
    expected = Counter([*resumed, *sampled])
    assert dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True)) == {
        token_id: expected[token_id] for token_id in {*prompt, *resumed, *sampled}
    }


def new_sequence(seq_id: int, num_tokens: int, blocks: tuple[int, ...], **changes: object) -> NewSequence:
    fields: dict[str, object] = {
        "seq_id": seq_id,
        "index": 0,
        "token_ids": tuple(range(100 * seq_id, 100 * seq_id + num_tokens)),
        "num_prompt_tokens": num_tokens,
        "sampling": SamplingParams(temperature=0.0),
        "stopping": StoppingParams(max_tokens=10),
        "block_ids": blocks,
        "num_computed_tokens": 0,
    }
    return NewSequence(**(fields | changes))  # type: ignore[arg-type]


def test_the_flat_row_is_laid_out_as_the_plan_says() -> None:
    """Tokens, positions, slots, lengths and sampled rows of a mixed step, written out."""
    batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=4, vocab_size=1000)
    first = new_sequence(1, 6, (7, 2))
    second = new_sequence(2, 9, (5, 9, 1), num_computed_tokens=4)
    plan = StepPlan(0, (2, 1), (3, 6), (1,), 9, new=(first, second))
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids.tolist() == [204, 205, 206, 100, 101, 102, 103, 104, 105]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert inputs.slot_mapping.tolist() == [36, 37, 38, 28, 29, 30, 31, 8, 9]
    assert inputs.query_lens.tolist() == [3, 6]
    assert inputs.context_lens.tolist() == [7, 6]
    assert inputs.block_table.tolist() == [[5, 9], [7, 2]]
    assert inputs.sampled_rows.tolist() == [8]
    batch.commit(inputs, [42])
    assert batch.token_ids(1) == [100, 101, 102, 103, 104, 105, 42]
    plan = StepPlan(1, (1, 2), (1, 2), (1, 2), 3)
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids.tolist() == [42, 207, 208]
    assert inputs.positions.tolist() == [6, 7, 8]
    assert inputs.sampled_rows.tolist() == [0, 2]


def test_only_who_asks_is_listed() -> None:
    """Ragged controls hold the rows that ask and no others, and min_tokens ends when it is reached."""
    batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=4, vocab_size=1000)
    asking = SamplingParams(
        temperature=0.0, logit_bias=((3, 1.0), (9, -1.0)), allowed_token_ids=(9, 3, 9), presence_penalty=1.0
    )
    stopping = StoppingParams(max_tokens=10, min_tokens=1, eos_token_ids=(0,), stop_token_ids=(5, 0))
    plan = StepPlan(
        step_id=0,
        seq_ids=(1, 2),
        num_scheduled_tokens=(2, 3),
        sampled_seq_ids=(1, 2),
        num_batched_tokens=5,
        new=(new_sequence(1, 2, (0,)), new_sequence(2, 3, (1,), sampling=asking, stopping=stopping)),
    )
    batch.apply(plan)
    inputs = batch.build(plan)
    rows = batch.sampling_rows(inputs)
    assert rows.allowed is not None
    assert (rows.allowed.rows.tolist(), rows.allowed.ids.tolist()) == ([1, 1], [3, 9])
    assert rows.bias is not None
    assert (rows.bias.rows.tolist(), rows.bias.ids.tolist(), rows.bias.values.tolist()) == ([1, 1], [3, 9], [1, -1])
    assert rows.forbidden is not None
    assert (rows.forbidden.rows.tolist(), rows.forbidden.ids.tolist()) == ([1, 1], [0, 5])
    assert rows.penalties is not None
    assert rows.penalties.rows.tolist() == [1, 1, 1]
    assert not rows.plain_greedy
    batch.commit(inputs, [3, 9])
    plan = StepPlan(1, (1, 2), (1, 1), (1, 2), 2)
    batch.apply(plan)
    assert batch.sampling_rows(batch.build(plan)).forbidden is None


def test_stop_tokens_beyond_the_vocabulary_are_not_masked() -> None:
    """An EOS or stop id without a row of logits is dropped when its sequence is placed; the sampler never sees it."""
    batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=4, vocab_size=1000)
    mixed = StoppingParams(max_tokens=10, min_tokens=5, eos_token_ids=(1000, 999), stop_token_ids=(2**31, 7))
    beyond = StoppingParams(max_tokens=10, min_tokens=5, eos_token_ids=(1000,))
    new = (new_sequence(1, 2, (0,), stopping=mixed), new_sequence(2, 2, (1,), stopping=beyond))
    plan = StepPlan(0, (1, 2), (2, 2), (1, 2), 4, new=new)
    batch.apply(plan)
    forbidden = batch.sampling_rows(batch.build(plan)).forbidden
    assert forbidden is not None
    assert (forbidden.rows.tolist(), forbidden.ids.tolist()) == ([0, 0], [7, 999])


def test_without_controls_nothing_is_listed() -> None:
    """A batch of plain greedy sequences is known to be one, so the sampler takes its short way."""
    batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=4, vocab_size=1000)
    plan = StepPlan(0, (1,), (2,), (1,), 2, new=(new_sequence(1, 2, (0,)),))
    batch.apply(plan)
    assert batch.sampling_rows(batch.build(plan)).plain_greedy


def test_a_sequence_cannot_be_new_twice_nor_longer_than_the_context() -> None:
    """Both are our bugs."""
    batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=4, vocab_size=1000)
    batch.apply(StepPlan(0, (), (), (), 0, new=(new_sequence(1, 2, (0,)),)))
    for wrong in (new_sequence(1, 2, (0,)), new_sequence(2, 41, tuple(range(11)))):
        with pytest.raises(AssertionError):
            batch.apply(StepPlan(1, (), (), (), 0, new=(wrong,)))
