"""The engine's side of the flight recorder: a few stores into shared memory per phase, nothing that can fail.

The layout, and the reader that outlives this process, are in `scheduler/flight_record.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.flight_record import FlightWriter, StepShape
from scheduler.messages import Phase


class FlightRecorder:
    """Stamps each phase with the clock and the count of messages taken off the socket."""

    def __init__(
        self, writer: FlightWriter, clock_ns: Callable[[], int], num_messages_received: Callable[[], int]
    ) -> None:
        self._writer = writer
        self._clock_ns = clock_ns
        self._num_messages_received = num_messages_received
        self.phase = Phase.LOADING
        self.step_id = 0
        self.last_shape: StepShape | None = None

    def enter(self, phase: Phase, step_id: int) -> None:
        """The loop is in `phase` from now on."""
        self.phase = phase
        self.step_id = step_id
        self._writer.enter(
            phase,
            now_ns=self._clock_ns(),
            step_id=step_id,
            num_messages_received=self._num_messages_received(),
        )

    def record(self, shape: StepShape, request_ids: Sequence[int]) -> None:
        """A step of this shape, with these requests in it, is about to run."""
        self.last_shape = shape
        self._writer.record(shape, request_ids)
