"""The loops of the `cpu` backend: one call writes a step's keys and values and attends for the whole batch.

What lives here: numba code over plain addresses, no torch. The vector arithmetic is in `simd.py`; who calls this, and
with what, in `cpu.py`.

Work is cut into items: the queries of one tile of one sequence, for one KV head and all query heads that share it, so
that a key or value is loaded once for all of them. Workers take items from a shared counter. An item walks its
context from position 0 in tiles of TILE tokens with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022), so
that a query's result has the same bits in a chunk of a prompt, in a decode, in any batch, on any number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from scheduler.model.attention.simd import (
    LANES,
    ROWS_MAX,
    SCORE_MIN,
    TILE,
    TILE_VECTORS,
    accumulate_tile,
    fetch_add,
    load_float,
    load_int64,
    score_tile,
    softmax_tile,
    store_float,
    store_int64,
)

ITEM_ROWS_MAX = 48
"""Query rows (queries x heads of a group) of one item at most, unless one query alone has more."""
TOKENS_WRITTEN_SERIALLY_MAX = 64
"""Up to so many tokens the writing of keys and values costs less than a parallel region."""
LOG2_E = math.log2(math.e)
F32_BYTES = 4
I64_BYTES = 8


def padded(head_dim: int) -> int:
    """Elements that a value row takes in the pool: whole vectors."""
    return -(-head_dim // LANES) * LANES


def num_item_rows_max(group_size: int) -> int:
    return max(ITEM_ROWS_MAX // group_size, 1) * group_size


def scratch_size_bytes(group_size: int, head_dim: int) -> int:
    """Bytes that one worker's scratch takes: see `_attend_item` for its parts."""
    num_rows = num_item_rows_max(group_size)
    floats = num_rows * (head_dim + padded(head_dim) + LANES + 1) + ROWS_MAX * TILE
    return -(-(floats * F32_BYTES + 2 * TILE_VECTORS * I64_BYTES) // 4096) * 4096 + 128


@njit(inline="never")
def _write_tokens(kind, first, last, key, key_stride, value, value_stride, key_pool, value_pool, slots, shape):
    """Stores keys and values of tokens `first` … `last` - 1 of the flat row."""
    num_heads, num_kv_heads, head_dim, block_size, _ = shape
    value_dim = -(-head_dim // LANES) * LANES
    for token in range(first, last):
        block_id = slots[token] // block_size
        offset = slots[token] % block_size
        for head in range(num_kv_heads):
            key_start = (block_id * num_kv_heads + head) * head_dim * block_size + offset
            value_start = ((block_id * num_kv_heads + head) * block_size + offset) * value_dim
            for d in range(head_dim):
                index = head * head_dim + d
                store_float(kind, load_float(key, token * key_stride + index), key_pool, key_start + d * block_size)
                store_float(kind, load_float(value, token * value_stride + index), value_pool, value_start + d)


@njit(inline="never")
def _attend_item(
    kind, item, query, query_stride, key_pool, value_pool, query_start, context_lens, block_table, scratch, scale,
    output, shape,
):  # fmt: skip
    """Computes one item: row r of it is query `first_query + r // group_size`, head r % group_size of the group."""
    num_heads, num_kv_heads, head_dim, block_size, element_bytes = shape
    group_size = num_heads // num_kv_heads
    value_dim = -(-head_dim // LANES) * LANES
    seq, kv_head, first_query, num_queries = item
    num_rows = num_queries * group_size
    first_token = query_start[seq] + first_query
    num_queries_of_seq = query_start[seq + 1] - query_start[seq]
    first_limit = context_lens[seq] - num_queries_of_seq + first_query + 1
    """Tokens that the item's first query sees; each further query sees one more."""

    key_addresses = scratch
    value_addresses = key_addresses + TILE_VECTORS * I64_BYTES
    queries = value_addresses + TILE_VECTORS * I64_BYTES
    outputs = queries + num_rows * head_dim * F32_BYTES
    sums = outputs + num_rows * value_dim * F32_BYTES
    maxima = sums + num_rows * LANES * F32_BYTES
    scores = maxima + num_rows * F32_BYTES

    for row in range(num_rows):
        start = (first_token + row // group_size) * query_stride + (kv_head * group_size + row % group_size) * head_dim
        for d in range(head_dim):
            store_float(np.float32(0), load_float(query, start + d) * scale, queries, row * head_dim + d)
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
            block_head = np.int64(block_table[seq, position // block_size]) * num_kv_heads + kv_head
            offset = position % block_size
            key_address = key_pool + (block_head * head_dim * block_size + offset) * element_bytes
            value_address = value_pool + (block_head * block_size + offset) * value_dim * element_bytes
            store_int64(key_address, key_addresses, vector)
            store_int64(value_address, value_addresses, vector)
        for first_row in range(0, num_rows, ROWS_MAX):
            rows = min(ROWS_MAX, num_rows - first_row)
            num_seen = min(TILE, first_limit + (first_row + rows - 1) // group_size - tile_start)
            if num_seen <= 0:
                continue
            row_queries = queries + first_row * head_dim * F32_BYTES
            row_outputs = outputs + first_row * value_dim * F32_BYTES
            num_vectors = (num_seen + LANES - 1) // LANES
            if num_vectors == TILE_VECTORS:
                score_tile(kind, rows, TILE_VECTORS, head_dim, row_queries, key_addresses, block_size, scores)
            else:
                for vector in range(num_vectors):
                    score_tile(
                        kind, rows, 1, head_dim, row_queries, key_addresses + vector * I64_BYTES, block_size,
                        scores + vector * LANES * F32_BYTES,
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
                start = 0
                while start < value_dim:
                    left = (value_dim - start) // LANES
                    width = 4 if left >= 4 else 2 if left >= 2 else 1
                    accumulate_tile(
                        kind, rows, num_tokens, width, weights, values + start * element_bytes, value_dim,
                        row_outputs + start * F32_BYTES,
                    )  # fmt: skip
                    start += width * LANES

    for row in range(num_rows):
        total = np.float32(0)
        for lane in range(LANES):
            total += load_float(sums, row * LANES + lane)
        factor = np.float32(1) / total
        token = first_token + row // group_size
        start = (token * num_heads + kv_head * group_size + row % group_size) * head_dim
        for d in range(head_dim):
            store_float(np.float32(0), load_float(outputs, row * value_dim + d) * factor, output, start + d)


@njit(inline="never")
def _work(
    kind, items, counter, query, query_stride, key_pool, value_pool, query_start, context_lens, block_table, scratch,
    scale, output, shape,
):  # fmt: skip
    """One worker: takes items until none is left."""
    while True:
        index = fetch_add(counter)
        if index >= len(items):
            return
        item = (items[index, 0], items[index, 1], items[index, 2], items[index, 3])
        _attend_item(
            kind, item, query, query_stride, key_pool, value_pool, query_start, context_lens, block_table, scratch,
            scale, output, shape,
        )  # fmt: skip


def attend(
    kind, query, query_stride, key, key_stride, value, value_stride, key_pool, value_pool, slots, query_start,
    context_lens, block_table, items, num_workers, scratch, scratch_stride, counter, scale, output, shape,
):  # fmt: skip
    """One layer of one step: all keys and values are written, then all items computed.

    `kind`: scalar whose type tells the pools' (`simd.POOL_KINDS`). `query`, `key`, `value`: addresses of float32 rows
    [T, heads * head_dim], with strides in elements. `key_pool`: address of (num_blocks, num_kv_heads, head_dim,
    block_size), `value_pool`: of (num_blocks, num_kv_heads, block_size, padded(head_dim)). `items`: int32 [n, 4] of
    (sequence, KV head, first query, number of queries). `scratch`: `num_workers` pieces, `scratch_stride` bytes
    apart. `counter`: address of an int64. `output`: address of float32 [T, num_heads, head_dim]. `shape`:
    (num_heads, num_kv_heads, head_dim, block_size, bytes per pool element). `block_size` is a multiple of LANES.
    """
    num_tokens = len(slots)
    scale = np.float32(scale * LOG2_E)
    store_int64(0, counter, 0)
    if num_workers == 1:
        _write_tokens(kind, 0, num_tokens, key, key_stride, value, value_stride, key_pool, value_pool, slots, shape)
        _work(
            kind, items, counter, query, query_stride, key_pool, value_pool, query_start, context_lens, block_table,
            scratch, scale, output, shape,
        )  # fmt: skip
        return
    if num_tokens <= TOKENS_WRITTEN_SERIALLY_MAX:
        _write_tokens(kind, 0, num_tokens, key, key_stride, value, value_stride, key_pool, value_pool, slots, shape)
    else:
        share = (num_tokens + num_workers - 1) // num_workers
        for worker in prange(num_workers):
            first = min(worker * share, num_tokens)
            last = min(first + share, num_tokens)
            _write_tokens(
                kind, first, last, key, key_stride, value, value_stride, key_pool, value_pool, slots, shape
            )  # fmt: skip
    for worker in prange(num_workers):
        _work(
            kind, items, counter, query, query_stride, key_pool, value_pool, query_start, context_lens, block_table,
            scratch + worker * scratch_stride, scale, output, shape,
        )  # fmt: skip
