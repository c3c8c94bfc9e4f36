"""Flash attention (Dao et al. 2022; Dao 2023) over the paged pool, on CUDA.

The only module that may import flash_attn. Where that package is missing, PyTorch's own
`torch.nn.attention.varlen` runs the same kernels. Prefill chunks and decodes go through one varlen call per layer:
its number of kernel launches does not depend on the batch, and a decode gives the same bits as a chunk of one token.

Law: everything the kernels are told lies in the metadata, built once a step; `forward` makes no tensor but its output
and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np
import torch

from scheduler.model.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    Int32Array,
    Int64Array,
    LayerCache,
)

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

varlen: ModuleType | None
try:
    varlen = import_module("torch.nn.attention.varlen")
except ImportError:
    varlen = None

FULL_CONTEXT = -1
"""As a window's left side: no bound."""


@dataclass(slots=True)
class FlashMetadata(AttentionMetadata):
    """Adds what the varlen kernels want in their own form."""

    key_start_loc: torch.Tensor
    """int32 [B + 1]: running sum of the context lengths, as if keys were packed."""


class FlashBackend(AttentionBackend):
    """Pools of shape (num_blocks, block_size, num_kv_heads, head_dim), as flash-attn pages them."""

    name = "flash"
    default_block_size = 256  # flash-attn 2 pages in multiples of 256 tokens

    @classmethod
    def unsupported_reason(
        cls, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
    ) -> str | None:
        """The documented limits of flash-attn 2: CUDA from compute capability 8.0, half precision, head_dim, paging."""
        if flash_attn_varlen_func is None and varlen is None:
            return "needs the package flash-attn (extra `cuda`) or torch 2.12 or later"
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs a GPU of compute capability 8.0 (Ampere) or later"
        return cls._unsupported_shape(dtype, head_dim, block_size)

    @classmethod
    def _unsupported_shape(cls, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim > 256 or head_dim % 8 != 0:
            return f"needs a head_dim that is a multiple of 8 and at most 256, not {head_dim}"
        if block_size is not None and (block_size < 256 or block_size % 256 != 0):
            return f"needs a block size that is a multiple of 256, not {block_size}"
        return None

    def build_metadata(
        self,
        *,
        query_lens: Int32Array,
        context_lens: Int32Array,
        block_table: Int32Array,
        slot_mapping: Int64Array,
    ) -> FlashMetadata:
        """See the base. Every entry of the table past a context becomes 0: a kernel may load it, though not use it."""
        num_used_blocks = -(-context_lens // self.block_size)
        unused = np.arange(block_table.shape[1])[None, :] >= num_used_blocks[:, None]
        common = super().build_metadata(
            query_lens=query_lens,
            context_lens=context_lens,
            block_table=np.where(unused, np.int32(0), block_table),
            slot_mapping=slot_mapping,
        )
        key_start_loc = np.zeros(len(context_lens) + 1, dtype=np.int32)
        np.cumsum(context_lens, out=key_start_loc[1:])
        fields = {name: getattr(common, name) for name in AttentionMetadata.__slots__}
        return FlashMetadata(**fields, key_start_loc=torch.from_numpy(key_start_loc).to(self.device))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Two index_copy_ and one attention call, whatever the batch."""
        assert isinstance(metadata, FlashMetadata)
        layer_cache.key.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key)
        layer_cache.value.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value)
        if flash_attn_varlen_func is not None:
            return self._forward_flash_attn(query, layer_cache, metadata, scale)
        return self._forward_torch(query, layer_cache, metadata, scale)

    def _forward_flash_attn(
        self, query: torch.Tensor, layer_cache: LayerCache, metadata: FlashMetadata, scale: float
    ) -> torch.Tensor:
        """With a block table, k and v are the pools and the context lengths come from cu_seqlens_k."""
        return flash_attn_varlen_func(
            query,
            layer_cache.key,
            layer_cache.value,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=metadata.key_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=metadata.block_table,
        )

    def _forward_torch(
        self, query: torch.Tensor, layer_cache: LayerCache, metadata: FlashMetadata, scale: float
    ) -> torch.Tensor:
        """torch's default window is not causal; one split keeps a sequence's result independent of its neighbours."""
        assert varlen is not None
        output = varlen.varlen_attn(
            query,
            layer_cache.key,
            layer_cache.value,
            metadata.query_start_loc,
            metadata.key_start_loc,  # only its shape counts: seqused_k bounds the contexts
            metadata.max_query_len,
            metadata.max_context_len,
            scale=scale,
            window_size=(FULL_CONTEXT, 0),
            enable_gqa=self.num_heads != self.num_kv_heads,
            seqused_k=metadata.context_lens,
            block_table=metadata.block_table,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor)
        return output

    def warm_up(self) -> None:
        """Runs a decode and a chunk once: the first call loads the kernels' module onto the device."""
        cache = self.allocate_layer(num_blocks=1)
        for query_len in (1, 2):
            metadata = self.build_metadata(
                query_lens=np.full(1, query_len, dtype=np.int32),
                context_lens=np.full(1, 2, dtype=np.int32),
                block_table=np.zeros((1, 1), dtype=np.int32),
                slot_mapping=np.arange(2 - query_len, 2),
            )
            query = torch.zeros(query_len, self.num_heads, self.head_dim, dtype=self.dtype, device=self.device)
            key = query[:, : self.num_kv_heads]
            self.forward(query, key, key, cache, metadata, 1.0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
