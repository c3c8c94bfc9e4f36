"""The matrix product of the fused step, as LLVM IR that numba links into its loops.

What lives here: the packed layout of a weight, and the register tile that multiplies rows by a panel of it. What must
not: loops over a whole matrix, threads, anything of a model.

A weight [N, K] is packed into panels of PANEL output features: element (n, k) lies at `((n // PANEL) * K + k) * PANEL +
n % PANEL`, zeros past N. A tile of up to ROWS_MAX rows by one panel is accumulated in registers over all of K, in the
order of k: a row's result has the same bits whatever rows are beside it, however many they are, and on however many
threads. One layout serves every number of rows: a panel is read once, in order, for as many rows as there are.

The tile's size follows the processor's vector registers: 12 rows by 32 features where there are 32 registers of 16
floats, 6 by 16 elsewhere.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scheduler.model.attention.simd import I64, LANES, VEC, Emitter, as_int64, switch

_IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}
_HAS_WIDE_REGISTERS = _IS_X86 and bool(get_host_cpu_features().get("avx512f", False))
PANEL_VECTORS = 2 if _HAS_WIDE_REGISTERS else 1
PANEL = PANEL_VECTORS * LANES
"""Output features that are computed together."""
ROWS_MAX = 12 if _HAS_WIDE_REGISTERS else 6
"""Rows of a tile at most: 12 x 2 vectors of sums leave room for the operands."""
PREFETCH_ROWS_MAX = 4
"""Up to so many rows memory is what bounds, and weights are asked for PREFETCH_BYTES ahead of their use."""
PREFETCH_BYTES = 2048


@intrinsic
def gemm_tile(typingctx, kind, num_rows, depth, rows, row_stride, panel, output):
    """output[r * PANEL + i] = sum over k of rows[r * row_stride + k] * panel[k * PANEL + i], for all i of a panel.

    `kind`: float32. `num_rows`: 1 … ROWS_MAX. `depth`: K. The others: addresses, and a stride in elements.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        num_rows, depth, rows, row_stride, panel, output = as_int64(context, builder, args, sig)

        def emit(count: int) -> None:
            totals = [[cgutils.alloca_once(builder, VEC) for _ in range(PANEL_VECTORS)] for _ in range(count)]
            for row in totals:
                for total in row:
                    builder.store(e.splat(0.0), total)
            starts = [builder.add(rows, builder.mul(row_stride, I64(4 * r))) for r in range(count)]
            with cgutils.for_range(builder, depth) as loop:
                offset = builder.mul(loop.index, I64(PANEL))
                if count <= PREFETCH_ROWS_MAX:
                    address = builder.add(panel, builder.mul(offset, I64(4)))
                    for v in range(PANEL_VECTORS):
                        e.prefetch(builder.add(address, I64(PREFETCH_BYTES + v * LANES * 4)))
                weights = [e.load_vector(panel, builder.add(offset, I64(v * LANES))) for v in range(PANEL_VECTORS)]
                for start, row in zip(starts, totals, strict=True):
                    value = e.broadcast(e.load_float(start, loop.index))
                    for weight, total in zip(weights, row, strict=True):
                        builder.store(e.fma(value, weight, builder.load(total)), total)
            for r, row in enumerate(totals):
                for v, total in enumerate(row):
                    e.store_vector(builder.load(total), output, I64(r * PANEL + v * LANES))

        switch(builder, num_rows, range(1, ROWS_MAX + 1), emit)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), codegen
