"""One replica: a place that an engine fills, and the states it goes through.

What lives here: the states, the one table of their moves, what is known of the engine in this place. What must not:
decisions (`supervisor.py`), processes (`engine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from scheduler.messages import EngineStats, Ready
from service.engine import Engine


class EngineState(IntEnum):
    """The numbers are those of `emberline.v1.EngineState`."""

    STARTING = 1
    READY = 2
    SUSPECT = 3
    """Serving, but its step has taken half of what it may."""
    DEAD = 4
    """Found dead; not yet known to be gone."""
    BACKOFF = 5
    """Gone; the next one is started when the time has come."""
    FAILED = 6
    """Gone; none is started any more."""
    STOPPING = 7


NEXT_STATES: dict[EngineState, tuple[EngineState, ...]] = {
    EngineState.STARTING: (EngineState.READY, EngineState.DEAD, EngineState.BACKOFF, EngineState.STOPPING),
    EngineState.READY: (EngineState.SUSPECT, EngineState.DEAD, EngineState.STOPPING),
    EngineState.SUSPECT: (EngineState.READY, EngineState.DEAD, EngineState.STOPPING),
    EngineState.DEAD: (EngineState.BACKOFF, EngineState.FAILED, EngineState.STOPPING),
    EngineState.BACKOFF: (EngineState.STARTING, EngineState.FAILED, EngineState.STOPPING),
    EngineState.FAILED: (EngineState.STOPPING,),
    EngineState.STOPPING: (),
}
"""The table. STARTING → BACKOFF: the process could not even be started."""

SERVING_STATES = (EngineState.READY, EngineState.SUSPECT)


@dataclass(slots=True, eq=False)
class Replica:
    """Compared by identity."""

    index: int
    device_index: int | None = None
    """Which GPU is its; None: no choice."""
    state: EngineState = EngineState.STARTING
    engine: Engine | None = None
    ready: Ready | None = None
    """What its last engine that became ready said of itself; None: it never had one."""
    num_deaths: int = 0
    last_death_id: str = ""
    state_since_s: float = 0.0
    next_start_s: float | None = None
    """In BACKOFF, and foreseen in DEAD: when the next engine is started; None: not known."""

    @property
    def is_serving(self) -> bool:
        return self.state in SERVING_STATES

    @property
    def pid(self) -> int:
        """Of its engine's process; 0 if there is none."""
        return 0 if self.engine is None else self.engine.pid

    @property
    def stats(self) -> EngineStats:
        """As of its engine's last step."""
        return self.engine.client.stats if self.engine is not None and self.is_serving else EngineStats()

    def move_to(self, state: EngineState, now_s: float) -> None:
        """The only way to change `state`."""
        assert state in NEXT_STATES[self.state], f"{self.state.name} → {state.name}"
        self.state = state
        self.state_since_s = now_s
