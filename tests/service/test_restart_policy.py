"""The law of restarts, with a clock that only moves when told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.restart_policy import DELAY_S_MAX, FIRST_DELAY_S_MAX, HEALTHY_LIFE_S, RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def policy_of(max_restarts: int, *, clock: Clock | None = None, random: float = 0.0) -> RestartPolicy:
    return RestartPolicy(max_restarts, clock or Clock(), lambda: random)


def test_before_any_death_a_start_waits_for_nothing_but_its_jitter() -> None:
    """No death: not spent, not even with max_restarts 0."""
    assert policy_of(0).delay_s() == 0.0
    assert policy_of(0).window_frees_in_s() == 0.0
    assert policy_of(5, random=0.999).num_deaths == 0


def test_the_first_death_restarts_at_once_and_the_delays_then_double() -> None:
    """At once, 0.5, 1, 2, 4 s …, capped at 30 s; chance takes up to half of each away."""
    for random, share in ((0.0, 0.5), (1.0, 1.0)):
        policy = policy_of(100, random=random)
        delays = []
        for _ in range(12):
            policy.record_death()
            delays.append(policy.delay_s())
        assert delays[0] == pytest.approx(FIRST_DELAY_S_MAX * random)
        assert delays[1:] == pytest.approx([share * min(0.5 * 2**k, 30.0) for k in range(11)])


def test_a_death_after_a_healthy_life_begins_a_new_row() -> None:
    """Only engines that die young make the next one wait; the bound counts all the same."""
    policy = policy_of(4, random=1.0)
    for served_s, delay_s in ((60.0, 0.05), (60.0, 0.05), (0.0, 0.5), (HEALTHY_LIFE_S, 0.05)):
        policy.record_death(served_s)
        assert policy.delay_s() == pytest.approx(delay_s)
    policy.record_death(60.0)
    assert policy.is_spent


def test_the_first_delay_is_at_most_50_ms() -> None:
    """One death must not keep anyone waiting."""
    assert FIRST_DELAY_S_MAX <= 0.05


def test_more_deaths_than_restarts_spend_the_window() -> None:
    """max_restarts of them are answered by a start, the next is not, and the oldest one's leaving frees the window."""
    clock = Clock()
    policy = policy_of(2, clock=clock)
    for expected in (True, True, False):
        policy.record_death()
        assert (policy.delay_s() is not None) == expected
        clock.now_s += 10
    assert policy.is_spent
    assert policy.window_frees_in_s() == pytest.approx(270.0)
    assert policy.expected_delay_s() == pytest.approx(270.0)
    clock.now_s += 269.9
    assert policy.delay_s() is None
    clock.now_s += 0.2
    assert policy.num_deaths == 2
    assert policy.window_frees_in_s() == 0.0
    assert policy.delay_s() == pytest.approx(0.25)


def test_deaths_beyond_a_spent_window_keep_it_shut() -> None:
    """With replicas more engines can die while the window is spent: it frees once fewer than the bound are recent."""
    clock = Clock()
    policy = policy_of(1, clock=clock)
    for _ in range(5):
        policy.record_death()
        clock.now_s += 100
    assert policy.window_frees_in_s() == pytest.approx(300 - 200)
    clock.now_s += 99
    assert policy.delay_s() is None
    clock.now_s += 1
    assert policy.delay_s() is not None


def test_without_restarts_the_first_death_is_the_last() -> None:
    """max_restarts 0 gives up for ever, however much time passes."""
    clock = Clock()
    policy = policy_of(0, clock=clock)
    policy.record_death()
    clock.now_s += 10**6
    assert policy.delay_s() is None
    assert policy.window_frees_in_s() is None
    assert policy.expected_delay_s() is None


def test_what_is_expected_is_the_mean_and_draws_nothing() -> None:
    """A pushback asks as often as it likes without changing the next delay."""
    clock = Clock()

    def forbidden() -> float:
        pytest.fail("drawn")

    policy = RestartPolicy(5, clock, forbidden)
    policy.record_death()
    assert policy.expected_delay_s() == pytest.approx(FIRST_DELAY_S_MAX / 2)
    policy.record_death()
    policy.record_death()
    assert policy.expected_delay_s() == pytest.approx(0.75)


@given(
    max_restarts=st.integers(0, 2000),
    gaps_s=st.lists(st.floats(0, 200), max_size=60),
    random=st.floats(0, 1, exclude_max=True),
)
def test_it_answers_whatever_happens(max_restarts: int, gaps_s: list[float], random: float) -> None:
    """Delays are bounded, a spent window names its end, and at that end a start is allowed."""
    clock = Clock()
    policy = policy_of(max_restarts, clock=clock, random=random)
    for gap_s in gaps_s:
        clock.now_s += gap_s
        policy.record_death()
        delay_s = policy.delay_s()
        assert (delay_s is None) == policy.is_spent
        assert delay_s is None or 0 <= delay_s <= DELAY_S_MAX
    frees_in_s = policy.window_frees_in_s()
    if frees_in_s is not None:
        clock.now_s += frees_in_s + 1e-6
        assert policy.delay_s() is not None


def test_a_thousand_deaths_do_not_overflow() -> None:
    """The exponent is bounded, too."""
    policy = policy_of(10**6)
    for _ in range(5000):
        policy.record_death()
    assert policy.delay_s() == DELAY_S_MAX / 2
