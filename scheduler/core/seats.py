"""Who runs: the sequences that have a seat, in order of precedence, and what each of them needs of the next step.

What lives here: the list, who of it has caught up, who runs outside the batch, and when whose next block is due. What
must not: blocks themselves, or the choice of who sits and who rises (`scheduler.py`).

**Why a steady step is cheap.** While the same sequences decode, the lists of the plan are those of the last one
(`refresh_decodes`), and the sequences that need a block in this step are found by the number of the batch step, without
looking at the others (`begin_batch_step`). Batch steps have numbers of their own because a sequence that sits a step
out does not grow in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler.core.request import Sequence

_order_of = attrgetter("order")


class Seats:
    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        """All that run, in order of precedence."""
        self.alone: Sequence | None = None
        """The one of them that is outside the batch, if any."""
        self.num_behind = 0
        """Sequences of the batch that have not caught up."""
        self._growth: dict[int, list[Sequence]] = {}
        """Number of a batch step → sequences that need a block then. Entries of those that left are void."""
        self._num_batch_steps = 0
        # Of the last batch step: the running sequences that had caught up. Replaced, never changed.
        self.decodes: list[Sequence] = []
        self.decode_ids: tuple[int, ...] = ()
        self.decode_request_ids: tuple[int, ...] = ()
        self.ones: tuple[int, ...] = ()
        self._decodes_changed = False

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_decodes(self) -> int:
        """Sequences that take one token of each batch step."""
        return len(self.sequences) - self.num_behind - (self.alone is not None)

    def behind(self) -> list[Sequence]:
        """Those of the batch that have tokens to compute and can: a sibling may have to come first."""
        return [
            sequence
            for sequence in self.sequences
            if not sequence.is_caught_up and sequence is not self.alone and sequence.provider is None
        ]

    def add(self, sequence: Sequence) -> None:
        """It sits down, with tokens to catch up with."""
        insort(self.sequences, sequence, key=_order_of)
        if sequence.is_alone:
            self.alone = sequence
        else:
            self.num_behind += 1

    def remove(self, sequence: Sequence) -> None:
        """It rises."""
        position = bisect_left(self.sequences, sequence.order, key=_order_of)
        assert self.sequences[position] is sequence
        del self.sequences[position]
        if sequence is self.alone:
            self.alone = None
        elif sequence.is_caught_up:
            self._decodes_changed = True
        else:
            self.num_behind -= 1
        sequence.is_caught_up = False
        sequence.growth_batch_step = 0

    def clear(self) -> None:
        """All rise."""
        for sequence in self.sequences:
            sequence.is_caught_up = False
            sequence.growth_batch_step = 0
        self.sequences.clear()
        self.alone = None
        self.num_behind = 0
        self._growth.clear()
        self._decodes_changed = True

    def catch_up(self, sequence: Sequence, num_slots_left: int) -> None:
        """From the next batch step on, `sequence` computes its newest token in each."""
        if sequence is self.alone:
            self.alone = None
        else:
            self.num_behind -= 1
        sequence.is_caught_up = True
        self._decodes_changed = True
        self._foresee_growth(sequence, self._num_batch_steps + 1, num_slots_left)

    def begin_batch_step(self) -> list[Sequence]:
        """Count one more batch step. Returns, in order, the sequences that need a block in it."""
        self._num_batch_steps += 1
        due = self._growth.pop(self._num_batch_steps, None)
        if due is None:
            return []
        # Some may have left since, and even come back.
        return sorted((s for s in due if s.growth_batch_step == self._num_batch_steps), key=_order_of)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether it is one of the last `begin_batch_step` that still sits, and has not been given its block."""
        return sequence.growth_batch_step == self._num_batch_steps

    def has_grown(self, sequence: Sequence, num_slots_left: int) -> None:
        """It has been given its block for this batch step."""
        self._foresee_growth(sequence, self._num_batch_steps, num_slots_left)

    def refresh_decodes(self) -> None:
        """Make the lists of those that have caught up, if they are not what they were."""
        if self._decodes_changed:
            self.decodes = [sequence for sequence in self.sequences if sequence.is_caught_up]
            self.decode_ids = tuple([sequence.seq_id for sequence in self.decodes])
            self.decode_request_ids = tuple([sequence.request_id for sequence in self.decodes])
            self.ones = (1,) * len(self.decodes)
            self._decodes_changed = False

    def _foresee_growth(self, sequence: Sequence, batch_step: int, num_slots_left: int) -> None:
        """Note when `sequence`, which from this batch step on computes one token in each, needs its next block."""
        sequence.growth_batch_step = batch_step + num_slots_left
        self._growth.setdefault(sequence.growth_batch_step, []).append(sequence)
