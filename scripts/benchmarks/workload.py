"""What is sent. Pure: the same arguments give the same requests, on every machine and version of Python.

Lengths come from the seed alone, so that every run of a benchmark has the same work to do. The prompts' ids come from
the seed and a label (such as the concurrency): two runs against one server share no prefix that its cache could hold.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

from scripts.benchmarks.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request; it ends at `num_output_tokens` and nowhere else."""

    prompt_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests, and between which lengths (both ends included)."""

    seed: int = 0
    num_requests: int = 96
    prompt_tokens_min: int = 16
    prompt_tokens_max: int = 512
    output_tokens_min: int = 16
    output_tokens_max: int = 256


def lengths(workload: Workload) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request, in the order they are sent."""
    rng = _rng(workload.seed, "lengths")
    return [
        (
            log_uniform(rng, workload.prompt_tokens_min, workload.prompt_tokens_max),
            log_uniform(rng, workload.output_tokens_min, workload.output_tokens_max),
        )
        for _ in range(workload.num_requests)
    ]


def requests(workload: Workload, label: str, vocab: range, avoid: Collection[int] = ()) -> list[Request]:
    """The requests themselves; ids are uniform over `vocab` less `avoid`."""
    avoided = frozenset(avoid)
    ids = [token_id for token_id in vocab if token_id not in avoided]
    if not ids:
        raise BenchmarkError("the vocabulary has no ids left to make prompts of")
    rng = _rng(workload.seed, f"ids {label}")
    return [
        Request(tuple(rng.choices(ids, k=num_prompt_tokens)), num_output_tokens)
        for num_prompt_tokens, num_output_tokens in lengths(workload)
    ]


def plain_ids(vocab_size: int) -> range:
    """Ids that are words and pieces of words in any vocabulary that was learnt by merging.

    The server does not tell which ids are control tokens. Tokenizers keep those, and the single bytes, at either end,
    so the outer tenths are left out.
    """
    return range(vocab_size // 10, vocab_size - vocab_size // 10)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer in [low, high]: as likely to lie between 16 and 32 as between 256 and 512."""
    value = int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))
    return min(max(value, low), high)  # exp(log(x)) may miss x by a rounding


def _rng(seed: int, purpose: str) -> random.Random:
    # Seeding with a string hashes it with SHA-512: no two purposes share a sequence.
    return random.Random(f"{seed} {purpose}")  # noqa: S311 no secret depends on it
