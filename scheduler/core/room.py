"""Whether there are a seat and blocks for one more, and who would have to give way.

What must not be here: changes. `Scheduler` lets in and preempts.
"""

from __future__ import annotations

from scheduler.core.config import SchedulerConfig
from scheduler.core.kv_cache_manager import KVCacheManager, Start
from scheduler.core.request import Sequence
from scheduler.core.roster import Roster

_HEADROOM_STEPS = 32
"""Steps of everyone's growth that must be free when one more sequence is let in."""
_HEADROOM_POOL_SHARE = 8
"""The headroom is at most the pool divided by this."""


class Room:
    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, roster: Roster) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster

    def is_enough(self, sequence: Sequence, start: Start, max_num_seqs: int) -> bool:
        """Whether a waiting sequence can be let in as things are."""
        num_running = len(self._roster.seats) + 1
        return num_running <= max_num_seqs and self._kv.can_allocate(
            sequence, start.prefix, self._headroom(num_running)
        )

    def victims(self, sequence: Sequence, start: Start, max_num_seqs: int) -> list[Sequence] | None:
        """Who has to give way to it, as far as need be, in this order: parked sequences, and running ones that come
        behind it and are of lower priority, the last first. None: even that would not be enough.
        """
        seats = self._roster.seats
        outranked = self._outranked_by(sequence)
        parked = [one for one in reversed(self._roster.parked) if one is not sequence]
        num_running = len(seats) - len(outranked) + 1
        num_blocks_needed = self._kv.num_free_blocks_needed(sequence, start.prefix) + self._headroom(num_running)
        num_blocks = self._kv.num_free_blocks + self._kv.num_freed_by((*outranked, *parked), start.prefix)
        if num_running > max_num_seqs or num_blocks_needed > num_blocks:
            return None
        num_seats_lacking = max(0, len(seats) + 1 - max_num_seqs)
        return outranked[:num_seats_lacking] + parked + outranked[num_seats_lacking:]

    def _outranked_by(self, sequence: Sequence) -> list[Sequence]:
        outranked: list[Sequence] = []
        for running in reversed(self._roster.seats.sequences):
            if running.order < sequence.order or running.request.priority >= sequence.request.priority:
                break
            outranked.append(running)
        return outranked

    def _headroom(self, num_running: int) -> int:
        """Blocks to be left free when the number of running sequences rises to `num_running`."""
        if num_running == 1:
            return 0
        num_growth_blocks = -(-num_running * _HEADROOM_STEPS // self._config.block_size)
        return min(num_growth_blocks, self._config.num_kv_blocks // _HEADROOM_POOL_SHARE)
