"""The oracle: attention as the formula says it, one sequence after another, in float64 for float32 models.

What must not live here: anything done for speed. The other backends' tests are only as good as this file is obvious.
"""

from __future__ import annotations

import torch

from scheduler.model.attention.base import AttentionBackend, AttentionMetadata, LayerCache


class ReferenceBackend(AttentionBackend):
    """Runs everywhere, slowly: its calls grow with the batch."""

    name = "reference"
    default_block_size = 16

    @classmethod
    def unsupported_reason(
        cls,
        *,
        device: torch.device,  # noqa: ARG003 - any will do
        dtype: torch.dtype,
        head_dim: int,  # noqa: ARG003 - any will do
        block_size: int | None = None,
    ) -> str | None:
        """Any device, head_dim and positive block size; float32, bfloat16 or float16."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"needs float32, bfloat16 or float16, not {dtype}"
        if block_size is not None and block_size < 1:
            return f"needs a positive block size, not {block_size}"
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """softmax(scale * Q K^T + mask) V, computed in float64 and rounded once."""
        layer_cache.key.flatten(0, 1)[metadata.slot_mapping] = key
        layer_cache.value.flatten(0, 1)[metadata.slot_mapping] = value
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = metadata.query_start_loc.tolist()
        for seq, context_len in enumerate(metadata.context_lens.tolist()):
            num_blocks = -(-context_len // self.block_size)
            block_ids = metadata.block_table[seq, :num_blocks].long()
            rows = slice(starts[seq], starts[seq + 1])
            output[rows] = self._attend_one(
                query[rows].double(),
                layer_cache.key[block_ids].flatten(0, 1)[:context_len].double(),
                layer_cache.value[block_ids].flatten(0, 1)[:context_len].double(),
                scale,
            ).to(query.dtype)
        return output

    def warm_up(self) -> None:
        """Nothing to compile."""

    def _attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """[q, num_heads, d] over [c, num_kv_heads, d] twice → [q, num_heads, d]."""
        group_size = self.num_heads // self.num_kv_heads
        key = key.repeat_interleave(group_size, dim=1)
        value = value.repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,chd->hqc", query, key) * scale
        num_queries, context_len = query.shape[0], key.shape[0]
        last_visible = torch.arange(num_queries, device=query.device) + context_len - num_queries
        hidden = torch.arange(context_len, device=query.device)[None, :] > last_visible[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqc,chd->qhd", weights, value)
