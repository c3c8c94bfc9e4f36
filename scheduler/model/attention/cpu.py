"""The fast backend for processors: one compiled call per layer and step, whatever the batch.

What lives here: the pool's memory layout, the cutting of a step into work items, compilation. What must
not: arithmetic, which is in `cpu_kernel.py` and `simd.py`.

Keys lie dimension by dimension inside a block, values token by token, so that both products of attention run along
vectors without a horizontal sum.

Threads are those of torch's matrix products: the kernels run in a parallel region of the OpenMP library that torch has
loaded, entered as compiled code enters it. numba's own layer would find the system's copy of that library, a second
pool whose threads spin against the first, and would reset torch's number of threads; or none, and start its own.

Compiled code is kept from start to start (`kernel_cache.py`).
"""

from __future__ import annotations

import ctypes
import logging
import math
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite.binding import get_host_cpu_features

from scheduler.model import kernel_cache
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

SCORES_PARALLEL_MIN = 8192
"""Scores (queries x heads x tokens seen) of a layer below which one thread does the work. A second one pays from about
2,000 on an idle machine (20 µs of work); where another process has its core, waiting for it costs milliseconds.
"""
TOKENS_PARALLEL_MIN = 64
"""Tokens of a step below which one thread writes all keys and values."""

CACHE_LINE_BYTES = 64
PACK_CALL = struct.Struct(f"={len(cpu_kernel.CALL.fields or ()) - 1}qd")


@dataclass(slots=True)
class CpuMetadata(AttentionMetadata):
    """Adds the step's work items."""

    items: Int32Array
    """[n, 4]: sequence, KV head, first query, number of queries; the dearest first."""
    num_threads: int
    """How many are worth waking."""
    packed: tuple[int, ...]
    """The step's part of `cpu_kernel.CALL`, from `num_tokens` to `num_items`."""


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
        group_size = num_heads // num_kv_heads
        self._queries_per_item = cpu_kernel.num_item_rows_max(group_size) // group_size
        scratch_stride = cpu_kernel.scratch_size_bytes(group_size, head_dim)
        self._scratch = torch.zeros(self.num_threads * scratch_stride, dtype=torch.uint8)
        self._counters = np.zeros(3 * CACHE_LINE_BYTES // 8, dtype=np.int64)
        self._counter_addresses = [self._counters.ctypes.data + i * CACHE_LINE_BYTES for i in range(3)]
        self._call = ctypes.create_string_buffer(PACK_CALL.size)
        self._packed = (
            *(num_heads, num_kv_heads, head_dim, self.block_size, dtype.itemsize),
            *(self._scratch.data_ptr(), scratch_stride),
        )

    @classmethod
    def unsupported_reason(
        cls, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
    ) -> str | None:
        """Any processor numba compiles for; float32, bfloat16, float16; blocks of whole vectors."""
        if device.type != "cpu":
            return f"needs the CPU, not {device.type}"
        if dtype not in POOL_KINDS:
            return f"needs float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        if dtype == torch.float16 and not _converts_half_precision():
            return "needs a processor that converts float16 (F16C, in x86 since 2012)"
        if not 1 <= head_dim <= 512:
            return f"needs a head_dim of at most 512, not {head_dim}"
        if block_size is not None and (block_size < simd.LANES or block_size % simd.LANES != 0):
            return f"needs a block size that is a multiple of {simd.LANES}, not {block_size}"
        return None

    @classmethod
    def preload(cls) -> None:
        """The kernels of float32, which is what `auto` means on a CPU."""
        compiled_kernels(torch.float32)

    @property
    def num_bytes_per_block(self) -> int:
        """See the base; values are padded to whole vectors."""
        elements = self.head_dim + cpu_kernel.padded(self.head_dim)
        return self.block_size * self.num_kv_heads * elements * self.dtype.itemsize

    def allocate_layer(self, num_blocks: int) -> LayerCache:
        """The zeroed pools of one layer, in the layout of this class."""
        key_shape = (num_blocks, self.num_kv_heads, self.head_dim, self.block_size)
        value_shape = (num_blocks, self.num_kv_heads, self.block_size, cpu_kernel.padded(self.head_dim))
        return LayerCache(_zeros_in_large_pages(key_shape, self.dtype), _zeros_in_large_pages(value_shape, self.dtype))

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
        is_small = num_scores * self.num_heads < SCORES_PARALLEL_MIN
        fields = {name: getattr(common, name) for name in AttentionMetadata.__slots__}
        return CpuMetadata(
            **fields,
            items=items,
            num_threads=1 if is_small else min(self.num_threads, len(items)),
            packed=(
                common.num_tokens,
                common.slot_mapping.data_ptr(),
                common.query_start_loc.data_ptr(),
                common.context_lens.data_ptr(),
                common.block_table.data_ptr(),
                common.block_table.stride(0),
                items.ctypes.data,
                len(items),
            ),
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
        """Two compiled calls for the whole batch; half precision converts each tensor besides, as a whole."""
        assert isinstance(metadata, CpuMetadata)
        if self.dtype != torch.float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = _as_rows(query), _as_rows(key), _as_rows(value)
        assert len(query) == len(key) == len(value) == metadata.num_tokens
        output = torch.empty(query.shape, dtype=torch.float32)
        PACK_CALL.pack_into(
            self._call,
            0,
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(layer_cache.key.data_ptr(), layer_cache.value.data_ptr(), output.data_ptr()),
            *self._packed,
            *metadata.packed,
            *self._counter_addresses,
            scale,
        )
        self._counters.fill(0)
        kernels = compiled_kernels(self.dtype)
        run_parallel(kernels.write, self._call, self.num_threads if metadata.num_tokens >= TOKENS_PARALLEL_MIN else 1)
        run_parallel(kernels.attend, self._call, metadata.num_threads)
        return output if self.dtype == torch.float32 else output.to(self.dtype)

    def layer_calls(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        layer_caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        scales: Sequence[float],
        counters: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.void]:
        """A `cpu_kernel.CALL` for each of several layers that use the same memory one after the other, for code that
        runs the kernels in a parallel region of its own.

        `query`, `key`, `value` [T, heads * head_dim] and `output`, which is contiguous: float32. `counters`
        [layers, 3]: addresses of zeroed int64, for writing, items and threads.
        """
        assert isinstance(metadata, CpuMetadata)
        assert self.dtype == torch.float32
        calls = np.empty(len(layer_caches), dtype=cpu_kernel.CALL)
        calls[:] = (
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(0, 0, output.data_ptr()),
            *self._packed,
            *metadata.packed,
            *(0, 0, 0, 0.0),
        )
        calls["key_pool"] = [layer_cache.key.data_ptr() for layer_cache in layer_caches]
        calls["value_pool"] = [layer_cache.value.data_ptr() for layer_cache in layer_caches]
        calls["next_write"], calls["next_item"], calls["next_thread"] = counters.T
        calls["scale"] = scales
        return calls

    def warm_up(self) -> None:
        """Compiles the kernels for this dtype, or loads them from the cache, and starts the threads."""
        layer_cache = self.allocate_layer(1)
        metadata = self.build_metadata(
            query_lens=np.ones(1, dtype=np.int32),
            context_lens=np.ones(1, dtype=np.int32),
            block_table=np.zeros((1, 1), dtype=np.int32),
            slot_mapping=np.zeros(1, dtype=np.int64),
        )
        metadata.num_threads = self.num_threads
        query = torch.zeros(1, self.num_heads, self.head_dim, dtype=self.dtype)
        key = torch.zeros(1, self.num_kv_heads, self.head_dim, dtype=self.dtype)
        self.forward(query, key, key, layer_cache, metadata, 1.0)


KernelFunction = Any
"""A ctypes function of one pointer; calling it releases the GIL."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled functions for one dtype of pools, see `cpu_kernel.build_functions`."""

    write: KernelFunction
    attend: KernelFunction
    compiled: tuple[Any, Any]
    """What owns their machine code."""


def run_parallel(function: KernelFunction, call: ctypes.Array[ctypes.c_char] | int, num_threads: int) -> None:
    """Runs `function(call)` once on each of `num_threads` threads, this one included, and waits for all.

    `call`: an array or an address.
    """
    gomp_parallel = _gomp_parallel()
    if num_threads == 1 or gomp_parallel is None:
        function(call)
    else:
        gomp_parallel(function, call, num_threads, 0)


@cache
def _gomp_parallel() -> KernelFunction | None:
    """`void GOMP_parallel(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags)`: what GCC emits for
    `#pragma omp parallel`, from the library in torch's global symbols. None where that is another library.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        logger.warning("torch has loaded no libgomp here: attention runs on one thread")
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] with each token's heads in one piece, which is what the kernels address."""
    _, num_heads, head_dim = tensor.shape
    _, head_stride, stride = tensor.stride()
    in_one_piece = stride == 1 and (num_heads == 1 or head_stride == head_dim)
    return tensor if in_one_piece else tensor.contiguous()


def _zeros_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor, all of it resident. Blocks lie scattered, and looking up small pages took a third of a decode.

    numpy asks Linux for huge pages (madvise) where an array is large; torch's allocator does not.
    """
    array = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    # torch's zeroing uses all threads. In a virtual machine whose host backs memory only when it is touched (9 µs a
    # page, on this first use only) that halves a start's longest stage.
    return torch.from_numpy(array).zero_().view(dtype).view(shape)


def _converts_half_precision() -> bool:
    """Whether the processor has instructions for it; LLVM would call a function that is not there."""
    return platform.machine().lower() not in ("x86_64", "amd64") or get_host_cpu_features().get("f16c", False)


@cache
def compiled_kernels(dtype: torch.dtype) -> Kernels:
    """Compiles for pools of `dtype`, or loads from the cache on disk."""
    kind = POOL_KINDS[dtype]
    write, attend = kernel_cache.compiled(lambda cached: cpu_kernel.build_functions(kind, cached), _cache_directory())
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return Kernels(write=prototype(write.address), attend=prototype(attend.address), compiled=(write, attend))


def _cache_directory() -> Path | None:
    """A writable folder for this version of the kernels, or None."""
    return kernel_cache.directory_of((simd, cpu_kernel))
