"""Makes up steps for attention backends: sequences, block tables, pools full of garbage but for what counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scheduler.model.attention.base import AttentionBackend, AttentionMetadata, Int32Array, Int64Array, LayerCache
from scheduler.model.kv_cache import slot_mapping

POISON_BLOCK_ID = 2**30
"""Stands in block tables past the context: whoever reads there crashes or is caught."""


@dataclass(slots=True)
class Step:
    """One step's inputs, the same for any backend of one block size."""

    query_lens: Int32Array
    context_lens: Int32Array
    block_table: Int32Array
    slots: Int64Array
    num_blocks: int
    block_size: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pool_keys: torch.Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim): the context before the step, NaN everywhere else."""
    pool_values: torch.Tensor
    scale: float

    def prepare(self, backend: AttentionBackend) -> tuple[LayerCache, AttentionMetadata]:
        """The backend's pools filled as described, and its metadata."""
        cache = backend.allocate_layer(self.num_blocks)
        cache.key.fill_(float("nan"))  # padding too, where the layout has any
        cache.value.fill_(float("nan"))
        backend.key_view(cache).copy_(self.pool_keys)
        backend.value_view(cache).copy_(self.pool_values)
        metadata = backend.build_metadata(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_table=self.block_table,
            slot_mapping=self.slots,
        )
        return cache, metadata

    def run(self, backend: AttentionBackend) -> tuple[torch.Tensor, LayerCache]:
        cache, metadata = self.prepare(backend)
        device = backend.device
        tensors = (tensor.to(device) for tensor in (self.query, self.key, self.value))
        output = backend.forward(*tensors, cache, metadata, self.scale)
        return output.cpu(), cache


def make_step(
    lens: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    num_shared_blocks: int = 0,
    seed: int = 0,
) -> Step:
    """`lens`: (query_len, context_len) per sequence, in the order of the row. The first `num_shared_blocks` blocks of
    all sequences are the same ones; no query may lie in them. Blocks lie in the pool in random order, with others.
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens = np.array([query_len for query_len, _ in lens], dtype=np.int32)
    context_lens = np.array([context_len for _, context_len in lens], dtype=np.int32)
    # Slices of one fused projection, as a model hands them over: rows are strided.
    num_tokens = int(query_lens.sum())
    row = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    query, key, value = row.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    num_used = -(-context_lens // block_size)
    num_blocks = int(num_used.sum()) + 3
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    block_table = np.full((len(lens), int(num_used.max()) + 2), POISON_BLOCK_ID, dtype=np.int32)
    shared = [next(free) for _ in range(num_shared_blocks)]
    for seq, count in enumerate(num_used):
        block_table[seq, :count] = [*shared, *(next(free) for _ in range(count - len(shared)))]
    slots = slot_mapping(
        query_lens=query_lens, context_lens=context_lens, block_table=block_table, block_size=block_size
    )
    pool_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    pool_keys = torch.full(pool_shape, float("nan"), dtype=dtype)
    pool_values = torch.full(pool_shape, float("nan"), dtype=dtype)
    for seq, (query_len, context_len) in enumerate(lens):
        positions = np.arange(context_len - query_len)
        past = block_table[seq, positions // block_size].astype(np.int64) * block_size + positions % block_size
        for pool in (pool_keys, pool_values):
            fresh = torch.randn(len(past), num_kv_heads, head_dim, generator=generator).to(dtype)
            pool.flatten(0, 1)[torch.from_numpy(past)] = fresh
    return Step(
        query_lens=query_lens,
        context_lens=context_lens,
        block_table=block_table,
        slots=slots,
        num_blocks=num_blocks,
        block_size=block_size,
        query=query,
        key=key,
        value=value,
        pool_keys=pool_keys,
        pool_values=pool_values,
        scale=head_dim**-0.5 * 1.3,
    )
