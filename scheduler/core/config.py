"""The bounds a scheduler works within. Made by the engine from what the runner measured; plain ints only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The bounds a scheduler works within."""

    max_num_seqs: int
    """Sequences in one step at most."""
    max_num_batched_tokens: int
    """Tokens in one step at most (the budget); at least `max_num_seqs`."""
    max_model_len: int
    """Prompt + output tokens of one sequence at most."""
    block_size: int
    """Tokens per KV block."""
    num_kv_blocks: int
    """Blocks in the pool."""
    enable_prefix_caching: bool = True
