"""What guides do to rows of logits: their bits, their place in the order of operations, and nothing to other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.noise import position_keys, sequence_key
from scheduler.model.sampler import BiasList, GuideMask, SamplingRows, TokenList, sample

VOCAB_SIZE = 70
"""Not a multiple of 32."""


def rows_of(num: int, *, temperature: float = 0.0, **fields: Any) -> SamplingRows:
    keys = np.array([sequence_key(row, 0) for row in range(num)], dtype=np.uint64)
    return SamplingRows(
        temperature=np.full(num, temperature),
        top_k=np.zeros(num, dtype=np.int64),
        top_p=np.ones(num),
        min_p=np.zeros(num),
        num_logprobs=np.full(num, -1),
        keys=position_keys(keys, np.arange(num)),
        **fields,
    )


def mask_of(allowed: dict[int, set[int]]) -> GuideMask:
    """row → allowed ids."""
    bits = np.zeros((len(allowed), 96), dtype=np.uint8)
    for place, token_ids in enumerate(allowed.values()):
        bits[place, list(token_ids)] = 1
    bits[:, VOCAB_SIZE:] = 1  # beyond the vocabulary anything may stand
    return GuideMask(np.array(list(allowed)), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def logits_of(num: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((num, VOCAB_SIZE)).astype(np.float32))


@given(
    allowed=st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1), min_size=1),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_only_what_is_allowed_is_sampled_and_other_rows_are_as_they_were(
    allowed: dict[int, set[int]], temperature: float
) -> None:
    """Whichever rows have guides, and however they are sampled."""
    allowed = dict(sorted(allowed.items()))
    alone = sample(logits_of(4), rows_of(4, temperature=temperature)).token_ids
    sampled = sample(logits_of(4), rows_of(4, temperature=temperature, guide=mask_of(allowed)))
    assert sampled.emptied == ()
    for row, token_id in enumerate(sampled.token_ids):
        if row in allowed:
            assert token_id in allowed[row]
        else:
            assert token_id == alone[row]
    if temperature == 0:
        for row, token_ids in allowed.items():
            assert sampled.token_ids[row] == max(token_ids, key=lambda token_id: logits_of(4)[row, token_id].item())


def test_a_guide_and_allowed_token_ids_are_both_kept() -> None:
    """Neither lets through what the other bars, and no bias brings it back."""
    rows = rows_of(
        1,
        guide=mask_of({0: {3, 4, 5}}),
        allowed=TokenList(np.array([0, 0, 0]), np.array([4, 5, 6])),
        bias=BiasList(np.array([0, 0]), np.array([3, 6]), np.array([100.0, 100.0])),
    )
    assert sample(logits_of(1), rows).token_ids[0] in {4, 5}


def test_rows_whose_controls_leave_nothing_are_told_from_those_that_are_not_finite() -> None:
    """Both give −1; only the first is in `emptied`."""
    logits = logits_of(3)
    logits[1, 7] = torch.nan
    rows = rows_of(
        3,
        guide=mask_of({0: {3}, 1: {3}, 2: {3}}),
        forbidden=TokenList(np.array([0]), np.array([3])),
    )
    sampled = sample(logits, rows)
    assert sampled.token_ids == [-1, -1, 3]
    assert sampled.emptied == (0,)


@pytest.mark.gpu
def test_a_gpu_unpacks_the_same_bits() -> None:
    """It does so with shifts, where a CPU has a kernel of numpy's."""
    mask = mask_of({0: {0, 31, 32, VOCAB_SIZE - 1}, 2: set(range(1, VOCAB_SIZE, 3))})
    here = sample(logits_of(3), rows_of(3, temperature=1.0, guide=mask)).token_ids
    there = sample(logits_of(3).cuda(), rows_of(3, temperature=1.0, guide=mask)).token_ids
    assert here == there
