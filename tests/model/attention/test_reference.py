"""The oracle itself, against torch's attention over the same tokens laid out in one piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from scheduler.model.attention.reference import ReferenceBackend
from scheduler.model.kv_cache import slot_mapping


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_prompt_in_any_chunks_equals_causal_attention(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    """A prompt computed in one chunk, in three, or token by token gives torch's causal attention, row for row."""
    length, head_dim = 45, 32
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(length, num_heads, head_dim, generator=generator)
    key, value = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
    expected = scaled_dot_product_attention(
        *(tensor.double().transpose(0, 1)[None] for tensor in (query, key, value)),
        is_causal=True,
        scale=0.2,
        enable_gqa=True,
    )[0].transpose(0, 1)
    backend = ReferenceBackend(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=block_size,
    )
    block_table = np.random.default_rng(0).permutation(-(-length // block_size)).astype(np.int32)[None, :]
    for sizes in ([45], [16, 16, 13], [1] * 45):
        cache = backend.allocate_layer(block_table.shape[1])
        done, outputs = 0, []
        for size in sizes:
            rows = slice(done, done + size)
            done += size
            lens = {
                "query_lens": np.array([size], dtype=np.int32),
                "context_lens": np.array([done], dtype=np.int32),
                "block_table": block_table,
            }
            metadata = backend.build_metadata(**lens, slot_mapping=slot_mapping(**lens, block_size=block_size))
            outputs.append(backend.forward(query[rows], key[rows], value[rows], cache, metadata, 0.2))
        torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=1e-6, atol=1e-7)
