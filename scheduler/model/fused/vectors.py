"""The element-wise rest of a decoder layer, as LLVM IR that numba links into its loops.

What lives here: RMSNorm of a row, the gated activation, sums, rotation; each over whole vectors of LANES floats, so
buffers are padded to them. What must not: loops over rows, threads, matrix products (`gemm.py`).

All arithmetic is float32, in an order that depends on nothing but a row's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scheduler.model.attention.simd import I64, LANES, VEC, Emitter, as_int64, switch

SILU, GELU_TANH = 0, 1
"""Activations of a gated MLP: x * sigmoid(x) (Elfwing et al. 2017), and Hendrycks & Gimelshein's approximation of the
Gaussian error linear unit, which is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
"""
LOG2_E = math.log2(math.e)


@intrinsic
def sum_of_squares(typingctx, kind, length, row):
    """The sum of x^2 over `length` floats, a multiple of LANES, at address `row`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, row = as_int64(context, builder, args, sig)
        total = cgutils.alloca_once(builder, VEC)
        builder.store(e.splat(0.0), total)
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
            value = e.load_vector(row, index)
            builder.store(e.fma(value, value, builder.load(total)), total)
        return e.reduce("sum", builder.load(total))

    return types.float32(kind, types.int64, types.int64), codegen


@intrinsic
def scale_by(typingctx, factor, length, row, gain, output):
    """output[i] = gain[i] * (factor * row[i])."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, row, gain, output = as_int64(context, builder, args, sig)
        factor = e.broadcast(args[0])
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
            value = builder.fmul(e.load_vector(row, index), factor)
            e.store_vector(builder.fmul(e.load_vector(gain, index), value), output, index)
        return context.get_dummy_value()

    return types.void(types.float32, *[types.int64] * 4), codegen


@intrinsic
def add_vectors(typingctx, kind, length, a, b, output):
    """output[i] = a[i] + b[i]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, a, b, output = as_int64(context, builder, args, sig)
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
            e.store_vector(builder.fadd(e.load_vector(a, index), e.load_vector(b, index)), output, index)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), codegen


@intrinsic
def copy_vectors(typingctx, kind, length, source, output):
    """output[i] = source[i]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, source, output = as_int64(context, builder, args, sig)
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
            e.store_vector(e.load_vector(source, index), output, index)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), codegen


@intrinsic
def gate_vectors(typingctx, kind, length, activation, gate, up, output):
    """output[i] = act(gate[i]) * up[i]; `activation`: SILU or GELU_TANH."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, activation, gate, up, output = as_int64(context, builder, args, sig)

        def sigmoid(x: ir.Value) -> ir.Value:
            """By e^-|x|, which cannot overflow; NaN for NaN."""
            is_negative = builder.fcmp_ordered("<", x, e.splat(0.0))
            minus_size = builder.select(is_negative, x, builder.fneg(x))
            small = e.exp2(builder.fmul(minus_size, e.splat(LOG2_E)))
            numerator = builder.select(is_negative, small, e.splat(1.0))
            return builder.fdiv(numerator, builder.fadd(small, e.splat(1.0)))

        def emit(act: int) -> None:
            with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
                x = e.load_vector(gate, index)
                inner = x
                if act == GELU_TANH:
                    cubic = e.fma(builder.fmul(x, x), e.splat(0.044715), e.splat(1.0))
                    inner = builder.fmul(builder.fmul(x, cubic), e.splat(2 * math.sqrt(2 / math.pi)))
                activated = builder.fmul(x, sigmoid(inner))
                e.store_vector(builder.fmul(activated, e.load_vector(up, index)), output, index)

        switch(builder, activation, (SILU, GELU_TANH), emit)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 5), codegen


@intrinsic
def rotate_halves(typingctx, kind, length, first, second, cos, sin, half):
    """Rotary position embedding (Su et al. 2021) of the halves of a head's rotated part, in place, over `length`
    floats, a multiple of LANES: first[i], second[i] = first[i] cos[i] - second[i] sin[i], second[i] cos[half + i] +
    first[i] sin[half + i].
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        length, first, second, cos, sin, half = as_int64(context, builder, args, sig)
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (index, _):
            a, b = e.load_vector(first, index), e.load_vector(second, index)
            index_of_second = builder.add(index, half)
            rotated_a = builder.fsub(
                builder.fmul(a, e.load_vector(cos, index)), builder.fmul(b, e.load_vector(sin, index))
            )
            rotated_b = builder.fadd(
                builder.fmul(b, e.load_vector(cos, index_of_second)),
                builder.fmul(a, e.load_vector(sin, index_of_second)),
            )
            e.store_vector(rotated_a, first, index)
            e.store_vector(rotated_b, second, index)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), codegen
