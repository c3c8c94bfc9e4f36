"""Every backend computes what the reference computes and touches only what it may.

`flash` runs on stand-ins for its kernels where there is no GPU (see `flash_stand_in.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scheduler.model.attention.reference import ReferenceBackend
from tests.model.attention.conftest import Candidate
from tests.model.attention.steps import Step, make_step

SHAPES = {
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "MHA": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
    "MQA": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    "group of 7": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80},
    "narrow": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    "wide": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 256},
}

Lens = list[tuple[int, int]]
STEPS: dict[str, Callable[[int], Lens]] = {
    "one-token prompt": lambda _: [(1, 1)],
    "decodes at block boundaries": lambda b: [(1, n) for n in (b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 1)],
    "decodes at tile boundaries": lambda _: [(1, n) for n in (15, 16, 17, 63, 64, 65, 127, 128, 129)],
    "whole prompts": lambda b: [(n, n) for n in (2, b, b + 1, 2 * b + 5, 70)],
    "chunks": lambda b: [(b, 2 * b), (7, 2 * b + 7), (1, b + 1), (40, 3 * b + 1)],
    "mixed, in any order": lambda b: [(1, 3 * b), (50, 50), (1, 1), (9, b + 9), (1, 130), (65, 2 * b + 65), (1, 2)],
}

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    # One unit in the last place: the reference rounds a result of float64, the others one of float32.
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-12},
    torch.float16: {"rtol": 2**-10, "atol": 2**-14},
}


def reference_for(step: Step, shape: dict[str, int]) -> ReferenceBackend:
    return ReferenceBackend(**shape, dtype=step.key.dtype, device=torch.device("cpu"), block_size=step.block_size)


def check_step(candidate: Candidate, shape: dict[str, int], lens: Lens, **options: int) -> None:
    step = make_step(lens, **shape, dtype=candidate.dtype, block_size=candidate.block_size, **options)
    backend = candidate.make(**shape, dtype=candidate.dtype, block_size=candidate.block_size)
    output, cache = step.run(backend)
    expected, expected_cache = step.run(reference_for(step, shape))
    assert output.dtype == candidate.dtype
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, **TOLERANCES[candidate.dtype])
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(backend.key_view(cache).cpu(), expected_cache.key, **exact)
    torch.testing.assert_close(backend.value_view(cache).cpu(), expected_cache.value, **exact)


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_every_kind_of_step_gives_the_reference_result(candidate: Candidate, lens: Callable[[int], Lens]) -> None:
    """Attention is right, the step's keys and values are in the pool to the bit, all else in the pool is as it was;
    NaN in unused slots and blocks, and block ids out of range past the context, change nothing."""
    check_step(candidate, SHAPES["SmolLM2"], lens(candidate.block_size))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_of_heads_gives_the_reference_result(candidate: Candidate, shape: dict[str, int]) -> None:
    """MHA, GQA and MQA, groups that fill no register tile, head dims that fill no vector."""
    check_step(candidate, shape, STEPS["mixed, in any order"](candidate.block_size), seed=1)


def test_sequences_may_share_blocks(candidate: Candidate) -> None:
    """A prefix held once is read by all that share it."""
    b = candidate.block_size
    lens = [(1, 2 * b + 1), (5, 2 * b + 5), (1, 3 * b), (b, 3 * b)]
    check_step(candidate, SHAPES["SmolLM2"], lens, num_shared_blocks=2)


def test_inputs_may_be_transposed(candidate: Candidate) -> None:
    """Heads before tokens in memory, as transformers' modules may leave them, give the same bits."""
    shape = SHAPES["SmolLM2"]
    step = make_step([(1, 70), (20, 90)], **shape, dtype=candidate.dtype, block_size=candidate.block_size)
    backend = candidate.make(**shape, dtype=candidate.dtype, block_size=candidate.block_size)
    expected, _ = step.run(backend)
    for name in ("query", "key", "value"):
        setattr(step, name, getattr(step, name).transpose(0, 1).contiguous().transpose(0, 1))
    output, _ = step.run(backend)
    assert torch.equal(output, expected)


def test_an_extreme_score_stays_finite(candidate: Candidate) -> None:
    """Scores far beyond exp's range, of either sign, give the softmax's limit and no NaN."""
    step = make_step(
        [(1, 70), (20, 90)], **SHAPES["MHA"], dtype=candidate.dtype, block_size=candidate.block_size, seed=3
    )
    step.query, step.scale = step.query * 100, 10.0
    backend = candidate.make(**SHAPES["MHA"], dtype=candidate.dtype, block_size=candidate.block_size)
    output, _ = step.run(backend)
    assert bool(output.isfinite().all())
    expected, _ = step.run(reference_for(step, SHAPES["MHA"]))
    # Scores near 10^4 in float32 differ by 1e-3 from those in float64.
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_a_sequence_of_nan_harms_itself_alone(candidate: Candidate) -> None:
    """NaN in one sequence's query or context shows in its own rows and in no other's."""
    shape = SHAPES["SmolLM2"]
    step = make_step(
        [(1, 40), (1, 40), (20, 40), (1, 70)], **shape, dtype=candidate.dtype, block_size=candidate.block_size
    )
    backend = candidate.make(**shape, dtype=candidate.dtype, block_size=candidate.block_size)
    clean, _ = step.run(backend)
    step.query[0] = float("nan")
    step.value[22] = float("nan")  # of the decode of the last sequence
    dirty, _ = step.run(backend)
    assert bool(dirty[0].isnan().all())
    assert bool(dirty[22].isnan().all())
    assert torch.equal(dirty[1:22], clean[1:22])
