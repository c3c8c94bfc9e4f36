"""A stack of decoder layers as one module, and a vocabulary projection: packed weights, working memory, one call each.

What lives here: memory and its addresses, and the records that `kernel.py` reads. What must not: the recognition of
transformers' modules and the checks against them (`fuse.py`), loops, arithmetic.

A module serves one thread at a time: it owns its working memory, which grows to the largest step it has seen and stays.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from scheduler.model import kernel_cache
from scheduler.model.attention import cpu_kernel, simd
from scheduler.model.attention.base import AttentionMetadata, LayerCache
from scheduler.model.attention.cpu import CpuBackend, KernelFunction, compiled_kernels, run_parallel
from scheduler.model.fused import gemm, kernel, threads, vectors
from scheduler.model.fused.gemm import PANEL
from scheduler.model.fused.kernel import (
    CACHE_LINE_BYTES,
    COUNTERS_PER_LAYER,
    LAYER,
    PACKING,
    PROJECTION,
    SCRATCH_FLOATS,
    STEP,
)
from scheduler.model.paged_attention import PagedAttention, attached

logger = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 1 << 21
TOKENS_STEP = 64
"""Working memory grows by so many tokens."""
ATTEND_COUNTERS = (7, 8, 9)
"""Of a layer's counters, those that the attention kernels take."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a decoder layer computes with, as its checkpoint has it; float32 on the CPU."""

    input_gain: torch.Tensor
    input_eps: float
    post_gain: torch.Tensor
    post_eps: float
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    qk_eps: float
    qkv: tuple[torch.Tensor, ...]
    """[N, hidden] each; on top of each other they are q, k and v."""
    qkv_bias: tuple[torch.Tensor, ...]
    """As many, or none."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: int
    """See `vectors.py`."""


@dataclass(frozen=True, slots=True)
class Functions:
    """The compiled functions, see `kernel.build_functions`."""

    run_stack: KernelFunction
    project: KernelFunction
    pack: KernelFunction
    team_size: int
    """Address of `omp_get_num_threads`; 0 where torch's threads are of another library, and one thread works."""
    syscall: int
    """Address of libc's `syscall`; 0 where threads only spin."""
    compiled: tuple[Any, ...]
    """What owns their machine code."""


@cache
def compiled_functions() -> Functions:
    """Compiles them, or loads them from the cache on disk."""
    sources = (simd, cpu_kernel, gemm, vectors, threads, kernel)
    functions = kernel_cache.compiled(kernel.build_functions, kernel_cache.directory_of(sources))
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    run_stack, project, pack = (prototype(function.address) for function in functions)
    return Functions(
        run_stack=run_stack,
        project=project,
        pack=pack,
        team_size=_address_of("omp_get_num_threads"),
        syscall=_address_of("syscall") if threads.FUTEX_SYSCALL else 0,
        compiled=functions,
    )


def _address_of(name: str) -> int:
    """Of a C function among the process's global symbols; 0 if there is none."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


class FusedStack(nn.Module):
    """Decoder layers: norm, attention with rotary embedding, residual, norm, gated MLP, residual.

    Takes the place of the list of layers that a transformers model walks through, and is called as one of them.
    """

    def __init__(self, layers: Sequence[LayerParts], scales: Sequence[float], backend: CpuBackend) -> None:
        """`scales`: of each layer's attention scores."""
        super().__init__()
        first = layers[0]
        self._backend = backend
        self._scales = list(scales)
        self._hidden_size = len(first.input_gain)
        self._q_size = backend.num_heads * backend.head_dim
        self._kv_size = backend.num_kv_heads * backend.head_dim
        self._intermediate_size = len(first.gate)
        self._arena = _Arena(sum(_num_floats(layer) for layer in layers))
        self._layers = np.zeros(len(layers), dtype=LAYER)
        for record, layer in zip(self._layers, layers, strict=True):
            _fill(record, layer, self._arena, backend.num_threads)
        num_threads = backend.num_threads if compiled_functions().team_size else 1
        self._num_threads = num_threads
        self._scratch = torch.zeros(num_threads, SCRATCH_FLOATS)
        # Counters of all layers, then the barrier and one line more, all zeroed at once.
        words = CACHE_LINE_BYTES // 8
        self._num_counters = len(layers) * COUNTERS_PER_LAYER
        self._words = np.zeros(self._num_counters * words + threads.BARRIER_WORDS + words, dtype=np.int64)
        self._words_address = self._words.ctypes.data
        self._step = np.zeros(1, dtype=STEP)
        self._workspace = _Workspace(0, self._hidden_size, self._q_size, self._kv_size, self._intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: object,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: object,
    ) -> torch.Tensor:
        """As a decoder layer: [1, T, hidden] → [1, T, hidden], fresh; cos and sin [1, T, rotary_dim]."""
        attention = attached(self)
        assert isinstance(attention, PagedAttention)
        layer_caches, metadata = attention.step
        return self.run(hidden_states, position_embeddings, layer_caches, metadata, range(len(self._layers)))

    def run(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        layer_caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        layers: range,
    ) -> torch.Tensor:
        """Some of its layers, one after the other."""
        rows = hidden_states[0]
        num_tokens = len(rows)
        if num_tokens > self._workspace.num_tokens:
            size = -(-num_tokens // TOKENS_STEP) * TOKENS_STEP
            self._workspace = _Workspace(size, self._hidden_size, self._q_size, self._kv_size, self._intermediate_size)
        work = self._workspace
        # Whatever a step leaves in the padding of its rows (not a number, if a row was none) must not reach the next.
        work.hidden[:num_tokens, self._hidden_size :] = 0
        work.hidden[:num_tokens, : self._hidden_size] = rows
        cos, sin = (_rows_of(tensor) for tensor in position_embeddings)
        self._words.fill(0)
        counters = self._words_address
        barrier = counters + self._num_counters * CACHE_LINE_BYTES
        next_thread = barrier + threads.BARRIER_WORDS * 8
        self._words[self._num_counters * 8 + 17] = threads.SLEEP_NS_MAX
        first_counters = counters + np.arange(len(layers), dtype=np.int64) * COUNTERS_PER_LAYER * CACHE_LINE_BYTES
        attend_counters = first_counters[:, None] + np.array(ATTEND_COUNTERS, dtype=np.int64) * CACHE_LINE_BYTES
        backend, functions = self._backend, compiled_functions()
        query, key, value = work.qkv[:num_tokens, : self._q_size + 2 * self._kv_size].split(
            [self._q_size, self._kv_size, self._kv_size], dim=1
        )
        calls = backend.layer_calls(
            query,
            key,
            value,
            work.attended,
            layer_caches[layers.start : layers.stop],
            metadata,
            self._scales[layers.start : layers.stop],
            attend_counters,
        )
        self._step[0] = (
            self._layers.ctypes.data + layers.start * LAYER.itemsize,
            len(layers),
            calls.ctypes.data,
            ctypes.cast(compiled_kernels(torch.float32).attend, ctypes.c_void_p).value,
            functions.team_size if self._num_threads > 1 else 0,
            functions.syscall,
            barrier,
            next_thread,
            counters,
            self._scratch.data_ptr(),
            num_tokens,
            self._hidden_size,
            self._q_size,
            self._kv_size,
            self._intermediate_size,
            backend.num_heads,
            backend.num_kv_heads,
            backend.head_dim,
            cos.shape[1],
            *_memory(work.hidden),
            *_memory(work.normed),
            *_memory(work.qkv),
            *_memory(work.attended),
            *_memory(work.gated),
            *_memory(cos),
            *_memory(sin),
        )
        run_parallel(functions.run_stack, self._step.ctypes.data, self._num_threads)
        return work.hidden[:num_tokens, : self._hidden_size].clone()[None]


class PackedLinear(nn.Module):
    """A linear layer without gradient: float32 [..., K] → [..., N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._num_threads = num_threads if compiled_functions().team_size else 1
        self._arena = _Arena(_packed_floats([weight]) + (0 if bias is None else _padded(len(bias))))
        self._weight = _pack([weight], self._arena, num_threads)
        self._bias = _pad(bias, self._arena)
        self._scratch = torch.zeros(self._num_threads, SCRATCH_FLOATS)
        self._words = np.zeros(2 * CACHE_LINE_BYTES // 8, dtype=np.int64)
        self._call = np.zeros(1, dtype=PROJECTION)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """x W^T + b."""
        matrix = rows.reshape(-1, self.in_features)
        if matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        num_panels = -(-self.out_features // PANEL)
        output = torch.empty(len(matrix), num_panels * PANEL)
        if len(matrix) == 0:
            return output[:, : self.out_features].reshape(*rows.shape[:-1], self.out_features)
        self._words.fill(0)
        self._call[0] = (
            self._words.ctypes.data,
            self._words.ctypes.data + CACHE_LINE_BYTES,
            self._scratch.data_ptr(),
            len(matrix),
            *_memory(matrix),
            self.in_features,
            self._weight,
            self._bias,
            num_panels,
            *_memory(output),
        )
        run_parallel(compiled_functions().project, self._call.ctypes.data, self._num_threads)
        return output[:, : self.out_features].reshape(*rows.shape[:-1], self.out_features)


class _Workspace:
    """The rows between the phases of a layer, for a number of tokens; reused by every layer and step."""

    def __init__(self, num_tokens: int, hidden_size: int, q_size: int, kv_size: int, intermediate_size: int) -> None:
        self.num_tokens = num_tokens
        self.hidden, self.normed, self.qkv, self.gated = (
            # A vector more than whole panels: rows whose distance is a power of two share the sets of a cache.
            torch.zeros(num_tokens, _padded(size) + simd.LANES)
            for size in (hidden_size, hidden_size, q_size + 2 * kv_size, intermediate_size)
        )
        self.attended = torch.zeros(num_tokens, q_size)


class _Arena:
    """One piece of memory for many arrays: in large pages where the system has them, zeroed, for it is the kernel's."""

    def __init__(self, num_floats: int) -> None:
        num_bytes = -(-num_floats * 4 // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._floats = torch.frombuffer(self._memory, dtype=torch.float32)
        self._used = 0

    def take(self, num_floats: int) -> torch.Tensor:
        """Floats that nobody else has; each array begins where a vector does."""
        start = self._used
        self._used += -(-num_floats // simd.LANES) * simd.LANES
        assert self._used <= len(self._floats), "an arena too small for its arrays"
        return self._floats[start : start + num_floats]


def _fill(record: np.void, layer: LayerParts, arena: _Arena, num_threads: int) -> None:
    for name in ("input_gain", "post_gain", "q_gain", "k_gain", "out_bias", "gate_bias", "up_bias", "down_bias"):
        record[name] = _pad(getattr(layer, name), arena)
    record["qkv_bias"] = _pad(torch.cat(layer.qkv_bias) if layer.qkv_bias else None, arena)
    record["qkv"] = _pack(layer.qkv, arena, num_threads)
    for name in ("out", "gate", "up", "down"):
        record[name] = _pack([getattr(layer, name)], arena, num_threads)
    record["activation"] = layer.activation
    record["input_eps"], record["post_eps"], record["qk_eps"] = layer.input_eps, layer.post_eps, layer.qk_eps


def _num_floats(layer: LayerParts) -> int:
    """What `_fill` takes of an arena."""
    single = [layer.input_gain, layer.post_gain, layer.q_gain, layer.k_gain]
    single += [layer.out_bias, layer.gate_bias, layer.up_bias, layer.down_bias]
    lengths = [len(vector) for vector in single if vector is not None] + [sum(map(len, layer.qkv_bias))]
    packed = [_packed_floats(layer.qkv)]
    packed += [_packed_floats([weight]) for weight in (layer.out, layer.gate, layer.up, layer.down)]
    return sum(packed) + sum(_padded(length) for length in lengths)


def _packed_floats(weights: Sequence[torch.Tensor]) -> int:
    return _padded(sum(map(len, weights))) * weights[0].shape[1]


def _padded(length: int) -> int:
    return -(-length // PANEL) * PANEL


def _pack(weights: Sequence[torch.Tensor], arena: _Arena, num_threads: int) -> int:
    """The address of the panels of weights on top of each other, see `gemm.py`."""
    depth = weights[0].shape[1]
    panels = arena.take(_packed_floats(weights)).data_ptr()
    first_row = 0
    for weight in weights:
        assert weight.stride(1) == 1
        counter = np.zeros(1, dtype=np.int64)
        call = np.array([(counter.ctypes.data, *_memory(weight), len(weight), depth, panels, first_row)], dtype=PACKING)
        run_parallel(compiled_functions().pack, call.ctypes.data, num_threads)
        first_row += len(weight)
    return panels


def _pad(vector: torch.Tensor | None, arena: _Arena) -> int:
    """The address of a copy padded with zeros to whole panels; 0 for none."""
    if vector is None:
        return 0
    padded = arena.take(_padded(len(vector)))
    padded[: len(vector)] = vector
    return padded.data_ptr()


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[1, T, n] → [T, n] whose rows are in one piece each."""
    rows = tensor[0]
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _memory(rows: torch.Tensor) -> Iterable[int]:
    """Address and stride."""
    return rows.data_ptr(), rows.stride(0)
