"""Who waits, in which line, and who of them is let in next.

What lives here: four lines and the rule that tells a waiting sequence's own. What must not: seats, blocks, or who
gives way (`scheduler.py`).

- **batch**: those that will share their steps.
- **alone**: those whose steps must hold nothing else for now (`Sequence.is_alone`). One of them runs at a time, so
  that while it does the rest of its line is passed over, and nobody in the batch line waits for them.
- **held**: those that a confinement leaves out. They keep their precedence and nothing else happens to them.
- **paused**: those of paused requests, likewise.

The line is a function of the sequence, of its request's pause and of the confinement, and none of these changes for a
sequence that waits, except in `confine` and `unconfine`, which sort all of them anew, and in `Roster.pause` and
`unpause`, which take it out before and put it back after. So a sequence is always found where it was put.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.request import Sequence
from scheduler.core.request_queue import RequestQueue


class WaitingLines:
    def __init__(self) -> None:
        self.batch = RequestQueue()
        self.alone = RequestQueue()
        self._held = RequestQueue()
        self._paused = RequestQueue()
        self._confined_to: frozenset[int] | None = None
        """The requests that may run; None: all."""

    def __len__(self) -> int:
        return len(self.batch) + len(self.alone) + len(self._held) + len(self._paused)

    @property
    def num_tokens(self) -> int:
        """Tokens that those in line still have to compute."""
        return self.batch.num_tokens + self.alone.num_tokens + self._held.num_tokens + self._paused.num_tokens

    @property
    def has_candidates(self) -> bool:
        """Whether anybody waits who is neither held nor paused."""
        return bool(self.batch or self.alone)

    def push(self, sequence: Sequence) -> None:
        self._line_of(sequence).push(sequence)

    def pop(self, sequence: Sequence) -> None:
        """Take out one that is at the front of its line."""
        popped = self._line_of(sequence).pop()
        assert popped is sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one, wherever it stands."""
        self._line_of(sequence).remove(sequence)

    def front(self, *, is_alone_taken: bool) -> Sequence | None:
        """The first in precedence that may be let in. `is_alone_taken`: one that runs alone is running already."""
        front = self.batch.peek()
        alone = None if is_alone_taken else self.alone.peek()
        if alone is not None and (front is None or alone.order < front.order):
            return alone
        return front

    def confine(self, request_ids: Iterable[int]) -> None:
        """Hold everybody but the sequences of these requests, those included that are yet to come."""
        self._sort_anew(frozenset(request_ids))

    def unconfine(self) -> None:
        self._sort_anew(None)

    def _sort_anew(self, confined_to: frozenset[int] | None) -> None:
        sequences = [line.pop() for line in (self.batch, self.alone, self._held) for _ in range(len(line))]
        self._confined_to = confined_to
        for sequence in sequences:
            self.push(sequence)

    def _line_of(self, sequence: Sequence) -> RequestQueue:
        if sequence.request.is_paused:
            return self._paused
        if self._confined_to is not None and sequence.request_id not in self._confined_to:
            return self._held
        return self.alone if sequence.is_alone else self.batch
