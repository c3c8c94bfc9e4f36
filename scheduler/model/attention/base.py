"""The contract between the model runner and whatever computes attention over the paged KV pool.

What lives here: the backend's interface, the metadata of one step, the pools of one layer. What must not: kernels,
anything of one backend, imports of numba or flash_attn. Backends are held to one contract test
(`tests/model/attention/test_contract.py`) against `reference.py`.

A step is one flat row of T tokens that belong to B sequences, in any order: `query_lens[b]` tokens of sequence b
(1 for a decode, more for a chunk of a prompt) follow those of sequence b-1. After the step sequence b has
`context_lens[b]` tokens in the pool, the step's own included. Token t of the row is stored at slot
`slot_mapping[t] = block_id * block_size + offset`. Query i of sequence b (0-based in the step) attends to positions
0 … context_lens[b] - query_lens[b] + i: causal, aligned to the bottom right. Nothing beyond that is ever used: not
the unused slots of a block, not the entries of a block table past the context, whatever they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LayerCache(NamedTuple):
    """The pools of one layer, in the backend's own memory layout (`key_view` and `value_view` hide it)."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """What the attention of every layer needs to know of one step, on the backend's device.

    Backends may extend it; the runner treats it as opaque.
    """

    num_seqs: int
    """B."""
    num_tokens: int
    """T, the sum of the query lengths."""
    max_query_len: int
    max_context_len: int
    query_start_loc: torch.Tensor
    """int32 [B + 1]: where each sequence's tokens begin in the flat row; the last entry is T."""
    context_lens: torch.Tensor
    """int32 [B]: tokens in the pool after this step."""
    block_table: torch.Tensor
    """int32 [B, max_blocks]; entries past a sequence's context are never read."""
    slot_mapping: torch.Tensor
    """int64 [T]: the pool slot of each token of the row, all distinct."""


class AttentionBackend(ABC):
    """Writes a step's keys and values into a layer's pool and attends causally over each sequence's paged context.

    One object serves all layers of a model; it holds no state of a step. Grouped-query attention (Ainslie et al.
    2023): query head h reads KV head `h // (num_heads // num_kv_heads)`.
    """

    name: ClassVar[str]
    default_block_size: ClassVar[int]

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """`block_size`: tokens per KV block, None for the backend's choice. `num_threads`: compute threads on a CPU,
        None for torch's own setting; meaningless on a GPU.

        Raises ValueError where `unsupported_reason` would have told why.
        """
        block_size = self.default_block_size if block_size is None else block_size
        reason = self.unsupported_reason(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size)
        if reason is not None:
            raise ValueError(f"attention backend {self.name}: {reason}")
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads

    @classmethod
    @abstractmethod
    def unsupported_reason(
        cls, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
    ) -> str | None:
        """None if the backend can run here with these values, else why not, in one line."""

    @classmethod
    def preload(cls) -> None:
        """Loads what needs neither a model nor a device nor threads: a process kept in reserve has it behind it."""
        return

    @property
    def num_bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate_layer(self, num_blocks: int) -> LayerCache:
        """The zeroed pools of one layer, (num_blocks, block_size, num_kv_heads, head_dim) each unless overridden."""
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        key = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return LayerCache(key, torch.zeros_like(key))

    def key_view(self, layer_cache: LayerCache) -> torch.Tensor:
        """The layer's keys seen as (num_blocks, block_size, num_kv_heads, head_dim), whatever the memory layout."""
        return layer_cache.key

    def value_view(self, layer_cache: LayerCache) -> torch.Tensor:
        """The layer's values seen as (num_blocks, block_size, num_kv_heads, head_dim), whatever the memory layout."""
        return layer_cache.value

    def build_metadata(
        self,
        *,
        query_lens: Int32Array,
        context_lens: Int32Array,
        block_table: Int32Array,
        slot_mapping: Int64Array,
    ) -> AttentionMetadata:
        """Prepares one step, once for all layers.

        `query_lens` [B], each at least 1; `context_lens` [B] = computed before + query_lens; `block_table`
        [B, max_blocks], row b filled for the first ceil(context_lens[b] / block_size) entries; `slot_mapping` [T].
        The arrays may be reused by the caller as soon as this returns.
        """
        query_start_loc = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        return AttentionMetadata(
            num_seqs=len(query_lens),
            num_tokens=int(query_start_loc[-1]),
            max_query_len=int(query_lens.max(initial=0)),
            max_context_len=int(context_lens.max(initial=0)),
            query_start_loc=torch.from_numpy(query_start_loc).to(self.device),
            context_lens=self._to_device(context_lens),
            block_table=self._to_device(block_table),
            slot_mapping=self._to_device(slot_mapping),
        )

    def _to_device(self, array: Int32Array | Int64Array) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one layer: softmax(scale * Q K^T + causal mask) V (Vaswani et al. 2017).

        `query` [T, num_heads, head_dim], `key` and `value` [T, num_kv_heads, head_dim], of the backend's dtype; rows
        may be strided (slices of one fused projection) at no cost; other layouts may be copied. Writes all keys and
        values before it reads any. Returns a fresh contiguous tensor [T, num_heads, head_dim].
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compiles and loads everything that a step may need, so that nothing is left for after READY."""
