"""The vector arithmetic of the `cpu` backend, as LLVM IR that numba links into its kernels.

What lives here: the inner steps of attention over one tile of TILE tokens, each an intrinsic that numba code calls
with plain addresses. They are written as IR, not left to the auto-vectoriser, for two reasons: the number of
accumulators held in registers is chosen here, and so is the order of every addition. A query row's result depends on
its own keys and values alone, whatever rows are computed beside it and on however many threads: no operation mixes
lanes of two rows, and no order of additions depends on the shape of the work.

LANES floats make a vector; LLVM splits it where the processor's registers are shorter. All arithmetic is float32;
pools in bfloat16 or float16 are widened as they are loaded. An argument `kind` carries the pool's element type in its
own type, see `POOL_KINDS`. Addresses are bytes, indices and strides are elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
TILE = 64
"""Tokens per step of the online softmax."""
TILE_VECTORS = TILE // LANES
ROWS_MAX = 6
"""Query rows that share one pass over a tile: 6 rows x 4 vectors leave room for operands in 32 vector registers."""
SCORE_MIN = -3.0e38
"""Below every score: the running maximum of a row that has seen no token."""

POOL_KINDS = {types.float32: "float32", types.uint16: "bfloat16", types.int16: "float16"}
"""numba has no bfloat16 and little float16: the type of `kind` is that of an integer of the same size."""

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VEC, VEC_I32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
MEMORY_TYPES = {"float32": F32, "bfloat16": ir.IntType(16), "float16": ir.HalfType()}

EXP2_COEFFICIENTS = [math.log(2) ** k / math.factorial(k) for k in range(8)]
"""Taylor series of 2^x: within 6e-9 on [-1/2, 1/2], a tenth of float32's rounding."""
ROUND_MAGIC = 1.5 * 2**23
"""Adding and subtracting it rounds a small float32 to the nearest integer, which stays in the sum's low bits."""


class Emitter:
    """Shorthand for the IR of one intrinsic."""

    def __init__(self, builder: ir.IRBuilder, kind: str) -> None:
        self.builder = builder
        self.kind = kind
        self.element_bytes = 4 if kind == "float32" else 2

    def splat(self, value: float, vector_type: ir.VectorType = VEC) -> ir.Constant:
        return ir.Constant(vector_type, [vector_type.element(value)] * LANES)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        vector = self.builder.insert_element(undefined, scalar, I32(0))
        return self.builder.shuffle_vector(vector, undefined, ir.Constant(VEC_I32, [I32(0)] * LANES))

    def element(self, address: ir.Value, index: ir.Value, kind: str = "float32") -> ir.Value:
        """Pointer to element `index` of the array at `address`."""
        return self.builder.gep(self.builder.inttoptr(address, MEMORY_TYPES[kind].as_pointer()), [index])

    def load_vector(self, address: ir.Value, index: ir.Value, kind: str = "float32") -> ir.Value:
        """LANES elements from `index` on, widened to float32; no alignment but an element's."""
        memory_type = MEMORY_TYPES[kind]
        pointer = self.builder.bitcast(
            self.element(address, index, kind), ir.VectorType(memory_type, LANES).as_pointer()
        )
        vector = self.builder.load(pointer, align=4 if kind == "float32" else 2)
        if kind == "bfloat16":
            return self.builder.bitcast(
                self.builder.shl(self.builder.zext(vector, VEC_I32), self.splat(16, VEC_I32)), VEC
            )
        return self.builder.fpext(vector, VEC) if kind == "float16" else vector

    def store_vector(self, vector: ir.Value, address: ir.Value, index: ir.Value) -> None:
        self.builder.store(vector, self.builder.bitcast(self.element(address, index), VEC.as_pointer()), align=4)

    def load_float(self, address: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.load(self.element(address, index))

    def prefetch(self, address: ir.Value) -> None:
        """Hints that the cache line at `address` is read soon; never faults."""
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, "llvm.prefetch.p0")
        read, keep, data = I32(0), I32(3), I32(1)
        self.builder.call(function, [self.builder.inttoptr(address, byte_pointer), read, keep, data])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c; one rounding where the processor has the instruction."""
        function_type = ir.FunctionType(VEC, [VEC, VEC, VEC])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, f"llvm.fmuladd.v{LANES}f32")
        return self.builder.call(function, [a, b, c])

    def exp2(self, x: ir.Value) -> ir.Value:
        """2^x for x <= 0, lane by lane; 0 below -126, NaN for NaN."""
        b = self.builder
        too_small = b.fcmp_ordered("<", x, self.splat(-126.0))
        x = b.select(too_small, self.splat(-126.0), x)
        shifted = b.fadd(x, self.splat(ROUND_MAGIC))
        fraction = b.fsub(x, b.fsub(shifted, self.splat(ROUND_MAGIC)))
        result = self.splat(EXP2_COEFFICIENTS[-1])
        for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
            result = self.fma(result, fraction, self.splat(coefficient))
        exponent = b.add(b.shl(b.bitcast(shifted, VEC_I32), self.splat(23, VEC_I32)), self.splat(127 << 23, VEC_I32))
        return b.select(too_small, self.splat(0.0), b.fmul(result, b.bitcast(exponent, VEC)))

    def reduce(self, operation: str, vector: ir.Value) -> ir.Value:
        """Halves the vector until one lane is left: always in the same order."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low, high = (
                self.builder.shuffle_vector(
                    vector, undefined, ir.Constant(ir.VectorType(I32, lanes), [I32(i + start) for i in range(lanes)])
                )
                for start in (0, lanes)
            )
            vector = self.maximum(low, high) if operation == "max" else self.builder.fadd(low, high)
        return self.builder.extract_element(vector, I32(0))

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger; b where a is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)


def switch(builder: ir.IRBuilder, selector: ir.Value, values: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emits one unrolled case per value of `selector`; other values do nothing."""
    end = builder.append_basic_block("end")
    cases = [(value, builder.append_basic_block(f"case{value}")) for value in values]
    instruction = builder.switch(selector, end)
    for value, block in cases:
        instruction.add_case(I64(value), block)
        builder.position_at_end(block)
        emit(value)
        builder.branch(end)
    builder.position_at_end(end)


def as_int64(context: Any, builder: ir.IRBuilder, args: Sequence[ir.Value], sig: Any) -> list[ir.Value]:
    """All arguments but the first, `kind`, as 64-bit integers."""
    return [context.cast(builder, arg, kind, types.int64) for arg, kind in zip(args[1:], sig.args[1:], strict=True)]


@intrinsic
def score_tile(typingctx, kind, num_rows, num_vectors, head_dim, query, keys, key_stride, ahead, scores):
    """scores[r * TILE + t] = query[r] . key[t], for `num_rows` rows and `num_vectors` x LANES tokens.

    `query`: float32 [num_rows, head_dim]. `keys`: int64 [num_vectors], addresses of the keys of LANES tokens each,
    dimension by dimension: element d of token t at `d * key_stride + t`. Per score, the products are added in the
    order of d. `ahead`: int64 [num_vectors], addresses of LANES x head_dim elements each that are wanted next.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, POOL_KINDS[sig.args[0]])
        rows, vectors, dim, query, keys, stride, ahead, scores = as_int64(context, builder, args, sig)

        def emit(num_rows: int, num_vectors: int) -> None:
            key_table = builder.inttoptr(keys, I64.as_pointer())
            key = [builder.load(builder.gep(key_table, [I64(v)])) for v in range(num_vectors)]
            ahead_table = builder.inttoptr(ahead, I64.as_pointer())
            wanted = [builder.load(builder.gep(ahead_table, [I64(v)])) for v in range(num_vectors)]
            sums = [[cgutils.alloca_once(builder, VEC) for _ in range(num_vectors)] for _ in range(num_rows)]
            for row_sums in sums:
                for total in row_sums:
                    builder.store(e.splat(0.0), total)
            with cgutils.for_range(builder, dim) as loop:
                offset = builder.mul(loop.index, stride)
                for address in wanted:
                    e.prefetch(builder.add(address, builder.mul(loop.index, I64(LANES * e.element_bytes))))
                key_values = [e.load_vector(address, offset, e.kind) for address in key]
                for r, row_sums in enumerate(sums):
                    index = builder.add(builder.mul(I64(r), dim), loop.index)
                    query_value = e.broadcast(e.load_float(query, index))
                    for key_value, total in zip(key_values, row_sums, strict=True):
                        builder.store(e.fma(query_value, key_value, builder.load(total)), total)
            for r, row_sums in enumerate(sums):
                for v, total in enumerate(row_sums):
                    e.store_vector(builder.load(total), scores, I64(r * TILE + v * LANES))

        def emit_for_vectors(num_vectors: int) -> None:
            switch(builder, rows, range(1, ROWS_MAX + 1), lambda num_rows: emit(num_rows, num_vectors))

        switch(builder, vectors, (1, TILE_VECTORS), emit_for_vectors)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), codegen


@intrinsic
def softmax_tile(typingctx, kind, num_tokens, scores, head_dim, maximum, sums, output):
    """One row's step of the online softmax (Milakov & Gimelshein 2018), in base 2.

    Turns `scores` (float32 [TILE], of which the first `num_tokens` count) into weights 2^(score - new maximum), 0
    past `num_tokens`, in place. Where the maximum grows, `sums` (float32 [LANES]) and `output` (float32 [head_dim],
    padded to LANES) are scaled down to it; then the weights are added to `sums`, lane by lane. Steps that see no new
    token change no bit.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, "float32")
        num_tokens, scores, dim, maximum, sums, output = as_int64(context, builder, args, sig)
        lanes = ir.Constant(VEC_I32, [I32(i) for i in range(LANES)])
        masked = []
        for v in range(TILE_VECTORS):
            left = builder.trunc(builder.sub(num_tokens, I64(v * LANES)), I32)
            seen = builder.icmp_signed("<", lanes, e.broadcast(left))
            score = e.load_vector(scores, I64(v * LANES))
            masked.append(builder.select(seen, score, e.splat(float("-inf"))))
        largest = masked[0]
        for score in masked[1:]:
            largest = e.maximum(score, largest)
        old_maximum = e.load_float(maximum, I64(0))
        tile_maximum = e.reduce("max", largest)
        grown = builder.fcmp_ordered(">", tile_maximum, old_maximum)
        new_maximum = builder.select(grown, tile_maximum, old_maximum)
        with builder.if_then(grown):
            factor = e.exp2(e.broadcast(builder.fsub(old_maximum, new_maximum)))
            builder.store(new_maximum, e.element(maximum, I64(0)))
            e.store_vector(builder.fmul(e.load_vector(sums, I64(0)), factor), sums, I64(0))
            with cgutils.for_range_slice(builder, I64(0), dim, I64(LANES), intp=I64) as (index, _):
                e.store_vector(builder.fmul(e.load_vector(output, index), factor), output, index)
        total = e.load_vector(sums, I64(0))
        new_maximum = e.broadcast(new_maximum)
        for v, score in enumerate(masked):
            weight = e.exp2(builder.fsub(score, new_maximum))
            e.store_vector(weight, scores, I64(v * LANES))
            total = builder.fadd(total, weight)
        e.store_vector(total, sums, I64(0))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), codegen


@intrinsic
def accumulate_tile(
    typingctx, kind, num_rows, num_tokens, num_vectors, weights, values, stride, ahead, ahead_step, output
):
    """output[r * stride + i] += sum over t of weights[r * TILE + t] * value[t, i], for `num_vectors` x LANES i's.

    `values`: int64 address of the values of LANES consecutive tokens, of which `num_tokens` are read: element i of
    token t at `t * stride + i`. Products are added in the order of t. `ahead`: address of LANES cache lines per vector
    that are wanted next, `ahead_step` bytes apart.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder, POOL_KINDS[sig.args[0]])
        rows, num_tokens, vectors, weights, values, stride, ahead, ahead_step, output = as_int64(
            context, builder, args, sig
        )

        def emit(num_rows: int, num_vectors: int) -> None:
            sums = []
            for r in range(num_rows):
                start = builder.mul(I64(r), stride)
                row = []
                for v in range(num_vectors):
                    index = builder.add(start, I64(v * LANES))
                    total = cgutils.alloca_once(builder, VEC)
                    builder.store(e.load_vector(output, index), total)
                    row.append((total, index))
                sums.append(row)
            with cgutils.for_range(builder, num_tokens) as loop:
                start = builder.mul(loop.index, stride)
                line = builder.udiv(start, I64(LANES))
                for v in range(num_vectors):
                    e.prefetch(builder.add(ahead, builder.mul(builder.add(line, I64(v)), ahead_step)))
                loaded = [e.load_vector(values, builder.add(start, I64(v * LANES)), e.kind) for v in range(num_vectors)]
                for r, row in enumerate(sums):
                    weight = e.broadcast(e.load_float(weights, builder.add(loop.index, I64(r * TILE))))
                    for value, (total, _) in zip(loaded, row, strict=True):
                        builder.store(e.fma(weight, value, builder.load(total)), total)
            for row in sums:
                for total, index in row:
                    e.store_vector(builder.load(total), output, index)

        def emit_for_vectors(num_vectors: int) -> None:
            switch(builder, rows, range(1, ROWS_MAX + 1), lambda num_rows: emit(num_rows, num_vectors))

        switch(builder, vectors, (1, 2, 4), emit_for_vectors)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 9), codegen


@intrinsic
def load_float(typingctx, address, index):
    """Element `index` of the float32 array at `address`."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        return Emitter(builder, "float32").load_float(*args)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_float(typingctx, kind, value, address, index):
    """Narrows a float32 to the element type of `kind`, which must hold it exactly, and stores it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        memory_kind = POOL_KINDS[sig.args[0]]
        _, value, address, index = args
        if memory_kind == "bfloat16":
            value = builder.trunc(builder.lshr(builder.bitcast(value, I32), I32(16)), ir.IntType(16))
        elif memory_kind == "float16":
            value = builder.fptrunc(value, ir.HalfType())
        pointer = Emitter(builder, memory_kind).element(address, index, memory_kind)
        builder.store(value, pointer)
        return context.get_dummy_value()

    return types.void(kind, types.float32, types.int64, types.int64), codegen


@intrinsic
def store_int64(typingctx, value, address, index):
    """Stores into element `index` of the int64 array at `address`."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        value, address, index = args
        builder.store(value, builder.gep(builder.inttoptr(address, I64.as_pointer()), [index]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_int64(typingctx, address, index):
    """Element `index` of the int64 array at `address`."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, index = args
        return builder.load(builder.gep(builder.inttoptr(address, I64.as_pointer()), [index]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address):
    """Takes a number: atomically adds 1 to the int64 at `address` and returns what it was."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, I64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def load_int32(typingctx, address, index):
    """Element `index` of the int32 array at `address`, widened."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, index = args
        return builder.sext(builder.load(builder.gep(builder.inttoptr(address, I32.as_pointer()), [index])), I64)

    return types.int64(types.int64, types.int64), codegen
