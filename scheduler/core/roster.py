"""Where each sequence is, and every move from one place to another.

What lives here: the requests that are here, their sequences' places (in line, on a seat, parked, gone) with what each
place implies for blocks and for what the runner knows, and the totals of such moves. What must not: who moves when
(`scheduler.py`).

A sequence that is not finished is on a seat or in line; a parked one is in line and has blocks. What the runner must be
told of a move is told by whoever plans the step: `is_known` and `is_placed` say what it knows.
"""

from __future__ import annotations

from scheduler.core.kv_cache_manager import KVCacheManager, Start
from scheduler.core.request import Request, Sequence, SequenceStatus
from scheduler.core.seats import Seats
from scheduler.core.waiting_lines import WaitingLines

_RUNNING = SequenceStatus.RUNNING


class Roster:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.requests: dict[int, Request] = {}
        self.waiting = WaitingLines()
        """All that have no seat, parked ones included."""
        self.seats = Seats()
        self.parked: list[Sequence] = []
        """All that have blocks and no seat; the last to be parked is the first to lose them."""
        self.is_admission_open = True
        """False once the first in line found no room; true again when somebody ends or arrives, or the rules change."""
        self.finished_seq_ids: list[int] = []
        """Sequences the runner knows and has not been told to forget."""
        self.num_preemptions_total = 0
        self.num_prompt_tokens_total = 0
        self.num_cached_tokens_total = 0

    def arrive(self, request: Request) -> None:
        """It is here from now on, and in line."""
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            self.waiting.push(sequence)
        self.is_admission_open = True

    def admit(self, sequence: Sequence, start: Start) -> list[int]:
        """From the front of a line to a seat. Returns the blocks that one gets which the runner has placed already."""
        self.waiting.pop(sequence)
        block_ids: list[int] = []
        if sequence.status is SequenceStatus.PARKED:
            self.parked.remove(sequence)
            block_ids = self._kv.complete(sequence)
        else:
            self._kv.allocate(sequence, start)
        request = sequence.request
        if not request.has_run:  # once per request: what its sequences share among them is no gift of the cache
            request.has_run = True
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_prompt_tokens_total += sequence.num_prompt_tokens
            self.num_cached_tokens_total += sequence.num_cached_tokens
        sequence.move_to(_RUNNING)
        self.seats.add(sequence)
        return block_ids

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running or parked sequence."""
        sequence.is_placed = False
        if sequence.status is _RUNNING:
            self._rise(sequence)
        else:
            self.parked.remove(sequence)
            self.waiting.remove(sequence)
            self._queue(sequence)
        self.num_preemptions_total += 1

    def pause(self, request: Request) -> None:
        """Into the line of the paused, from wherever its sequences are."""
        if request.is_paused:
            return
        unfinished = request.unfinished
        for sequence in unfinished:
            if sequence.status is not _RUNNING:
                self.waiting.remove(sequence)
        request.is_paused = True
        for sequence in reversed(unfinished):  # whoever waits for a sibling rises first
            if sequence.status is _RUNNING:
                self._rise(sequence)
            else:
                self.waiting.push(sequence)
        self.is_admission_open = True

    def unpause(self, request: Request) -> None:
        """Back to the lines of those who may be let in."""
        if not request.is_paused:
            return
        unfinished = request.unfinished
        for sequence in unfinished:
            self.waiting.remove(sequence)
        request.is_paused = False
        for sequence in unfinished:
            self.waiting.push(sequence)
        self.is_admission_open = True

    def end_all(self, request: Request, *, distrust: bool = False) -> None:
        """Finish what is not finished of a request."""
        for sequence in request.unfinished:
            self.end(sequence, distrust=distrust)

    def end(self, sequence: Sequence, *, distrust: bool = False) -> None:
        """Finish a sequence, wherever it is. `distrust` keeps its blocks' contents out of the prefix cache."""
        if sequence.is_known:
            self.finished_seq_ids.append(sequence.seq_id)
        if sequence.status is _RUNNING:
            self._leave_seat(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.status is SequenceStatus.PARKED:
            self.parked.remove(sequence)
        if distrust:
            self._kv.free_and_forget(sequence)
        else:
            self._kv.free(sequence)
        sequence.move_to(SequenceStatus.FINISHED)
        self.is_admission_open = True
        if sequence.request.is_finished:
            del self.requests[sequence.request_id]

    def vacate(self) -> None:
        """All go back to the line without blocks, and the runner knows nobody."""
        self.seats.clear()
        self.parked.clear()
        self.finished_seq_ids.clear()
        for request in self.requests.values():
            for sequence in request.unfinished:
                if sequence.status is SequenceStatus.WAITING:
                    continue
                if sequence.status is not _RUNNING:
                    self.waiting.remove(sequence)
                sequence.is_known = sequence.is_placed = False
                self._queue(sequence)
        self.is_admission_open = True

    def _rise(self, sequence: Sequence) -> None:
        """From its seat back to the line. It keeps its blocks if the runner has them."""
        self._leave_seat(sequence)
        if sequence.is_placed:
            sequence.move_to(SequenceStatus.PARKED)
            self.parked.append(sequence)
            self.waiting.push(sequence)
        else:
            self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Put one that is nowhere, and gives up its blocks, in line."""
        self._kv.free(sequence)  # nothing to do for one that has just lost them
        status = SequenceStatus.PREEMPTED if sequence.is_known else SequenceStatus.WAITING
        if sequence.status is not status:
            sequence.move_to(status)
        self.waiting.push(sequence)

    def _leave_seat(self, sequence: Sequence) -> None:
        """Whoever waits for what this one was computing leaves, too."""
        self.seats.remove(sequence)
        for sibling in sequence.request.sequences:
            if sibling.provider is sequence:
                self._rise(sibling)
