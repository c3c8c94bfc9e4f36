"""Who is let in: the bounded queue, unique labels, and the answer to everyone while the server is not serving.

What lives here: counts and decisions, made before any costly work. What must not: gRPC, tokenization, the engine's own
queue. A place is taken by `admit` and given back by the ticket's `close`; between the two a request counts as waiting
until its first output. The clock is handed in.

The expected wait, told as pushback with QUEUE_FULL, is the number of waiting requests over the recent rate of first
outputs, measured since the queue was last empty (Little's law).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from service.errors import CallError, DuplicateRequestIdError, QueueFullError

RATE_WINDOW = 64
"""First outputs over which the rate is measured."""
RETRY_AFTER_S_MIN = 0.1
RETRY_AFTER_S_MAX = 60.0
RETRY_AFTER_S_UNKNOWN = 1.0


class Ticket:
    """One request's place. Use as a context manager: leaving gives the place back."""

    def __init__(self, admission: Admission, label: str) -> None:
        self._admission = admission
        self.label = label
        self.num_tokens = 0
        self.is_waiting = True

    def add_tokens(self, num_tokens: int) -> None:
        """Of its prompt, or entries of options as long as a vocabulary: what it adds to the queue, as soon as it is
        known. Raises QueueFullError.
        """
        self._admission.add_tokens(self, num_tokens)

    def started(self) -> None:
        """Its first output is there: it waits no more. Idempotent."""
        self._admission.started(self)

    def close(self) -> None:
        """Give the place back. Idempotent."""
        self._admission.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()


class Admission:
    """The door of one server. It begins shut; `open` and `shut` move it."""

    def __init__(
        self,
        *,
        max_queue_requests: int,
        max_queue_tokens: int,
        max_live_requests: int,
        clock: Callable[[], float],
        make_refusal: Callable[[], CallError],
    ) -> None:
        self._max_queue_requests = max_queue_requests
        self._max_queue_tokens = max_queue_tokens
        self._max_live_requests = max_live_requests
        self._clock = clock
        self._make_refusal: Callable[[], CallError] | None = make_refusal
        self._live: dict[str, Ticket] = {}
        self._start_times: deque[float] = deque(maxlen=RATE_WINDOW)
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()

    @property
    def num_live(self) -> int:
        """Requests that hold a place, running ones included."""
        return len(self._live)

    def open(self) -> None:
        """Let requests in."""
        self._make_refusal = None

    def shut(self, make_refusal: Callable[[], CallError]) -> None:
        """From now on every new request is told a fresh `make_refusal()`."""
        self._make_refusal = make_refusal

    def check_open(self) -> None:
        """Raise the refusal if the door is shut."""
        if self._make_refusal is not None:
            raise self._make_refusal()

    def admit(self, label: str) -> Ticket:
        """Take a place for the call labelled `label`.

        Raises:
            CallError: the refusal, while shut.
            DuplicateRequestIdError: a live call has this label.
            QueueFullError: too many wait, or are live at all (answers that are read slowly are).
        """
        self.check_open()
        if label in self._live:
            raise DuplicateRequestIdError
        if self.num_waiting >= self._max_queue_requests or len(self._live) >= self._max_live_requests:
            raise QueueFullError(self.retry_after_s())
        if not self.num_waiting:
            self._start_times.clear()  # the rate is that of this queue; time without one would make it look slow
        ticket = self._live[label] = Ticket(self, label)
        self.num_waiting += 1
        self.idle.clear()
        return ticket

    def add_tokens(self, ticket: Ticket, num_tokens: int) -> None:
        """What is longer than the whole bound is let in when nobody else waits: its limit is another."""
        others = self.num_waiting_tokens - ticket.num_tokens
        if others and self.num_waiting_tokens + num_tokens > self._max_queue_tokens:
            raise QueueFullError(self.retry_after_s())
        ticket.num_tokens += num_tokens
        self.num_waiting_tokens += num_tokens

    def started(self, ticket: Ticket) -> None:
        """The ticket's request waits no more."""
        if ticket.is_waiting:
            self._start_times.append(self._clock())
            self._leave_queue(ticket)

    def close(self, ticket: Ticket) -> None:
        """Forget the ticket."""
        if self._live.get(ticket.label) is ticket:
            del self._live[ticket.label]
            self._leave_queue(ticket)
            if not self._live:
                self.idle.set()

    def retry_after_s(self) -> float:
        """Expected time until those who wait now have started."""
        if len(self._start_times) < 2:
            return RETRY_AFTER_S_UNKNOWN
        elapsed_s = self._clock() - self._start_times[0]
        wait_s = self.num_waiting * elapsed_s / len(self._start_times)
        return min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _leave_queue(self, ticket: Ticket) -> None:
        if ticket.is_waiting:
            ticket.is_waiting = False
            self.num_waiting -= 1
            self.num_waiting_tokens -= ticket.num_tokens
