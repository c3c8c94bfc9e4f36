from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.request import Sequence, make_request
from scheduler.core.request_queue import RequestQueue
from tests.fakes import make_submit


def make_sequence(arrival: int, priority: int = 0, num_tokens: int = 3) -> Sequence:
    submit = make_submit(arrival, range(num_tokens), priority=priority)
    return make_request(submit, step_id=0, arrival=arrival, first_seq_id=arrival, max_model_len=1000).sequences[0]


def pop_all(queue: RequestQueue) -> list[int]:
    return [queue.pop().seq_id for _ in range(len(queue))]


def test_order() -> None:
    """Higher priority first, then earlier arrival, whatever the order of the pushes."""
    queue = RequestQueue()
    for sequence in (make_sequence(3), make_sequence(1), make_sequence(4, priority=5), make_sequence(2, priority=-1)):
        queue.push(sequence)
    assert pop_all(queue) == [4, 1, 3, 2]


def test_preempted_goes_ahead_of_later_arrivals() -> None:
    """A sequence that was popped and comes back stands before all of its priority that arrived after it."""
    queue = RequestQueue()
    for arrival in range(1, 5):
        queue.push(make_sequence(arrival))
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert pop_all(queue) == [1, 2, 3, 4]


def test_removed_are_skipped() -> None:
    """A removed sequence is neither counted nor seen again, at the front or inside."""
    queue = RequestQueue()
    sequences = [make_sequence(arrival) for arrival in range(1, 5)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert len(queue) == 2
    assert queue.num_tokens == 6
    assert queue.peek() is sequences[1]
    assert pop_all(queue) == [2, 4]
    assert queue.peek() is None


def test_removal_does_not_leak() -> None:
    """Entries of removed sequences do not pile up behind a front that never moves."""
    queue = RequestQueue()
    queue.push(make_sequence(1))
    for arrival in range(2, 5000):
        sequence = make_sequence(arrival)
        queue.push(sequence)
        queue.remove(sequence)
    assert len(queue._heap) < 200
    assert pop_all(queue) == [1]


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(-2, 2), st.integers(0, 30))))
def test_against_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    """Any mix of push, pop and remove behaves like a list kept sorted by order; the token count is the sum."""
    queue, model = RequestQueue(), []
    for arrival, (operation, priority, number) in enumerate(operations):
        if operation == "push":
            sequence = make_sequence(arrival, priority, num_tokens=number + 1)
            queue.push(sequence)
            model.append(sequence)
            model.sort(key=lambda sequence: sequence.order)
        elif model and operation == "pop":
            assert queue.pop() is model.pop(0)
        elif model:
            queue.remove(model.pop(number % len(model)))
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(len(sequence.token_ids) for sequence in model)
