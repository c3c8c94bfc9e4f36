"""The waiting line, in order of precedence (see `request.py`).

What must not be here: a limit (admission at the front end bounds the line), or a decision about who is served.

What waits is a sequence. Since the order is fixed for life, a preempted one comes back ahead of everything of its
priority that arrived later. The line is a heap; removal only forgets the entry, which is dropped when it surfaces or
when such entries outnumber the live ones. One that comes back has two entries then, equal in all, and the second to
surface is dropped.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from scheduler.core.request import Order, Sequence

_NUM_STALE_ENTRIES_SPARED = 64
"""Stale entries below this number are not worth a rebuild."""


class RequestQueue:
    """push and pop in O(log n), peek and remove in amortised O(1) and O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._live_seq_ids: set[int] = set()
        self.num_tokens = 0
        """Tokens that those in line still have to compute."""

    def __len__(self) -> int:
        return len(self._live_seq_ids)

    def push(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._live_seq_ids
        heappush(self._heap, (sequence.order, sequence))
        self._live_seq_ids.add(sequence.seq_id)
        self.num_tokens += sequence.num_uncomputed_tokens

    def peek(self) -> Sequence | None:
        """The first in line, or None."""
        heap = self._heap
        while heap:
            sequence = heap[0][1]
            if sequence.seq_id in self._live_seq_ids:
                return sequence
            heappop(heap)
        return None

    def pop(self) -> Sequence:
        """Take the first out of the line, which must not be empty."""
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
        heappop(self._heap)
        self._forget(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out of the line, wherever it stands. Its number of tokens must be what it was when it came."""
        self._forget(sequence)
        if len(self._heap) > 2 * len(self._live_seq_ids) + _NUM_STALE_ENTRIES_SPARED:
            live = {entry[1].seq_id: entry for entry in self._heap if entry[1].seq_id in self._live_seq_ids}
            self._heap = list(live.values())
            heapify(self._heap)

    def _forget(self, sequence: Sequence) -> None:
        self._live_seq_ids.remove(sequence.seq_id)
        self.num_tokens -= sequence.num_uncomputed_tokens
