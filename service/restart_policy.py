"""Whether and when a dead engine is started again. One policy per server, shared by its replicas.

What lives here: the deaths within the window, and the delay that follows from their number. What must not: waiting,
processes. Clock and randomness are handed in.

The law. The delay goes by the deaths in a row: one that follows `HEALTHY_LIFE_S` or more of serving begins a new row.
The first of a row is followed by a start at once (a jitter keeps replicas that died together apart); the `k`th by one
after 0.5 s · 2^(k−2), at most 30 s, of which 50 to 100 % by chance. The bound goes by all deaths in the last
`window_s`: with more than `max_restarts` the window is spent and there is no start until it frees. With `max_restarts`
0 the first death is the last: that window never frees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 300.0
FIRST_DELAY_S_MAX = 0.05
BASE_DELAY_S = 0.5
DELAY_S_MAX = 30.0
HEALTHY_LIFE_S = 5.0
"""An engine that served for so long was no attempt that failed: its death is one of a new row."""
_DOUBLINGS_MAX = 10
"""More would overflow one day; DELAY_S_MAX is reached after six."""


class RestartPolicy:
    """Counts deaths, says how long to wait after them."""

    def __init__(
        self,
        max_restarts: int,
        clock: Callable[[], float],
        random: Callable[[], float],
        window_s: float = WINDOW_S,
    ) -> None:
        """`random` gives numbers in [0, 1), `clock` seconds that never run back."""
        self._max_restarts = max_restarts
        self._clock = clock
        self._random = random
        self._window_s = window_s
        # The one that makes the window spent is all that ever matters beyond max_restarts.
        self._death_times: deque[float] = deque(maxlen=max_restarts + 1)
        self._num_in_row = 0

    @property
    def num_deaths(self) -> int:
        """Deaths within the window; counted up to max_restarts + 1."""
        if self._max_restarts:
            horizon_s = self._clock() - self._window_s
            while self._death_times and self._death_times[0] <= horizon_s:
                self._death_times.popleft()
        return len(self._death_times)

    @property
    def is_spent(self) -> bool:
        """No start is allowed now."""
        return self.num_deaths > self._max_restarts

    def record_death(self, served_s: float = 0.0) -> None:
        """An engine died after serving for so long, or a start failed."""
        self._death_times.append(self._clock())
        self._num_in_row = 1 if served_s >= HEALTHY_LIFE_S else self._num_in_row + 1

    def delay_s(self) -> float | None:
        """How long to wait before the next start, drawn anew at each call: ask once per death. None: the window is
        spent.
        """
        if self.is_spent:
            return None
        if self._row <= 1:
            return FIRST_DELAY_S_MAX * self._random()
        return self._full_delay_s() * (0.5 + 0.5 * self._random())

    def expected_delay_s(self) -> float | None:
        """The mean of what `delay_s` gives now, without drawing; with a spent window the time until it frees. None:
        never. What a caller is told adds the time that a start takes.
        """
        if self.is_spent:
            return self.window_frees_in_s()
        return (FIRST_DELAY_S_MAX * 0.5) if self._row <= 1 else self._full_delay_s() * 0.75

    def window_frees_in_s(self) -> float | None:
        """When a spent window allows a start again; 0 if it is not spent, None if it never will."""
        if not self.is_spent:
            return 0.0
        if not self._max_restarts:
            return None
        return self._death_times[0] + self._window_s - self._clock()

    @property
    def _row(self) -> int:
        """Deaths in a row; those that have left the window are forgotten with it, unless more are allowed in it."""
        return min(self._num_in_row, self.num_deaths) if self._max_restarts else self._num_in_row

    def _full_delay_s(self) -> float:
        doublings = min(self._row - 2, _DOUBLINGS_MAX)
        return min(BASE_DELAY_S * 2.0**doublings, DELAY_S_MAX)
