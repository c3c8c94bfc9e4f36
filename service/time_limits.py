"""How long a call may wait, and how long it may take.

What lives here: the moments after which a call's time is up, made once, at its arrival, from `max_queue_time`,
`max_time` and the call's own deadline. What must not: timers, streams, statuses. All moments are those of the event
loop's clock, which is `time.monotonic`: a wall clock that steps changes none of them.

Two moments matter. Until `first_step` the engine must have begun with the request, or it ends DEADLINE_EXCEEDED without
a step; it is the earliest of the three limits. From `end_s` on (`max_time` alone) each sequence ends with TIME_LIMIT
and keeps what it has. What becomes of a stream at the call's own deadline is gRPC's business: it cancels the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from service.errors import TimeLimitError

DEADLINE_MARGIN_S = 0.05
"""A first step this close to the caller's own deadline is of no use to it, and a status that says why needs a moment to
reach it: its library gives up by itself at the deadline, and then nobody is told more."""
DEADLINE_ROUNDING = 0.01
"""Share by which a deadline may look later here than it is: gRPC sends what is left of it, rounded up."""


@dataclass(frozen=True, slots=True)
class FirstStepLimit:
    """The latest moment for a request's first step."""

    at_s: float
    limit: str
    """Which limit this is, as `TimeLimitError` names it."""

    def passed_in(self, place: str) -> TimeLimitError:
        """A fresh error; `place` as in `TimeLimitError`."""
        return TimeLimitError(self.limit, place)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Of one call."""

    first_step: FirstStepLimit | None = None
    end_s: float | None = None
    """Never before `first_step`."""

    @classmethod
    def from_arrival(
        cls,
        now_s: float,
        *,
        max_queue_time_s: float | None = None,
        max_time_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Self:
        """`deadline_s`: seconds until the call's own deadline. None, for each: no such limit."""
        moments = []
        if max_queue_time_s is not None:
            moments.append(FirstStepLimit(now_s + max_queue_time_s, "max_queue_time"))
        if max_time_s is not None:
            moments.append(FirstStepLimit(now_s + max_time_s, "max_time"))
        if deadline_s is not None:
            margin_s = min(DEADLINE_MARGIN_S + DEADLINE_ROUNDING * deadline_s, deadline_s / 2)
            moments.append(FirstStepLimit(now_s + deadline_s - margin_s, "deadline"))
        first_step = min(moments, key=lambda moment: moment.at_s, default=None)
        return cls(first_step, None if max_time_s is None else now_s + max_time_s)

    def queue_timeout_s(self, now_s: float) -> float | None:
        """What is left for the wait; None: for ever. Never negative."""
        return None if self.first_step is None else max(self.first_step.at_s - now_s, 0.0)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """What is waited for inside, before an engine has the request, ends when the first step is too late. Raises
        TimeLimitError.
        """
        if self.first_step is None:
            yield
            return
        timeout = asyncio.timeout_at(self.first_step.at_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.first_step.passed_in("queue") from None


NO_TIME_LIMITS = TimeLimits()
