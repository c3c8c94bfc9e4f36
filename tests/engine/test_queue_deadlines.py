"""scheduler/engine/queue_deadlines.py: who has waited too long, and what it costs to know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.queue_deadlines import QueueDeadlines


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans())), st.integers(0, 20))
def test_those_that_are_over_and_have_not_run_are_told_once(entries: list[tuple[int, bool]], now_s: int) -> None:
    """Exactly these, in order of their deadlines; the next one is the first of the others that wait."""
    ran = {request_id for request_id, (_, has_run) in enumerate(entries) if has_run}
    deadlines = QueueDeadlines(ran.__contains__)
    for request_id, (deadline_s, _) in enumerate(entries):
        deadlines.add(request_id, deadline_s)
    waiting = sorted(
        (deadline_s, request_id) for request_id, (deadline_s, has_run) in enumerate(entries) if not has_run
    )
    assert deadlines.take_expired(now_s) == [request_id for deadline_s, request_id in waiting if deadline_s <= now_s]
    assert deadlines.take_expired(now_s) == []
    assert deadlines.next_s() == next((deadline_s for deadline_s, _ in waiting if deadline_s > now_s), None)


def test_a_step_asks_after_nobody_whose_turn_has_not_come() -> None:
    """With 10,000 that wait, a look at the clock asks the scheduler about the first of them at most."""
    asked: list[int] = []

    def has_run(request_id: int) -> bool:
        asked.append(request_id)
        return False

    deadlines = QueueDeadlines(has_run)
    for request_id in range(10_000):
        deadlines.add(request_id, 1000.0 + request_id)
    num_asked_by_add = len(asked)
    assert num_asked_by_add < 4 * 10_000
    for _ in range(100):
        assert deadlines.take_expired(1.0) == []
        assert deadlines.next_s() == 1000.0
    assert set(asked[num_asked_by_add:]) == {0}


def test_what_has_run_long_before_its_deadline_is_not_kept() -> None:
    """Requests with an hour to wait that start at once leave nothing behind but a few entries."""
    deadlines = QueueDeadlines(lambda _: True)
    for request_id in range(10_000):
        deadlines.add(request_id, 3600.0)
    assert len(deadlines) < 200
