"""The loops of the `cpu` backend: one function writes a step's keys and values, one attends for the whole batch.

What lives here: numba code over plain addresses, no torch, no threads of its own. Both functions have C's calling
convention and take the address of one CALL record; any number of threads may run one of them at the same time with
the same record, and together they do the work once. The vector arithmetic is in `simd.py`; who calls this, and with
what, in `cpu.py`.

Work is cut into items: some queries of one sequence, for one KV head and all query heads that share it, so that a
key or value is loaded once for all of them. Threads take items from a shared counter. An item walks its context
from position 0 in tiles of TILE tokens with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022), so that a
query's result has the same bits in a chunk of a prompt, in a decode, in any batch, on any number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, cfunc, njit, types
from numba.np.numpy_support import from_dtype

from scheduler.model.attention.simd import (
    LANES,
    ROWS_MAX,
    SCORE_MIN,
    TILE,
    TILE_VECTORS,
    accumulate_tile,
    fetch_add,
    load_float,
    load_int32,
    load_int64,
    score_tile,
    softmax_tile,
    store_float,
    store_int64,
)

ITEM_ROWS_MAX = 48
"""Query rows (queries x heads of a group) of one item at most, unless one query alone has more."""
TOKENS_PER_WRITE = 16
"""Tokens whose keys and values a thread writes at a time."""
LOG2_E = math.log2(math.e)
F32_BYTES = 4
I32_BYTES = 4
I64_BYTES = 8

CALL = np.dtype(
    [
        (name, np.int64)
        for name in (
            "query",  # address of float32 [num_tokens, num_heads, head_dim]
            "query_stride",  # elements from token to token
            "key",  # address of float32 [num_tokens, num_kv_heads, head_dim]
            "key_stride",
            "value",  # like key
            "value_stride",
            "key_pool",  # address of (num_blocks, num_kv_heads, head_dim, block_size)
            "value_pool",  # address of (num_blocks, num_kv_heads, block_size, padded(head_dim))
            "output",  # address of float32 [num_tokens, num_heads, head_dim]
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "block_size",  # a multiple of LANES
            "element_bytes",  # of the pools
            "scratch",  # address of a piece per thread
            "scratch_stride",  # bytes, see scratch_size_bytes
            "num_tokens",
            "slots",  # address of int64 [num_tokens]
            "query_start",  # address of int32 [num_seqs + 1]
            "context_lens",  # address of int32 [num_seqs]
            "block_table",  # address of int32 [num_seqs, block_table_stride]
            "block_table_stride",
            "items",  # address of int32 [num_items, 4]: sequence, KV head, first query, number of queries
            "num_items",
            "next_write",  # addresses of three int64, 0 at the start: pieces of the writing handed out,
            "next_item",  # items handed out,
            "next_thread",  # pieces of scratch handed out
        )
    ]
    + [("scale", np.float64)],
)
"""All that one layer of one step needs. Addresses are bytes, strides elements unless said otherwise."""


def padded(head_dim: int) -> int:
    """Elements that a value row takes in the pool: whole vectors."""
    return -(-head_dim // LANES) * LANES


def num_item_rows_max(group_size: int) -> int:
    return max(ITEM_ROWS_MAX // group_size, 1) * group_size


def scratch_size_bytes(group_size: int, head_dim: int) -> int:
    """Bytes that one worker's scratch takes: see `_attend_item` for its parts."""
    num_rows = num_item_rows_max(group_size)
    floats = num_rows * (head_dim + padded(head_dim) + LANES + 1) + ROWS_MAX * TILE
    return -(-(floats * F32_BYTES + 3 * TILE_VECTORS * I64_BYTES) // 4096) * 4096 + 128


@njit
def write_tokens(kind, call, first, last):
    """Stores keys and values of tokens `first` … `last` - 1 of the flat row."""
    head_dim, block_size = call.head_dim, call.block_size
    value_dim = -(-head_dim // LANES) * LANES
    for token in range(first, last):
        slot = load_int64(call.slots, token)
        for head in range(call.num_kv_heads):
            block_head = slot // block_size * call.num_kv_heads + head
            key_start = block_head * head_dim * block_size + slot % block_size
            value_start = (block_head * block_size + slot % block_size) * value_dim
            key_source = token * call.key_stride + head * head_dim
            value_source = token * call.value_stride + head * head_dim
            for d in range(head_dim):
                store_float(kind, load_float(call.key, key_source + d), call.key_pool, key_start + d * block_size)
                store_float(kind, load_float(call.value, value_source + d), call.value_pool, value_start + d)


@njit
def _attend_item(kind, call, item, scratch):
    """Computes one item: row r of it is query `first_query + r // group_size`, head r % group_size of the group."""
    num_kv_heads, head_dim, block_size, element_bytes = (
        call.num_kv_heads, call.head_dim, call.block_size, call.element_bytes
    )  # fmt: skip
    group_size = call.num_heads // num_kv_heads
    value_dim = -(-head_dim // LANES) * LANES
    scale = np.float32(call.scale * LOG2_E)
    seq = load_int32(call.items, item * 4)
    kv_head = load_int32(call.items, item * 4 + 1)
    first_query = load_int32(call.items, item * 4 + 2)
    num_queries = load_int32(call.items, item * 4 + 3)
    num_rows = num_queries * group_size
    first_token = load_int32(call.query_start, seq) + first_query
    num_queries_of_seq = load_int32(call.query_start, seq + 1) - load_int32(call.query_start, seq)
    # Tokens that the item's first query sees; each further query sees one more.
    first_limit = load_int32(call.context_lens, seq) - num_queries_of_seq + first_query + 1
    block_table = call.block_table + seq * call.block_table_stride * I32_BYTES

    key_addresses = scratch
    value_addresses = key_addresses + TILE_VECTORS * I64_BYTES
    next_key_addresses = value_addresses + TILE_VECTORS * I64_BYTES
    queries = next_key_addresses + TILE_VECTORS * I64_BYTES
    outputs = queries + num_rows * head_dim * F32_BYTES
    sums = outputs + num_rows * value_dim * F32_BYTES
    maxima = sums + num_rows * LANES * F32_BYTES
    scores = maxima + num_rows * F32_BYTES

    for row in range(num_rows):
        head = kv_head * group_size + row % group_size
        start = (first_token + row // group_size) * call.query_stride + head * head_dim
        for d in range(head_dim):
            store_float(np.float32(0), load_float(call.query, start + d) * scale, queries, row * head_dim + d)
        for d in range(value_dim):
            store_float(np.float32(0), np.float32(0), outputs, row * value_dim + d)
        for lane in range(LANES):
            store_float(np.float32(0), np.float32(0), sums, row * LANES + lane)
        store_float(np.float32(0), np.float32(SCORE_MIN), maxima, row)

    last_limit = first_limit + num_queries - 1
    for tile_start in range(0, last_limit, TILE):
        num_vectors = (min(TILE, last_limit - tile_start) + LANES - 1) // LANES
        for vector in range(num_vectors):
            position = tile_start + vector * LANES
            block_head = load_int32(block_table, position // block_size) * num_kv_heads + kv_head
            offset = position % block_size
            key_address = call.key_pool + (block_head * head_dim * block_size + offset) * element_bytes
            value_address = call.value_pool + (block_head * block_size + offset) * value_dim * element_bytes
            store_int64(key_address, key_addresses, vector)
            store_int64(value_address, value_addresses, vector)
            position += TILE
            if position < last_limit:
                block_head = load_int32(block_table, position // block_size) * num_kv_heads + kv_head
                offset = position % block_size
                key_address = call.key_pool + (block_head * head_dim * block_size + offset) * element_bytes
            store_int64(key_address, next_key_addresses, vector)
        for first_row in range(0, num_rows, ROWS_MAX):
            rows = min(ROWS_MAX, num_rows - first_row)
            num_seen = min(TILE, first_limit + (first_row + rows - 1) // group_size - tile_start)
            if num_seen <= 0:
                continue
            row_queries = queries + first_row * head_dim * F32_BYTES
            row_outputs = outputs + first_row * value_dim * F32_BYTES
            num_vectors = (num_seen + LANES - 1) // LANES
            if num_vectors == TILE_VECTORS:
                score_tile(
                    kind, rows, TILE_VECTORS, head_dim, row_queries, key_addresses, block_size, value_addresses, scores
                )  # fmt: skip
            else:
                for vector in range(num_vectors):
                    score_tile(
                        kind, rows, 1, head_dim, row_queries, key_addresses + vector * I64_BYTES, block_size,
                        value_addresses + vector * I64_BYTES, scores + vector * LANES * F32_BYTES,
                    )  # fmt: skip
            for row in range(rows):
                softmax_tile(
                    kind,
                    first_limit + (first_row + row) // group_size - tile_start,
                    scores + row * TILE * F32_BYTES,
                    value_dim,
                    maxima + (first_row + row) * F32_BYTES,
                    sums + (first_row + row) * LANES * F32_BYTES,
                    row_outputs + row * value_dim * F32_BYTES,
                )
            for vector in range(num_vectors):
                num_tokens = min(LANES, num_seen - vector * LANES)
                weights = scores + vector * LANES * F32_BYTES
                values = load_int64(value_addresses, vector)
                ahead = load_int64(next_key_addresses, vector)
                ahead_step = block_size * element_bytes
                start = 0
                while start < value_dim:
                    left = (value_dim - start) // LANES
                    width = 4 if left >= 4 else 2 if left >= 2 else 1
                    accumulate_tile(
                        kind, rows, num_tokens, width, weights, values + start * element_bytes, value_dim,
                        ahead + start // LANES * ahead_step, ahead_step, row_outputs + start * F32_BYTES,
                    )  # fmt: skip
                    start += width * LANES

    for row in range(num_rows):
        total = np.float32(0)
        for lane in range(LANES):
            total += load_float(sums, row * LANES + lane)
        factor = np.float32(1) / total
        token = first_token + row // group_size
        start = (token * call.num_heads + kv_head * group_size + row % group_size) * head_dim
        for d in range(head_dim):
            store_float(np.float32(0), load_float(outputs, row * value_dim + d) * factor, call.output, start + d)


CALL_POINTER = types.CPointer(from_dtype(CALL))


def build_functions(kind, cache):
    """(write, attend): the two functions for pools of `kind`, compiled or taken from numba's cache on disk.

    `kind` is a numpy scalar whose type tells the pools', see `simd.POOL_KINDS`. Each result has the function's
    address. `write` must be done on all threads before `attend` begins: a step's tokens see each other.
    """

    @cfunc(types.void(CALL_POINTER), cache=cache)
    def write(call_pointer):
        call = carray(call_pointer, 1)[0]
        while True:
            first = fetch_add(call.next_write) * TOKENS_PER_WRITE
            if first >= call.num_tokens:
                return
            write_tokens(kind, call, first, min(first + TOKENS_PER_WRITE, call.num_tokens))

    @cfunc(types.void(CALL_POINTER), cache=cache)
    def attend(call_pointer):
        call = carray(call_pointer, 1)[0]
        scratch = call.scratch + fetch_add(call.next_thread) * call.scratch_stride
        while True:
            item = fetch_add(call.next_item)
            if item >= call.num_items:
                return
            _attend_item(kind, call, item, scratch)

    return write, attend
