"""The rule of the hang watch, observation by observation."""

from __future__ import annotations

import pytest

from scheduler.flight_record import FlightRecord, StepShape
from scheduler.messages import Phase
from service.hang_watch import WORK_S_MAX, Finding, HangWatch, Verdict

WAITING = (Phase.LOADING, Phase.IDLE)


def record(
    phase: Phase, *, since: int = 0, num_received: int = 0, step_id: int = 1, num_tokens: int | None = None
) -> FlightRecord:
    steps = () if num_tokens is None else (StepShape(7, 1, num_tokens, 0, 0, 1),)
    return FlightRecord(phase, since, step_id, num_received, steps)


def observe(watch: HangWatch, seen: FlightRecord, *, sent: int = 0, elapsed_s: float = 0.2) -> Verdict:
    return watch.observe(seen, sent, elapsed_s, 0.0)


def test_only_time_that_the_watch_lived_through_counts() -> None:
    """The age of a phase by the clock does not matter: only what was observed adds up to the deadline."""
    watch = HangWatch(1.0)
    old = record(Phase.EXECUTE, since=-(10**12))
    findings = [observe(watch, old).finding for _ in range(7)]
    assert findings == [Finding.PROGRESS] * 3 + [Finding.SUSPECT] * 3 + [Finding.HUNG]
    verdict = observe(watch, old)
    assert verdict.cause == "step deadline: no progress in phase EXECUTE for 1 s"
    assert verdict.deadline_s == 1.0


def test_the_first_look_at_a_phase_counts_for_nothing() -> None:
    """What elapsed before it was first seen may have been another phase's."""
    watch = HangWatch(1.0)
    assert observe(watch, record(Phase.EXECUTE), elapsed_s=100.0).finding is Finding.PROGRESS
    assert observe(watch, record(Phase.EXECUTE), elapsed_s=0.4).finding is Finding.PROGRESS


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in WAITING])
def test_every_phase_of_work_has_the_deadline(phase: Phase) -> None:
    """Nothing the loop does may last for ever."""
    watch = HangWatch(0.5)
    verdicts = [observe(watch, record(phase)) for _ in range(5)]
    assert verdicts[-1].finding is Finding.HUNG
    assert phase.name in verdicts[-1].cause


def test_progress_starts_the_deadline_anew() -> None:
    """Another phase, the same phase entered again, or another step is progress, also for a suspect."""
    watch = HangWatch(0.5)
    for since in range(50):
        assert observe(watch, record(Phase.EXECUTE, since=since)).finding is Finding.PROGRESS
    for step_id in range(2, 50):
        assert observe(watch, record(Phase.EXECUTE, step_id=step_id), elapsed_s=0.4).finding is Finding.PROGRESS
        assert observe(watch, record(Phase.EXECUTE, step_id=step_id), elapsed_s=0.4).finding is Finding.SUSPECT


@pytest.mark.parametrize("phase", WAITING)
def test_loading_and_idling_are_never_late(phase: Phase) -> None:
    """An engine that has taken everything may be silent for ever."""
    watch = HangWatch(0.5)
    for _ in range(50):
        assert observe(watch, record(phase, num_received=3), sent=3).finding is Finding.PROGRESS


@pytest.mark.parametrize("phase", WAITING)
def test_a_message_that_is_not_taken_is_late(phase: Phase) -> None:
    """An engine that idles, or stopped the moment it was ready, has the deadline's time to take what it was sent; the
    time it idled before does not count."""
    watch = HangWatch(0.5)
    for _ in range(50):
        observe(watch, record(phase, num_received=3), sent=3)
    verdicts = [observe(watch, record(phase, num_received=3), sent=4) for _ in range(3)]
    assert [verdict.finding for verdict in verdicts] == [Finding.PROGRESS, Finding.SUSPECT, Finding.HUNG]
    assert verdicts[-1].cause == "step deadline: the engine has not taken a message for 0.5 s"


def test_the_deadline_grows_with_the_steps_work() -> None:
    """Four times what its tokens were measured to take, beyond the base."""
    watch = HangWatch(1.0)
    step = record(Phase.EXECUTE, step_id=7, num_tokens=500)
    verdicts = [watch.observe(step, 0, 1.0, 0.001) for _ in range(5)]
    assert {verdict.deadline_s for verdict in verdicts} == {3.0}
    findings = [verdict.finding for verdict in verdicts]
    assert findings == [Finding.PROGRESS] * 2 + [Finding.SUSPECT] * 2 + [Finding.HUNG]
    assert "3 s" in verdicts[-1].cause


@pytest.mark.parametrize(
    "seen",
    [
        record(Phase.EXECUTE, step_id=8, num_tokens=500),  # the newest shape known is of the step before
        record(Phase.EXECUTE, step_id=7),
        record(Phase.IDLE, step_id=7, num_tokens=500),
    ],
)
def test_without_its_shape_a_step_has_the_base_deadline(seen: FlightRecord) -> None:
    """Another step's work is no excuse, nor is work an excuse for a deaf engine."""
    assert HangWatch(1.0).observe(seen, 1, 1.0, 0.001).deadline_s == 1.0


@pytest.mark.parametrize("step_s_per_token", [1e9, float("inf"), float("nan"), -1.0])
def test_no_number_makes_a_hang_last_for_ever(step_s_per_token: float) -> None:
    """The record and the engine's own measure are an engine's words: nonsense in them is bounded."""
    verdict = HangWatch(1.0).observe(record(Phase.EXECUTE, step_id=7, num_tokens=2**32 - 1), 0, 1.0, step_s_per_token)
    assert 1.0 <= verdict.deadline_s <= 1.0 + WORK_S_MAX
