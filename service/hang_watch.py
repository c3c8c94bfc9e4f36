"""Has the engine stopped? Judged from what its flight recorder says, observation by observation.

What lives here: the rule and the deadline. What must not: the recorder, timers, what follows from a verdict
(`engine.py`).

The law: a phase in which the engine has something to do must end within its deadline. Idling and loading may last for
ever, unless messages wait unread: then the engine is deaf. In a step the deadline grows with the step's work, so that
`base_deadline_s` need not be as long as the largest step is slow. Only time that the watch itself has lived through
counts: after both processes were frozen together (a paused container, a suspended machine) an innocent engine must not
be killed. At half of its deadline an engine is a suspect: it serves what it has, but nobody new should be sent there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from scheduler.flight_record import FlightRecord
from scheduler.messages import Phase

WORK_FACTOR = 4.0
"""How much longer than measured a step's work may take: other load on the cores, a cold cache."""
WORK_S_MAX = 600.0
"""An engine whose memory went wrong may have written any number; its hang must be found all the same."""


class Finding(Enum):
    """What one observation comes to."""

    PROGRESS = auto()
    """It moves, or has not been still for long, or has nothing to do."""
    SUSPECT = auto()
    """Half of its deadline has passed."""
    HUNG = auto()
    """All of it has."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding, and how it was come to."""

    finding: Finding
    deadline_s: float
    """The one that applied."""
    cause: str = ""
    """With HUNG: one line for the record."""


class HangWatch:
    """Watches one engine process from its start to its end. Pure: time is handed in."""

    def __init__(self, base_deadline_s: float) -> None:
        self._base_deadline_s = base_deadline_s
        self._seen: tuple[Phase, int, int] | None = None
        self._stalled_s = 0.0

    def observe(
        self, record: FlightRecord, num_messages_sent: int, elapsed_s: float, step_s_per_token: float
    ) -> Verdict:
        """Judge what the recorder says now.

        Args:
            record: As just read.
            num_messages_sent: To this engine, and meant to be counted by it (its configuration is not).
            elapsed_s: Since the last observation, as far as the watch itself was running.
            step_s_per_token: What the engine measured of itself; 0 while it is not known.
        """
        # Nothing is sent before READY, so an engine that is "loading" with messages waiting has stopped right after it.
        is_waiting = record.phase in (Phase.LOADING, Phase.IDLE)
        is_deaf = is_waiting and num_messages_sent > record.num_messages_received
        deadline_s = self._base_deadline_s
        if not is_waiting:
            deadline_s += _work_s(record, step_s_per_token)
        seen = (record.phase, record.since_monotonic_ns, record.step_id)
        if seen != self._seen or (is_waiting and not is_deaf):
            self._seen = seen
            self._stalled_s = 0.0
            return Verdict(Finding.PROGRESS, deadline_s)
        self._stalled_s += elapsed_s
        if self._stalled_s <= deadline_s:
            is_suspect = self._stalled_s > deadline_s / 2
            return Verdict(Finding.SUSPECT if is_suspect else Finding.PROGRESS, deadline_s)
        if is_deaf:
            cause = f"step deadline: the engine has not taken a message for {deadline_s:.3g} s"
        else:
            cause = f"step deadline: no progress in phase {record.phase.name} for {deadline_s:.3g} s"
        return Verdict(Finding.HUNG, deadline_s, cause)


def _work_s(record: FlightRecord, step_s_per_token: float) -> float:
    """What the step being made may take beyond the base."""
    if not record.steps or record.steps[0].step_id != record.step_id:
        return 0.0  # the shapes known are another step's
    work_s = WORK_FACTOR * record.steps[0].num_batched_tokens * step_s_per_token
    return min(max(0.0, work_s), WORK_S_MAX)  # in this order not-a-number becomes 0
