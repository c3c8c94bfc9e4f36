"""How likely the tokens of prompts are, for all prompts of a step at once.

What must live here: the slices in which it is done, and the way back from rows to sequences. What must not: which rows
(`input_batch.py`), what a score is (`sampler.py`), how a row gets its logits (`projection.py`).

The slices run over the rows of all prompts together: logits of a bounded number of rows are held at once, and kernels
are called as often as that needs, however many requests the rows belong to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scheduler.core.packed_logprobs import PackedLogprobs
from scheduler.model.input_batch import ScoredRows
from scheduler.model.sampler import ScoredTokens, score
from scheduler.model.threads import single_threaded

PROMPT_LOGITS_MAX = 1 << 22
"""Logits that are held at once: 16 MB in float32, 85 rows of the default model."""


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """What a step found, by the place of each sequence in its batch."""

    logprobs: Mapping[int, PackedLogprobs] = field(default_factory=dict)
    non_finite: Sequence[int] = ()
    """Sequences with a row that held NaN or +inf, or nothing but -inf; they have no logprobs."""


def score_prompts(
    project: Callable[[torch.Tensor], torch.Tensor], rows: ScoredRows, *, vocab_size: int, device: torch.device
) -> ScoredPrompts:
    """`project`: positions in the flat row [R] → float32 logits [R, V], on `device`."""
    num_top = int(rows.num_top.max())
    num_rows_max = max(1, PROMPT_LOGITS_MAX // vocab_size)
    packed = torch.from_numpy(np.stack([rows.rows, rows.next_token_ids])).to(device)
    parts = []
    for start in range(0, packed.shape[1], num_rows_max):
        positions, next_token_ids = packed[:, start : start + num_rows_max]
        logits = project(positions)
        with single_threaded():
            parts.append(score(logits, next_token_ids, num_top))
        del logits  # before the next ones are made
    return _by_sequence(rows, parts)


def _by_sequence(rows: ScoredRows, parts: Sequence[ScoredTokens]) -> ScoredPrompts:
    logprobs = torch.cat([part.logprobs for part in parts]).cpu().numpy()
    ranks = torch.cat([part.ranks for part in parts]).int().cpu().numpy()
    top_token_ids = torch.cat([part.top_token_ids for part in parts]).int().cpu().numpy()
    top_logprobs = torch.cat([part.top_logprobs for part in parts]).cpu().numpy()
    found: dict[int, PackedLogprobs] = {}
    non_finite: list[int] = []
    ends = np.cumsum(rows.lengths)
    for sequence, start, end, num_top in zip(rows.sequences, ends - rows.lengths, ends, rows.num_top, strict=True):
        if np.isnan(logprobs[start:end]).any():
            non_finite.append(int(sequence))
            continue
        found[int(sequence)] = PackedLogprobs(
            num_top=min(int(num_top), top_token_ids.shape[1]),
            logprobs=array("f", logprobs[start:end].tobytes()),
            ranks=array("i", ranks[start:end].tobytes()),
            top_token_ids=array("i", top_token_ids[start:end, :num_top].tobytes()),
            top_logprobs=array("f", top_logprobs[start:end, :num_top].tobytes()),
        )
    return ScoredPrompts(found, non_finite)
