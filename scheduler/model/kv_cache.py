"""The paged KV pool: one pair of tensors per layer, cut into blocks that the scheduler hands out by number.

What lives here: allocation, sizes in bytes, slot arithmetic. What must not: who holds which block (that is
`scheduler/core/block_pool.py`), or the memory layout inside a block (that is the backend's).
"""

from __future__ import annotations

import numpy as np

from scheduler.model.attention.base import AttentionBackend, Int32Array, Int64Array, LayerCache

NUM_SCRATCH_BLOCKS = 1
"""In every pool beside those that the scheduler hands out: what `ModelRunner.probe` computes in, so that it disturbs
nobody."""


class PagedKVCache:
    """Pools of `num_layers` layers with `num_blocks` blocks each for sequences, and the scratch block after them.

    Memory is claimed by the constructor, once.
    """

    def __init__(self, backend: AttentionBackend, *, num_layers: int, num_blocks: int) -> None:
        """Raises torch's out-of-memory errors where the device cannot hold the pools."""
        if num_layers < 1 or num_blocks < 1:
            raise ValueError(f"a KV pool needs layers and blocks, not {num_layers} and {num_blocks}")
        self.block_size = backend.block_size
        self.num_blocks = num_blocks
        self.scratch_block_id = num_blocks
        self.layers: tuple[LayerCache, ...] = tuple(
            backend.allocate_layer(num_blocks + NUM_SCRATCH_BLOCKS) for _ in range(num_layers)
        )


def num_bytes_per_block(backend: AttentionBackend, num_layers: int) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    return backend.num_bytes_per_block * num_layers


def slot_mapping(
    *, query_lens: Int32Array, context_lens: Int32Array, block_table: Int32Array, block_size: int
) -> Int64Array:
    """The pool slots of a step's tokens: int64 [sum of query_lens], in the order of the flat row.

    The token at position p of sequence b is stored at `block_table[b, p // block_size] * block_size +
    p % block_size`. A step computes positions context_lens[b] - query_lens[b] … context_lens[b] - 1.
    """
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    row_starts = np.cumsum(query_lens, dtype=np.int64) - query_lens
    offsets = np.arange(len(rows), dtype=np.int64) - row_starts[rows]
    positions = (context_lens - query_lens).astype(np.int64)[rows] + offsets
    return block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
