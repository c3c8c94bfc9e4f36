"""How long a request waited for its first step, on a clock of its own."""

from __future__ import annotations

from scheduler.engine.queue_times import QueueTimes
from scheduler.messages import SequenceOutput


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def output(request_id: int, index: int = 0) -> SequenceOutput:
    return SequenceOutput(request_id, index, (1,))


def test_the_first_output_tells_the_wait_for_the_first_step() -> None:
    """Not for later steps (a prompt in chunks has several before its first token); no later output tells it again."""
    clock = Clock()
    times = QueueTimes(clock)
    times.arrived(1)
    clock.now_s = 2.0
    times.scheduled([1])
    clock.now_s = 5.0
    times.scheduled([1])
    (first, sibling) = times.stamp([output(1), output(1, index=1)])
    assert (first.queue_s, sibling.queue_s) == (2.0, None)
    assert times.stamp([output(1)])[0].queue_s is None
    assert len(times) == 0


def test_nothing_is_kept_of_whoever_is_gone() -> None:
    """An aborted or failed request leaves no trace, whether it was in a step or not; unknown ids are no error."""
    times = QueueTimes(Clock())
    times.arrived(1)
    times.arrived(2)
    times.scheduled([2])
    times.forget([1, 2, 3])
    assert len(times) == 0
    assert times.stamp([output(2)])[0].queue_s is None


def test_an_output_without_a_step_has_no_time() -> None:
    """Of a request whose resumed tokens were all there is; nothing is kept of it."""
    times = QueueTimes(Clock())
    times.arrived(1)
    assert times.stamp([output(1)])[0].queue_s is None
    assert len(times) == 0
