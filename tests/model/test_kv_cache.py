"""The paged pool: its size in bytes is what it takes, its slots are where tokens go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.model.attention.cpu import CpuBackend
from scheduler.model.attention.reference import ReferenceBackend
from scheduler.model.kv_cache import NUM_SCRATCH_BLOCKS, PagedKVCache, num_bytes_per_block, slot_mapping


@pytest.mark.parametrize("backend_class", [CpuBackend, ReferenceBackend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_bytes_are_counted_as_allocated(
    backend_class: type[CpuBackend | ReferenceBackend], dtype: torch.dtype, head_dim: int
) -> None:
    """`num_bytes_per_block` is what the tensors of all layers take, padding and the scratch block included."""
    backend = backend_class(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=torch.device("cpu"), block_size=16
    )
    cache = PagedKVCache(backend, num_layers=3, num_blocks=5)
    taken = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert len(cache.layers) == 3
    assert taken == (5 + NUM_SCRATCH_BLOCKS) * num_bytes_per_block(backend, num_layers=3)
    assert not any(bool(tensor.any()) for layer in cache.layers for tensor in layer)


def test_a_pool_without_blocks_is_refused() -> None:
    backend = ReferenceBackend(num_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="needs layers and blocks"):
        PagedKVCache(backend, num_layers=1, num_blocks=0)


def test_slots_follow_the_block_table() -> None:
    """Each token of the flat row goes to its position's block and offset."""
    slots = slot_mapping(
        query_lens=np.array([1, 3, 2], dtype=np.int32),
        context_lens=np.array([5, 3, 6], dtype=np.int32),
        block_table=np.array([[7, 2], [4, -1], [0, 9]], dtype=np.int32),
        block_size=4,
    )
    assert slots.dtype == np.int64
    assert slots.tolist() == [2 * 4 + 0, 16, 17, 18, 9 * 4 + 0, 9 * 4 + 1]
