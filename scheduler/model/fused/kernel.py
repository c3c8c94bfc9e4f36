"""The loops of a fused step: a stack of decoder layers, and the projection onto the vocabulary.

What lives here: numba code over plain addresses, no torch, no threads of its own. Each function has C's calling
convention and takes the address of one record; a team of threads enters it with the same record and does the work
once. The arithmetic is in `gemm.py` and `vectors.py`, attention in `attention/cpu_kernel.py`; who calls this, and with
what, in `stack.py`.

A layer is eight phases, each cut into items that threads take from a counter, with a barrier after each:

    norm · q/k/v · rotation and KV write · attention · output projection + residual ·
    norm · gate, up and activation · down projection + residual

A whole stack is one parallel region: waking a team costs more than a phase of a small step. Every element is computed
by one thread in a fixed order, so that a token's result has the same bits in any batch, in a chunk of a prompt or in a
decode, on any number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from scheduler.model.attention.cpu_kernel import CALL, write_tokens
from scheduler.model.attention.simd import LANES, fetch_add, load_float, store_float
from scheduler.model.fused.gemm import PANEL, ROWS_MAX, gemm_tile
from scheduler.model.fused.threads import call_for_int, call_with_address, wait_for_all
from scheduler.model.fused.vectors import (
    add_vectors,
    copy_vectors,
    gate_vectors,
    rotate_halves,
    scale_by,
    sum_of_squares,
)

F32_BYTES = 4
CACHE_LINE_BYTES = 64
ROWS_PER_ITEM = 4
"""Of the phases that go row by row."""
CHUNK_FLOATS = 1 << 17
"""Of the rows that one item of a product reads: half a second-level cache, a panel has the rest."""
SCRATCH_FLOATS = 2 * ROWS_MAX * PANEL
"""Of one thread: two tiles."""
PHASES = 8
"""Of a layer; each has a counter of its own, and attention one more."""
COUNTERS_PER_LAYER = PHASES + 2

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            # Addresses of float32 arrays padded to PANEL or LANES; 0 for what a layer has not.
            "input_gain",  # [hidden]
            "post_gain",  # [hidden]
            "q_gain",  # [head_dim]
            "k_gain",  # [head_dim]
            "qkv",  # packed [q_size + 2 * kv_size, hidden]
            "qkv_bias",
            "out",  # packed [hidden, q_size]
            "out_bias",
            "gate",  # packed [intermediate, hidden]
            "gate_bias",
            "up",  # like gate
            "up_bias",
            "down",  # packed [hidden, intermediate]
            "down_bias",
            "activation",  # see vectors.py
        )
    ]
    + [(name, np.float64) for name in ("input_eps", "post_eps", "qk_eps")]
)
"""What a decoder layer consists of; the same in every step."""

STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "layers",  # address of LAYER [num_layers]
            "num_layers",
            "attention_calls",  # address of cpu_kernel.CALL [num_layers]
            "attend",  # address of the backend's function
            "team_size",  # address of `int omp_get_num_threads(void)`, 0 for one thread
            "syscall",  # address of libc's function, see threads.py
            "barrier",  # address of threads.BARRIER_WORDS zeroed int64
            "next_thread",  # address of a zeroed int64: pieces of scratch handed out
            "counters",  # address of zeroed cache lines [num_layers, COUNTERS_PER_LAYER]
            "scratch",  # address of float32 [threads, SCRATCH_FLOATS]
            "num_tokens",
            "hidden_size",
            "q_size",
            "kv_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "rotary_dim",  # of a head, from its start
            # Addresses of float32 [num_tokens, …] and their strides in elements, multiples of LANES or more.
            "hidden",
            "hidden_stride",
            "normed",
            "normed_stride",
            "qkv",
            "qkv_stride",
            "attended",
            "attended_stride",
            "gated",
            "gated_stride",
            "cos",  # [num_tokens, rotary_dim]
            "cos_stride",
            "sin",
            "sin_stride",
        )
    ]
)
"""What all layers of one step share."""

PROJECTION = np.dtype(
    [
        (name, np.int64)
        for name in (
            "counter",  # address of a zeroed int64
            "next_thread",
            "scratch",
            "num_rows",
            "rows",
            "row_stride",
            "depth",
            "weight",
            "bias",
            "num_panels",
            "output",
            "output_stride",
        )
    ]
)
"""One product of some rows with one packed weight."""

PACKING = np.dtype(
    [
        (name, np.int64)
        for name in (
            "counter",  # address of a zeroed int64
            "weight",  # address of float32 [num_rows, depth]
            "row_stride",
            "num_rows",
            "depth",
            "panels",  # address of zeroed memory for the panels
            "first_row",  # where in the packed weight this one begins
        )
    ]
)
"""One weight on its way into panels; several may make up one packed weight."""
PACKED_ROWS_PER_ITEM = LANES
"""Of a weight: a line of its panel at a time."""

LAYER_BYTES, CALL_BYTES = LAYER.itemsize, CALL.itemsize
_LAYER_POINTER, _CALL_POINTER = types.CPointer(from_dtype(LAYER)), types.CPointer(from_dtype(CALL))


@intrinsic
def _layer_at(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return _LAYER_POINTER(types.int64), codegen


@intrinsic
def _call_at(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return _CALL_POINTER(types.int64), codegen


@njit
def _padded(length):
    return (length + LANES - 1) // LANES * LANES


@njit
def _normalize(row, length, gain, eps, output):
    """RMSNorm (Zhang & Sennrich 2019) of `length` floats; those between it and whole vectors are zero."""
    padded = _padded(length)
    mean = sum_of_squares(np.float32(0), padded, row) / np.float32(length)
    scale_by(np.float32(1) / np.sqrt(mean + np.float32(eps)), padded, row, gain, output)


@njit
def _norm_phase(counter, step, gain, eps):
    while True:
        first = fetch_add(counter) * ROWS_PER_ITEM
        if first >= step.num_tokens:
            return
        for row in range(first, min(first + ROWS_PER_ITEM, step.num_tokens)):
            _normalize(
                step.hidden + row * step.hidden_stride * F32_BYTES,
                step.hidden_size,
                gain,
                eps,
                step.normed + row * step.normed_stride * F32_BYTES,
            )


@njit
def _multiply(num_rows, depth, rows, row_stride, panel, tile):
    """A function, so that the many cases of a tile are compiled once."""
    gemm_tile(np.float32(0), num_rows, depth, rows, row_stride, panel, tile)


@njit
def _add_bias(tile, num_rows, bias):
    for row in range(num_rows):
        address = tile + row * PANEL * F32_BYTES
        add_vectors(np.float32(0), PANEL, address, bias, address)


@njit
def _chunk_rows(depth):
    """Rows of one item of a product: whole tiles."""
    return max(1, CHUNK_FLOATS // depth // ROWS_MAX) * ROWS_MAX


@njit
def _product_phase(
    counter, num_rows, rows, row_stride, depth, weight, bias, num_panels, scratch, output, output_stride, adds
):
    """output[r, n] = rows[r] . weight[n] + bias[n], or, if `adds`, that added to what is there."""
    chunk_rows = _chunk_rows(depth)
    num_items = (num_rows + chunk_rows - 1) // chunk_rows * num_panels
    while True:
        item = fetch_add(counter)
        if item >= num_items:
            return
        panel = item % num_panels
        first = item // num_panels * chunk_rows
        count = min(chunk_rows, num_rows - first)
        panel_weight = weight + panel * depth * PANEL * F32_BYTES
        # Tiles of equal size: a last one of a row or two would cost as much as a whole one.
        num_tiles = (count + ROWS_MAX - 1) // ROWS_MAX
        for tile in range(num_tiles):
            start = first + count * tile // num_tiles
            end = first + count * (tile + 1) // num_tiles
            _multiply(end - start, depth, rows + start * row_stride * F32_BYTES, row_stride, panel_weight, scratch)
            if bias != 0:
                _add_bias(scratch, end - start, bias + panel * PANEL * F32_BYTES)
            for row in range(end - start):
                source = scratch + row * PANEL * F32_BYTES
                target = output + ((start + row) * output_stride + panel * PANEL) * F32_BYTES
                if adds:
                    add_vectors(np.float32(0), PANEL, source, target, target)
                else:
                    copy_vectors(np.float32(0), PANEL, source, target)


@njit
def _gate_phase(counter, step, layer, scratch):
    """gated[r, n] = act(normed[r] . gate[n]) * (normed[r] . up[n])."""
    depth = step.hidden_size
    num_panels = (step.intermediate_size + PANEL - 1) // PANEL
    chunk_rows = _chunk_rows(depth)
    num_items = (step.num_tokens + chunk_rows - 1) // chunk_rows * num_panels
    up_tile = scratch + ROWS_MAX * PANEL * F32_BYTES
    while True:
        item = fetch_add(counter)
        if item >= num_items:
            return
        panel = item % num_panels
        first = item // num_panels * chunk_rows
        count = min(chunk_rows, step.num_tokens - first)
        offset = panel * depth * PANEL * F32_BYTES
        num_tiles = (count + ROWS_MAX - 1) // ROWS_MAX
        for tile in range(num_tiles):
            start = first + count * tile // num_tiles
            num_rows = first + count * (tile + 1) // num_tiles - start
            rows = step.normed + start * step.normed_stride * F32_BYTES
            _multiply(num_rows, depth, rows, step.normed_stride, layer.gate + offset, scratch)
            _multiply(num_rows, depth, rows, step.normed_stride, layer.up + offset, up_tile)
            if layer.gate_bias != 0:
                _add_bias(scratch, num_rows, layer.gate_bias + panel * PANEL * F32_BYTES)
                _add_bias(up_tile, num_rows, layer.up_bias + panel * PANEL * F32_BYTES)
            for row in range(num_rows):
                gate_vectors(
                    np.float32(0), PANEL, layer.activation, scratch + row * PANEL * F32_BYTES,
                    up_tile + row * PANEL * F32_BYTES,
                    step.gated + ((start + row) * step.gated_stride + panel * PANEL) * F32_BYTES,
                )  # fmt: skip


@njit
def _rotate(head, half, cos, sin):
    whole = half // LANES * LANES
    rotate_halves(np.float32(0), whole, head, head + half * F32_BYTES, cos, sin, half)
    for i in range(whole, half):
        a, b = load_float(head, i), load_float(head, half + i)
        rotated_a = a * load_float(cos, i) - b * load_float(sin, i)
        rotated_b = b * load_float(cos, half + i) + a * load_float(sin, half + i)
        store_float(np.float32(0), rotated_a, head, i)
        store_float(np.float32(0), rotated_b, head, half + i)


@njit
def _rotation_phase(counter, step, layer, call):
    """Norms of heads if there are any, rotation, and the token's keys and values into the pool."""
    half = step.rotary_dim // 2
    while True:
        first = fetch_add(counter) * ROWS_PER_ITEM
        if first >= step.num_tokens:
            return
        last = min(first + ROWS_PER_ITEM, step.num_tokens)
        for token in range(first, last):
            cos = step.cos + token * step.cos_stride * F32_BYTES
            sin = step.sin + token * step.sin_stride * F32_BYTES
            for number in range(step.num_heads + step.num_kv_heads):
                head = step.qkv + (token * step.qkv_stride + number * step.head_dim) * F32_BYTES
                gain = layer.q_gain if number < step.num_heads else layer.k_gain
                if gain != 0:
                    _normalize(head, step.head_dim, gain, layer.qk_eps, head)
                _rotate(head, half, cos, sin)
        write_tokens(np.float32(0), call, first, last)


@njit
def _pack_rows(p, first, last):
    """Rows `first` … `last` - 1 of a weight to their places; whole cache lines are written one after the other."""
    for k in range(p.depth):
        for row in range(first, last):
            place = p.first_row + row
            target = (place // PANEL * p.depth + k) * PANEL + place % PANEL
            store_float(np.float32(0), load_float(p.weight, row * p.row_stride + k), p.panels, target)


_STEP_POINTER, _PROJECTION_POINTER = types.CPointer(from_dtype(STEP)), types.CPointer(from_dtype(PROJECTION))
_PACKING_POINTER = types.CPointer(from_dtype(PACKING))


def build_functions(cache):
    """(run_stack, project, pack): the three functions, compiled or taken from numba's cache on disk."""

    @cfunc(types.void(_STEP_POINTER), cache=cache)
    def run_stack(step_pointer):
        step = carray(step_pointer, 1)[0]
        # As many as the library gave, which may be fewer than it was asked for.
        num_threads = call_for_int(step.team_size) if step.team_size != 0 else 1
        scratch = step.scratch + fetch_add(step.next_thread) * SCRATCH_FLOATS * F32_BYTES
        hidden_panels = (step.hidden_size + PANEL - 1) // PANEL
        qkv_panels = (step.q_size + 2 * step.kv_size + PANEL - 1) // PANEL
        arrivals = 0
        for number in range(step.num_layers):
            layer = carray(_layer_at(step.layers + number * LAYER_BYTES), 1)[0]
            call_address = step.attention_calls + number * CALL_BYTES
            call = carray(_call_at(call_address), 1)[0]
            counter = step.counters + number * COUNTERS_PER_LAYER * CACHE_LINE_BYTES

            _norm_phase(counter, step, layer.input_gain, layer.input_eps)
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _product_phase(
                counter + CACHE_LINE_BYTES, step.num_tokens, step.normed, step.normed_stride, step.hidden_size,
                layer.qkv, layer.qkv_bias, qkv_panels, scratch, step.qkv, step.qkv_stride, False,
            )  # fmt: skip
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _rotation_phase(counter + 2 * CACHE_LINE_BYTES, step, layer, call)
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            call_with_address(step.attend, call_address)
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _product_phase(
                counter + 3 * CACHE_LINE_BYTES, step.num_tokens, step.attended, step.attended_stride, step.q_size,
                layer.out, layer.out_bias, hidden_panels, scratch, step.hidden, step.hidden_stride, True,
            )  # fmt: skip
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _norm_phase(counter + 4 * CACHE_LINE_BYTES, step, layer.post_gain, layer.post_eps)
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _gate_phase(counter + 5 * CACHE_LINE_BYTES, step, layer, scratch)
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)
            _product_phase(
                counter + 6 * CACHE_LINE_BYTES, step.num_tokens, step.gated, step.gated_stride, step.intermediate_size,
                layer.down, layer.down_bias, hidden_panels, scratch, step.hidden, step.hidden_stride, True,
            )  # fmt: skip
            arrivals += num_threads
            wait_for_all(step.barrier, arrivals, step.syscall)

    @cfunc(types.void(_PROJECTION_POINTER), cache=cache)
    def project(projection_pointer):
        p = carray(projection_pointer, 1)[0]
        scratch = p.scratch + fetch_add(p.next_thread) * SCRATCH_FLOATS * F32_BYTES
        _product_phase(
            p.counter, p.num_rows, p.rows, p.row_stride, p.depth, p.weight, p.bias, p.num_panels, scratch, p.output,
            p.output_stride, False,
        )  # fmt: skip

    @cfunc(types.void(_PACKING_POINTER), cache=cache)
    def pack(packing_pointer):
        p = carray(packing_pointer, 1)[0]
        while True:
            first = fetch_add(p.counter) * PACKED_ROWS_PER_ITEM
            if first >= p.num_rows:
                return
            _pack_rows(p, first, min(first + PACKED_ROWS_PER_ITEM, p.num_rows))

    return run_stack, project, pack
