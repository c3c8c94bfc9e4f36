"""How long each request waited in this engine for its first step: told with its first output.

What lives here: two tables of times, empty for whoever has been told. What must not: decisions; nothing waits shorter
or longer for what is noted here. Its caller says what has happened (`arrived`, `scheduled`, `forget`); `stamp` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from scheduler.messages import SequenceOutput


class QueueTimes:
    """Of the requests of one engine, by their ids."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_s: dict[int, float] = {}
        self._queue_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._arrived_s) + len(self._queue_s)

    def arrived(self, request_id: int) -> None:
        """It came off the socket."""
        self._arrived_s[request_id] = self._clock()

    def scheduled(self, request_ids: Iterable[int]) -> None:
        """These are in the step that begins now; the first one of each counts."""
        if not self._arrived_s:
            return
        now_s = self._clock()
        for request_id in request_ids:
            arrived_s = self._arrived_s.pop(request_id, None)
            if arrived_s is not None:
                self._queue_s[request_id] = now_s - arrived_s

    def stamp(self, outputs: Sequence[SequenceOutput]) -> Sequence[SequenceOutput]:
        """The outputs, each request's first one with its time; without one where there was no step before it: resumed
        tokens that were all there is.
        """
        if not len(self):
            return outputs
        return [self._stamped(output) for output in outputs]

    def forget(self, request_ids: Iterable[int]) -> None:
        """They are gone without an output; unknown ids are ignored."""
        for request_id in request_ids:
            self._arrived_s.pop(request_id, None)
            self._queue_s.pop(request_id, None)

    def _stamped(self, output: SequenceOutput) -> SequenceOutput:
        self._arrived_s.pop(output.request_id, None)
        queue_s = self._queue_s.pop(output.request_id, None)
        return output if queue_s is None else replace(output, queue_s=queue_s)
