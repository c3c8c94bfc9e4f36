"""Places, labels and the shut door, on a clock of its own."""

from __future__ import annotations

import pytest

from service.admission import RETRY_AFTER_S_MAX, RETRY_AFTER_S_UNKNOWN, Admission, Ticket
from service.errors import (
    DrainingError,
    DuplicateRequestIdError,
    EngineStartingError,
    QueueFullError,
    TimeLimitError,
)
from service.time_limits import FirstStepLimit


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def admission(
    *, requests: int = 3, tokens: int = 100, live: int = 1000, slots: int = 1, clock: Clock | None = None
) -> Admission:
    door = Admission(
        max_queue_requests=requests,
        max_queue_tokens=tokens,
        max_live_requests=live,
        num_slots=slots,
        clock=clock or Clock(),
        make_refusal=lambda: EngineStartingError(1),
    )
    door.open()
    return door


def test_the_door_begins_shut_and_refuses_afresh() -> None:
    """Each refused call gets an exception of its own; after `open` calls get in, after `shut` none does."""
    door = Admission(
        max_queue_requests=1,
        max_queue_tokens=1,
        max_live_requests=1,
        num_slots=1,
        clock=Clock(),
        make_refusal=lambda: EngineStartingError(1),
    )
    errors = []
    for _ in range(2):
        with pytest.raises(EngineStartingError) as caught:
            door.admit()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    door.open()
    door.admit()
    door.shut(lambda: DrainingError(1))
    with pytest.raises(DrainingError):
        door.admit()
    assert door.num_live == 1


def test_running_requests_take_no_place_in_the_queue() -> None:
    """Only those without a first output count: as they start, others are let in."""
    door = admission(requests=2)
    tickets = [door.admit() for _ in range(2)]
    with pytest.raises(QueueFullError):
        door.admit()
    tickets[0].started()
    tickets[0].started()
    door.admit()
    assert (door.num_live, door.num_waiting) == (3, 2)


def test_tokens_are_bounded_and_given_back() -> None:
    """Waiting tokens never pass the bound, except for a lone prompt that is longer than all of it."""
    door = admission(tokens=100)
    with door.admit(500) as first:
        with pytest.raises(QueueFullError):
            door.admit(1)
        first.started()
        with door.admit(100):
            assert door.num_waiting_tokens == 100
    assert (door.num_live, door.num_waiting, door.num_waiting_tokens) == (0, 0, 0)
    assert door.idle.is_set()


def test_an_estimate_is_reserved_until_the_tokens_are_counted() -> None:
    """A crowd is counted by what its prompts are about to be; settling gives back what was too much, and is refused
    where the truth has no room, which leaves the estimate in place until the call gives it up."""
    door = admission(tokens=100)
    first, second = door.admit(60), door.admit(40)
    with pytest.raises(QueueFullError):
        door.admit(1)
    first.settle(10)
    assert door.num_waiting_tokens == 50
    with pytest.raises(QueueFullError):
        second.settle(91)
    assert door.num_waiting_tokens == 50
    second.settle(90)
    assert door.num_waiting_tokens == 100
    first.started()
    first.settle(70)
    assert door.num_waiting_tokens == 90
    second.close()
    assert door.num_waiting_tokens == 0


def test_a_label_is_free_again_after_its_ticket_is_closed() -> None:
    """Closing twice does not take the place of the label's next holder."""
    door = admission()
    first, second = door.admit(), door.admit()
    first.claim("same")
    with pytest.raises(DuplicateRequestIdError):
        second.claim("same")
    first.close()
    second.claim("same")
    first.close()
    assert door.num_live == door.num_waiting == 1
    second.close()
    assert door.num_live == door.num_waiting == 0


def test_the_expected_wait_follows_the_rate_of_first_outputs() -> None:
    """Ten waiting at two starts a second is about five seconds; without a rate it is the default; it is bounded."""
    clock = Clock()
    door = admission(requests=1000, clock=clock)
    assert door.retry_after_s() == RETRY_AFTER_S_UNKNOWN
    tickets = [door.admit() for _ in range(30)]
    for ticket in tickets[:20]:
        clock.now_s += 0.5
        ticket.started()
    assert door.retry_after_s() == pytest.approx(5, rel=0.1)
    clock.now_s += 10**6
    assert door.retry_after_s() == RETRY_AFTER_S_MAX


def test_time_without_a_queue_is_not_slowness() -> None:
    """After a long idle time the rate begins anew, so that a burst is not told to stay away for a minute."""
    clock = Clock()
    door = admission(requests=1000, clock=clock)
    for ticket in [door.admit() for _ in range(3)]:
        ticket.started()
        ticket.close()
    clock.now_s += 3600
    tickets = [door.admit() for _ in range(12)]
    assert door.retry_after_s() == RETRY_AFTER_S_UNKNOWN
    for ticket in tickets[:2]:
        clock.now_s += 0.5
        ticket.started()
    assert door.retry_after_s() < 10


def test_live_requests_are_bounded_however_long_they_take_to_be_read() -> None:
    """Those that have started take no place in the queue, but the server does not keep any number of them."""
    door = admission(live=3)
    tickets = [door.admit() for _ in range(3)]
    for ticket in tickets:
        ticket.started()
    with pytest.raises(QueueFullError):
        door.admit()
    tickets[0].close()
    door.admit()


def test_work_that_is_sure_to_start_too_late_is_refused() -> None:
    """With twenty ahead and a start every second, a first step within two seconds is out of reach; the limit is named.
    Nobody is refused who might make it: a longer limit, a shorter queue, a higher priority."""
    clock = Clock()
    door, waiting = busy_door(clock)
    assert refused(door, clock, within_s=2) == "max_queue_time"
    assert refused(door, clock, within_s=15) is None
    assert refused(door, clock, within_s=2, priority=1) is None
    for ticket in waiting[:19]:
        ticket.close()
    assert refused(door, clock, within_s=2) is None


def test_as_many_as_there_are_slots_may_start_at_once() -> None:
    """The running ones may end together, so those who wait for their places are refused nothing."""
    clock = Clock()
    assert refused(busy_door(clock, slots=20)[0], clock, within_s=0.1) is None
    assert refused(busy_door(clock, slots=10)[0], clock, within_s=2) == "max_queue_time"


def test_where_nothing_is_known_all_are_let_in() -> None:
    """Before a few have started, a queue tells nothing; a limit that has passed is refused all the same."""
    clock = Clock()
    door = admission(requests=1000, clock=clock)
    for _ in range(100):
        door.admit()
    clock.now_s += 60
    assert refused(door, clock, within_s=0.1) is None
    assert refused(door, clock, within_s=-1) == "max_queue_time"


def test_priorities_are_counted_where_they_are() -> None:
    """A call's place in the estimate is that of its own priority, from the moment it is known until it starts."""
    clock = Clock()
    door, waiting = busy_door(clock)
    for ticket in waiting:
        ticket.expect_start(-5, None)
    assert refused(door, clock, within_s=2) is None
    assert refused(door, clock, within_s=2, priority=-5) == "max_queue_time"
    for ticket in waiting:
        ticket.close()
    assert refused(door, clock, within_s=2, priority=-5) is None


def busy_door(clock: Clock, *, slots: int = 1) -> tuple[Admission, list[Ticket]]:
    """Ten have begun, one second apart; twenty wait, of priority 0."""
    door = admission(requests=1000, slots=slots, clock=clock)
    tickets = [door.admit() for _ in range(30)]
    for ticket in tickets[:10]:
        ticket.started()
        clock.now_s += 1
    return door, tickets[10:]


def refused(door: Admission, clock: Clock, *, within_s: float, priority: int = 0) -> str | None:
    """The limit by which one more call is refused; None if it is let in."""
    with door.admit() as ticket:
        try:
            ticket.expect_start(priority, FirstStepLimit(clock.now_s + within_s, "max_queue_time"))
        except TimeLimitError as error:
            return error.limit if error.place == "admission" else error.place
    return None
