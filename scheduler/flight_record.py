"""The layout of the flight recorder: a page of shared memory that outlives the engine process, SIGKILL included.

The engine writes, the front end reads: for its hang watch, and at a death for the record. Standard library only, for
both sides import it. It holds counts, shapes and the server's own numbers of requests, never ids of tokens or text.

One header tells where the loop is now; a ring of `NUM_STEPS` entries tells the shapes of the last steps, entry
`step_id % NUM_STEPS`; two tables, used in turn, tell which requests are in the present step and were in the one before
(blame goes by that). There is one writer. A sequence counter, odd while the header is being written, lets the reader
notice a torn header (a seqlock); a writer killed in mid-write leaves it odd for ever, so the reader gives up after a
few tries and takes what is there: at a death, nearly right beats nothing.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import Phase

NUM_STEPS = 16
NUM_REQUESTS_MAX = 4096
"""Requests of one step that are recorded by number; as many as `--max-num-seqs` allows."""
_HEADER = struct.Struct("<QQQQQ")  # sequence counter, phase, since_monotonic_ns, step_id, num_messages_received
_STEP = struct.Struct("<QIIIII")  # step_id, num_seqs, num_batched_tokens, num_new, num_preempted, max_query_len
_TABLE = struct.Struct("<QQ")  # step_id, number of requests; their numbers follow
_STEPS_OFFSET = 64
_TABLES_OFFSET = mmap.PAGESIZE
_TABLE_BYTES = _TABLE.size + 8 * NUM_REQUESTS_MAX
SIZE_BYTES = _TABLES_OFFSET + 2 * _TABLE_BYTES
_READ_TRIES_MAX = 8
_PHASES = frozenset(Phase)

assert _STEPS_OFFSET + NUM_STEPS * _STEP.size <= _TABLES_OFFSET


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step was made of."""

    step_id: int
    num_seqs: int
    num_batched_tokens: int
    num_new: int
    num_preempted: int
    max_query_len: int

    def __str__(self) -> str:
        return (
            f"step {self.step_id}: num_seqs={self.num_seqs} num_batched_tokens={self.num_batched_tokens} "
            f"num_new={self.num_new} num_preempted={self.num_preempted} max_query_len={self.max_query_len}"
        )


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """Where the engine is, or was when it died."""

    phase: Phase
    since_monotonic_ns: int
    """CLOCK_MONOTONIC when this phase began; that clock is the same in all processes of a machine."""
    step_id: int
    """The step being made, or the last one made; 0 before the first."""
    num_messages_received: int
    """Messages taken off the socket since the start, the configuration not counted."""
    steps: tuple[StepShape, ...]
    """The last steps, newest first."""

    @property
    def batch(self) -> str:
        """The shapes of the newest step, or an empty string before the first."""
        return str(self.steps[0]) if self.steps else ""


class FlightReader:
    """The front end's view. Close it when the death record is written."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE_BYTES, access=mmap.ACCESS_READ)

    def read(self) -> FlightRecord:
        """Where the engine is now. Costs microseconds; never blocks, never raises: an engine whose memory went wrong
        may have written anything here, and its death must be told all the same.
        """
        for _ in range(_READ_TRIES_MAX):
            before, phase, since_ns, step_id, num_messages = _HEADER.unpack_from(self._map, 0)
            (after,) = struct.unpack_from("<Q", self._map, 0)
            if before == after and before % 2 == 0:
                break
        shapes = (StepShape(*_STEP.unpack_from(self._map, _STEPS_OFFSET + i * _STEP.size)) for i in range(NUM_STEPS))
        steps = tuple(sorted((shape for shape in shapes if shape.step_id), key=lambda shape: -shape.step_id))
        known = phase if phase in _PHASES else Phase.EXECUTE  # a phase that the hang watch holds to its deadline
        return FlightRecord(Phase(known), since_ns, step_id, num_messages, steps)

    def request_ids(self, step_id: int) -> tuple[int, ...] | None:
        """The requests that are in this step; None if they are not recorded (any more)."""
        offset = _table_offset(step_id)
        recorded_step_id, count = _TABLE.unpack_from(self._map, offset)
        if recorded_step_id != step_id or step_id == 0 or count > NUM_REQUESTS_MAX:
            return None
        return struct.unpack_from(f"<{count}Q", self._map, offset + _TABLE.size)

    def close(self) -> None:
        """Release the mapping; the descriptor stays the caller's."""
        self._map.close()


class FlightWriter:
    """The engine's view: a few stores per phase."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE_BYTES)
        self._sequence = 0
        self._request_ids: list[Sequence[int]] = [(), ()]

    def enter(self, phase: Phase, *, now_ns: int, step_id: int, num_messages_received: int) -> None:
        """The loop is in `phase` since `now_ns` (CLOCK_MONOTONIC)."""
        self._sequence += 2
        struct.pack_into("<Q", self._map, 0, self._sequence - 1)
        _HEADER.pack_into(self._map, 0, self._sequence - 1, phase, now_ns, step_id, num_messages_received)
        struct.pack_into("<Q", self._map, 0, self._sequence)

    def record(self, shape: StepShape, request_ids: Sequence[int]) -> None:
        """Before the step runs: what it is made of, and whose it is. `step_id` is at least 1.

        The numbers are written only if they are not the very object written there last: a steady batch costs nothing.
        """
        table = shape.step_id % 2
        table_offset = _table_offset(shape.step_id)
        count = min(len(request_ids), NUM_REQUESTS_MAX)
        if request_ids is not self._request_ids[table]:
            _TABLE.pack_into(self._map, table_offset, 0, 0)  # void while it is being written
            struct.pack_into(f"<{count}Q", self._map, table_offset + _TABLE.size, *request_ids[:count])
            self._request_ids[table] = request_ids
        _TABLE.pack_into(self._map, table_offset, shape.step_id, count)
        offset = _STEPS_OFFSET + (shape.step_id % NUM_STEPS) * _STEP.size
        _STEP.pack_into(
            self._map,
            offset,
            shape.step_id,
            shape.num_seqs,
            shape.num_batched_tokens,
            shape.num_new,
            shape.num_preempted,
            shape.max_query_len,
        )


def _table_offset(step_id: int) -> int:
    return _TABLES_OFFSET + (step_id % 2) * _TABLE_BYTES
