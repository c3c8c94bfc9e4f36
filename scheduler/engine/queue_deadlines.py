"""Until when each request may wait for its first step.

What lives here: the deadlines of those that have one, and which are over. What must not: a clock (the time is handed
in), or what becomes of a request that is late (`engine_core.py`).

A heap, so that a step costs the same however many wait. Whether a request still waits is asked of the scheduler when
its turn comes; entries of those that do not are dropped then, or when the heap has doubled since it was last tidied.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

_NUM_ENTRIES_SPARED = 64
"""Fewer are not worth tidying."""


class QueueDeadlines:
    """add() in O(log n), amortised; the rest in O(log n) for each entry that goes."""

    def __init__(self, has_run: Callable[[int], bool]) -> None:
        """`has_run`: whether a request waits for its first step no more, for whatever reason."""
        self._has_run = has_run
        self._heap: list[tuple[float, int]] = []
        self._tidy_at = _NUM_ENTRIES_SPARED

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: int, deadline_s: float) -> None:
        heappush(self._heap, (deadline_s, request_id))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in self._heap if not self._has_run(entry[1])]
            heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + _NUM_ENTRIES_SPARED

    def take_expired(self, now_s: float) -> list[int]:
        """The requests whose deadline is over and that have not run; they are told once."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heappop(self._heap)
            if not self._has_run(request_id):
                expired.append(request_id)
        return expired

    def next_s(self) -> float | None:
        """When the next deadline of one that waits is over, or None."""
        while self._heap and self._has_run(self._heap[0][1]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
