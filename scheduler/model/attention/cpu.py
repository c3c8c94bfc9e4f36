"""The fast backend for processors: one compiled call per layer and step, whatever the batch.

What lives here: the pool's memory layout, the cutting of a step into work items, compilation and its cache. What must
not: arithmetic, which is in `cpu_kernel.py` and `simd.py`.

Keys lie dimension by dimension inside a block, values token by token, so that both products of attention run along
vectors without a horizontal sum. Threads are OpenMP's, the same pool that torch's matrix products use (torch's own
libgomp is loaded first and found by its name), where numba finds OpenMP at all.

Compiled code is kept under $EMBERLINE_CACHE/numba (default ~/.cache/emberline/numba), in a folder named after the
kernels' sources; inside, numba keys it by its own version and by the processor. Where nothing can be written, each
process compiles for itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from scheduler.model.attention import cpu_kernel, simd
from scheduler.model.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    Int32Array,
    Int64Array,
    LayerCache,
)

logger = logging.getLogger(__name__)

POOL_KINDS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
"""What tells the kernel the pools' element type, see `simd.POOL_KINDS`."""

PARALLEL_WORK_MIN = 64 * 1024
"""Scores (query rows x tokens seen) in a step's layer below which one thread is faster than waking a second."""


@dataclass(slots=True)
class CpuMetadata(AttentionMetadata):
    """Adds the same as arrays, and the step's work items."""

    arrays: tuple[Int64Array, Int32Array, Int32Array, Int32Array]
    """slot_mapping, query_start_loc, context_lens and block_table, sharing memory with the tensors."""
    items: Int32Array
    """[n, 4]: sequence, KV head, first query, number of queries; the dearest first."""
    num_workers: int


class CpuBackend(AttentionBackend):
    """Key pools of (num_blocks, num_kv_heads, head_dim, block_size), value pools of (num_blocks, num_kv_heads,
    block_size, head_dim padded to whole vectors). An object serves one thread at a time: it owns scratch memory.
    """

    name = "cpu"
    default_block_size = 16

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
        super().__init__(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            block_size=block_size,
            num_threads=num_threads,
        )
        self.num_threads = min(self.num_threads, numba.config.NUMBA_NUM_THREADS)
        self._group_size = num_heads // num_kv_heads
        self._queries_per_item = cpu_kernel.num_item_rows_max(self._group_size) // self._group_size
        self._scratch_stride = cpu_kernel.scratch_size_bytes(self._group_size, head_dim)
        self._scratch = torch.zeros(self.num_threads * self._scratch_stride, dtype=torch.uint8)
        self._counter = torch.zeros(1, dtype=torch.int64)
        self._shape = (num_heads, num_kv_heads, head_dim, self.block_size, dtype.itemsize)
        self._threads_set_for: int | None = None

    @classmethod
    def unsupported_reason(
        cls, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
    ) -> str | None:
        """Any processor numba compiles for; float32, bfloat16, float16; blocks of whole vectors."""
        if device.type != "cpu":
            return f"needs the CPU, not {device.type}"
        if dtype not in POOL_KINDS:
            return f"needs float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        if not 1 <= head_dim <= 512:
            return f"needs a head_dim of at most 512, not {head_dim}"
        if block_size is not None and (block_size < simd.LANES or block_size % simd.LANES != 0):
            return f"needs a block size that is a multiple of {simd.LANES}, not {block_size}"
        return None

    @property
    def num_bytes_per_block(self) -> int:
        """See the base; values are padded to whole vectors."""
        elements = self.head_dim + cpu_kernel.padded(self.head_dim)
        return self.block_size * self.num_kv_heads * elements * self.dtype.itemsize

    def allocate_layer(self, num_blocks: int) -> LayerCache:
        """The zeroed pools of one layer, in the layout of this class."""
        key_shape = (num_blocks, self.num_kv_heads, self.head_dim, self.block_size)
        value_shape = (num_blocks, self.num_kv_heads, self.block_size, cpu_kernel.padded(self.head_dim))
        return LayerCache(torch.zeros(key_shape, dtype=self.dtype), torch.zeros(value_shape, dtype=self.dtype))

    def key_view(self, layer_cache: LayerCache) -> torch.Tensor:
        return layer_cache.key.permute(0, 3, 1, 2)

    def value_view(self, layer_cache: LayerCache) -> torch.Tensor:
        return layer_cache.value[..., : self.head_dim].transpose(1, 2)

    def build_metadata(
        self,
        *,
        query_lens: Int32Array,
        context_lens: Int32Array,
        block_table: Int32Array,
        slot_mapping: Int64Array,
    ) -> CpuMetadata:
        common = super().build_metadata(
            query_lens=query_lens, context_lens=context_lens, block_table=block_table, slot_mapping=slot_mapping
        )
        items, num_scores = self._cut(query_lens, context_lens)
        is_small = num_scores * self.num_kv_heads * self._group_size < PARALLEL_WORK_MIN
        fields = {name: getattr(common, name) for name in AttentionMetadata.__slots__}
        arrays = (common.slot_mapping, common.query_start_loc, common.context_lens, common.block_table)
        return CpuMetadata(
            **fields,
            arrays=tuple(tensor.numpy() for tensor in arrays),  # type: ignore[arg-type]
            items=items,
            num_workers=1 if is_small else max(min(self.num_threads, len(items)), 1),
        )

    def _cut(self, query_lens: Int32Array, context_lens: Int32Array) -> tuple[Int32Array, int]:
        """The step's items, and the number of scores one head computes."""
        size = self._queries_per_item
        num_chunks = -(-query_lens // size)
        seqs = np.repeat(np.arange(len(query_lens)), num_chunks)
        first_queries = (np.arange(len(seqs)) - (np.cumsum(num_chunks) - num_chunks)[seqs]) * size
        num_queries = np.minimum(query_lens[seqs] - first_queries, size)
        num_scores = num_queries * (context_lens[seqs] - query_lens[seqs] + first_queries + num_queries)
        order = np.argsort(-num_scores, kind="stable")
        chunks = np.stack([seqs, np.zeros_like(seqs), first_queries, num_queries], axis=1)[order]
        items = np.repeat(chunks, self.num_kv_heads, axis=0).astype(np.int32)
        items[:, 1] = np.tile(np.arange(self.num_kv_heads, dtype=np.int32), len(chunks))
        return items, int(num_scores.sum())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """One call of the compiled kernel; half precision adds a conversion of each tensor, of the whole row at once."""
        assert isinstance(metadata, CpuMetadata)
        self._limit_threads()
        if self.dtype != torch.float32:
            query, key, value = query.float(), key.float(), value.float()
        output = torch.empty(query.shape, dtype=torch.float32)
        compiled_kernel()(
            POOL_KINDS[self.dtype],
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            layer_cache.key.data_ptr(),
            layer_cache.value.data_ptr(),
            *metadata.arrays,
            metadata.items,
            metadata.num_workers,
            self._scratch.data_ptr(),
            self._scratch_stride,
            self._counter.data_ptr(),
            scale,
            output.data_ptr(),
            self._shape,
        )
        return output if self.dtype == torch.float32 else output.to(self.dtype)

    def _limit_threads(self) -> None:
        """numba keeps the number of threads per calling thread."""
        thread = threading.get_ident()
        if self._threads_set_for != thread:
            numba.set_num_threads(self.num_threads)
            self._threads_set_for = thread

    def warm_up(self) -> None:
        """Compiles the kernel for this dtype, or loads it from the cache, and starts the threads."""
        cache_of_layer = self.allocate_layer(1)
        metadata = self.build_metadata(
            query_lens=np.ones(1, dtype=np.int32),
            context_lens=np.ones(1, dtype=np.int32),
            block_table=np.zeros((1, 1), dtype=np.int32),
            slot_mapping=np.zeros(1, dtype=np.int64),
        )
        metadata.num_workers = min(self.num_threads, self.num_kv_heads)
        query = torch.zeros(1, self.num_heads, self.head_dim, dtype=self.dtype)
        key = torch.zeros(1, self.num_kv_heads, self.head_dim, dtype=self.dtype)
        self.forward(query, key, key, cache_of_layer, metadata, 1.0)


@cache
def compiled_kernel() -> Callable[..., None]:
    """The kernel, compiled at its first call for each dtype; from the on-disk cache where there is one."""
    directory = _cache_directory()
    if directory is not None:
        numba.config.CACHE_DIR = str(directory)
    return numba.njit(parallel=True, nogil=True, cache=directory is not None)(cpu_kernel.attend)


def _cache_directory() -> Path | None:
    """A writable folder for this version of the kernels, or None."""
    root = os.environ.get("EMBERLINE_CACHE") or Path.home() / ".cache" / "emberline"
    sources = b"".join(Path(module.__file__).read_bytes() for module in (simd, cpu_kernel) if module.__file__)
    directory = Path(root) / "numba" / hashlib.sha256(sources).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return None
