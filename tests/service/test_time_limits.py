"""Moments, on a loop's clock."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import TimeLimitError
from service.time_limits import NO_TIME_LIMITS, TimeLimits
from tests.service.support import HANG_S


def test_the_earliest_limit_bounds_the_wait_and_names_itself() -> None:
    """Of `max_queue_time`, `max_time` and the deadline the earliest counts until the first step; the end is that of
    `max_time` alone."""
    limits = TimeLimits.from_arrival(100.0, max_queue_time_s=5, max_time_s=7, deadline_s=6)
    assert limits.first_step is not None
    assert (limits.first_step.at_s, limits.first_step.limit, limits.end_s) == (105.0, "max_queue_time", 107.0)
    limits = TimeLimits.from_arrival(100.0, max_queue_time_s=5, max_time_s=3)
    assert limits.first_step is not None
    assert (limits.first_step.at_s, limits.first_step.limit, limits.end_s) == (103.0, "max_time", 103.0)
    assert TimeLimits.from_arrival(100.0) == NO_TIME_LIMITS


def test_a_deadline_leaves_time_to_be_told() -> None:
    """The wait ends before the caller's library gives up by itself, but never at once because the deadline is short."""
    for deadline_s, at_s in ((10.0, 9.85), (0.02, 0.01), (0.0, 0.0)):
        first_step = TimeLimits.from_arrival(0.0, deadline_s=deadline_s).first_step
        assert first_step is not None
        assert (first_step.limit, first_step.at_s) == ("deadline", pytest.approx(at_s))


def test_what_is_left_for_an_engine_is_never_negative() -> None:
    """An engine is told what is left of the wait; without a limit, nothing."""
    limits = TimeLimits.from_arrival(0.0, max_queue_time_s=2)
    assert [limits.queue_timeout_s(now_s) for now_s in (0.5, 2.0, 9.0)] == [1.5, 0.0, 0.0]
    assert NO_TIME_LIMITS.queue_timeout_s(0.0) is None


async def test_waiting_ends_when_the_first_step_is_too_late() -> None:
    """What is awaited inside is cancelled, and the error names the limit; a TimeoutError of its own passes as it is."""
    limits = TimeLimits.from_arrival(asyncio.get_running_loop().time(), max_queue_time_s=0.01)
    with pytest.raises(TimeLimitError) as caught:
        async with limits.waiting():
            await asyncio.sleep(HANG_S)
    assert (caught.value.limit, caught.value.place) == ("max_queue_time", "queue")
    for patient in (
        TimeLimits.from_arrival(asyncio.get_running_loop().time(), max_queue_time_s=HANG_S),
        NO_TIME_LIMITS,
    ):
        with pytest.raises(TimeoutError):
            async with patient.waiting():
                raise TimeoutError
