"""Places, labels and the shut door, on a clock of its own."""

from __future__ import annotations

import pytest

from service.admission import RETRY_AFTER_S_MAX, RETRY_AFTER_S_UNKNOWN, Admission
from service.errors import DrainingError, DuplicateRequestIdError, EngineStartingError, QueueFullError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def admission(*, requests: int = 3, tokens: int = 100, live: int = 1000, clock: Clock | None = None) -> Admission:
    door = Admission(
        max_queue_requests=requests,
        max_queue_tokens=tokens,
        max_live_requests=live,
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
        clock=Clock(),
        make_refusal=lambda: EngineStartingError(1),
    )
    errors = []
    for _ in range(2):
        with pytest.raises(EngineStartingError) as caught:
            door.admit("a")
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    door.open()
    door.admit("a")
    door.shut(lambda: DrainingError(1))
    with pytest.raises(DrainingError):
        door.admit("b")
    assert door.num_live == 1


def test_running_requests_take_no_place_in_the_queue() -> None:
    """Only those without a first output count: as they start, others are let in."""
    door = admission(requests=2)
    tickets = [door.admit(label) for label in "ab"]
    with pytest.raises(QueueFullError):
        door.admit("c")
    tickets[0].started()
    tickets[0].started()
    door.admit("c")
    assert (door.num_live, door.num_waiting) == (3, 2)


def test_tokens_are_bounded_and_given_back() -> None:
    """Waiting tokens never pass the bound, except for a lone prompt that is longer than all of it."""
    door = admission(tokens=100)
    with door.admit("a") as first:
        first.add_tokens(500)
        with door.admit("b") as second, pytest.raises(QueueFullError):
            second.add_tokens(1)
        first.started()
        with door.admit("c") as third:
            third.add_tokens(100)
            assert door.num_waiting_tokens == 100
    assert (door.num_live, door.num_waiting, door.num_waiting_tokens) == (0, 0, 0)
    assert door.idle.is_set()


def test_a_label_is_free_again_after_its_ticket_is_closed() -> None:
    """Closing twice does not take the place of the label's next holder."""
    door = admission()
    first = door.admit("same")
    with pytest.raises(DuplicateRequestIdError):
        door.admit("same")
    first.close()
    second = door.admit("same")
    first.close()
    assert door.num_live == door.num_waiting == 1
    second.close()
    assert door.num_live == door.num_waiting == 0


def test_the_expected_wait_follows_the_rate_of_first_outputs() -> None:
    """Ten waiting at two starts a second is about five seconds; without a rate it is the default; it is bounded."""
    clock = Clock()
    door = admission(requests=1000, clock=clock)
    assert door.retry_after_s() == RETRY_AFTER_S_UNKNOWN
    tickets = [door.admit(str(label)) for label in range(30)]
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
    for ticket in [door.admit(f"old {label}") for label in range(3)]:
        ticket.started()
        ticket.close()
    clock.now_s += 3600
    tickets = [door.admit(f"new {label}") for label in range(12)]
    assert door.retry_after_s() == RETRY_AFTER_S_UNKNOWN
    for ticket in tickets[:2]:
        clock.now_s += 0.5
        ticket.started()
    assert door.retry_after_s() < 10


def test_live_requests_are_bounded_however_long_they_take_to_be_read() -> None:
    """Those that have started take no place in the queue, but the server does not keep any number of them."""
    door = admission(live=3)
    tickets = [door.admit(label) for label in "abc"]
    for ticket in tickets:
        ticket.started()
    with pytest.raises(QueueFullError):
        door.admit("d")
    tickets[0].close()
    door.admit("d")


def test_what_a_request_adds_step_by_step_is_its_own() -> None:
    """Options first, the prompt later: together over the bound, but let in while nobody else waits."""
    door = admission(tokens=100)
    with door.admit("a") as ticket:
        ticket.add_tokens(90)
        ticket.add_tokens(90)
        assert door.num_waiting_tokens == 180
        with door.admit("b") as other, pytest.raises(QueueFullError):
            other.add_tokens(1)
    assert door.num_waiting_tokens == 0
