"""Who is let in: the bounded queue, unique labels, and the answer to everyone while the server is not serving.

What lives here: counts and decisions, made before any costly work. What must not: gRPC, tokenization, the engine's own
queue. A place, and room for an estimate of its tokens, is taken by `admit` before the message is even looked at
closely, and given back by the ticket's `close`; between the two a request counts as waiting until its first output. The
clock is handed in.

The expected wait, told as pushback with QUEUE_FULL, is the number of waiting requests over the recent rate of first
outputs, measured since the queue was last empty (Little's law).

A request whose first step is sure to come too late is refused by the same figure, taken with care: of those it cannot
overtake (its priority or higher) as many as there are slots may start in the very next moment, the running ones ending
together; the rest counts, at CERTAIN_SHARE of what is expected, and only once MEASURED_STARTS_MIN starts have been
seen. Who might make it is let in; the engine's own clock has the last word.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from service.errors import AbortedByAdministratorError, CallError, DuplicateRequestIdError, QueueFullError
from service.time_limits import FirstStepLimit

RATE_WINDOW = 64
"""First outputs over which the rate is measured."""
RETRY_AFTER_S_MIN = 0.1
RETRY_AFTER_S_MAX = 60.0
RETRY_AFTER_S_UNKNOWN = 1.0
MEASURED_STARTS_MIN = 8
"""With fewer first outputs in the present queue, nothing is known that could refuse anybody."""
CERTAIN_SHARE = 0.5
"""Of the expected wait: requests leave the queue, and the next ones may be quicker than the last ones were."""


class Ticket:
    """One request's place. Use as a context manager: leaving gives the place back."""

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        self._admission = admission
        self.label: str | None = None
        self.num_tokens = num_tokens
        self.priority = 0
        self.is_waiting = True
        self.is_preparing = True
        self.is_live = True
        self.is_aborted = False

    def claim(self, label: str) -> None:
        """Take the label for as long as the place. Raises DuplicateRequestIdError."""
        self._admission.claim(self, label)

    def expect_start(self, priority: int, first_step: FirstStepLimit | None) -> None:
        """Wait among those of this priority. Raises TimeLimitError if the first step is sure to be too late."""
        self._admission.expect_start(self, priority, first_step)

    def settle(self, num_tokens: int) -> None:
        """What it really adds to the queue, instead of the estimate: tokens, and entries of options as long as a
        vocabulary. Raises QueueFullError.
        """
        self._admission.settle(self, num_tokens)

    def check(self) -> None:
        """It is prepared. Raises AbortedByAdministratorError if it was aborted meanwhile."""
        if self.is_aborted:
            raise AbortedByAdministratorError
        self._admission.prepared(self)

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
        num_slots: int,
        clock: Callable[[], float],
        make_refusal: Callable[[], CallError],
    ) -> None:
        """`num_slots`: sequences that all engines together run at once."""
        self._max_queue_requests = max_queue_requests
        self._max_queue_tokens = max_queue_tokens
        self._max_live_requests = max_live_requests
        self._num_slots = num_slots
        self._clock = clock
        self._make_refusal: Callable[[], CallError] | None = make_refusal
        self._labels: dict[str, Ticket] = {}
        self._start_times: deque[float] = deque(maxlen=RATE_WINDOW)
        self._waiting_by_priority: Counter[int] = Counter()
        self.num_live = 0
        """Requests that hold a place, running ones included."""
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_preparing = 0
        """Of those that wait: requests that nobody has been given yet."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()

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

    def check_room(self) -> None:
        """What can be said before a call's message is there: in a crowd, reading it only to refuse it is most of what a
        refusal costs. Raises the refusal, or QueueFullError.
        """
        self.check_open()
        if self.num_waiting >= self._max_queue_requests or self.num_live >= self._max_live_requests:
            raise QueueFullError(self.retry_after_s())

    def admit(self, num_tokens: int = 0) -> Ticket:
        """Take a place for a call that will add about `num_tokens` to the queue.

        Raises:
            CallError: the refusal, while shut.
            QueueFullError: too many wait, or are live at all (answers that are read slowly are), or with too many
                tokens.
        """
        self.check_room()
        self._check_tokens(self.num_waiting_tokens, num_tokens)
        if not self.num_waiting:
            self._start_times.clear()  # the rate is that of this queue; time without one would make it look slow
        ticket = Ticket(self, num_tokens)
        self.num_live += 1
        self.num_waiting += 1
        self.num_preparing += 1
        self.num_waiting_tokens += num_tokens
        self._waiting_by_priority[ticket.priority] += 1
        self.idle.clear()
        return ticket

    def claim(self, ticket: Ticket, label: str) -> None:
        """See `Ticket`."""
        if label in self._labels:
            raise DuplicateRequestIdError
        self._labels[label] = ticket
        ticket.label = label

    def expect_start(self, ticket: Ticket, priority: int, first_step: FirstStepLimit | None) -> None:
        """See `Ticket`."""
        self._count_priority(ticket, -1)
        ticket.priority = priority
        num_ahead = sum(count for other, count in self._waiting_by_priority.items() if other >= priority)
        self._count_priority(ticket, +1)
        if first_step is not None and self._clock() + self._certain_wait_s(num_ahead) >= first_step.at_s:
            raise first_step.passed_in("admission")

    def settle(self, ticket: Ticket, num_tokens: int) -> None:
        """See `Ticket`."""
        if not ticket.is_waiting:
            return
        others = self.num_waiting_tokens - ticket.num_tokens
        if num_tokens > ticket.num_tokens:
            self._check_tokens(others, num_tokens)
        ticket.num_tokens = num_tokens
        self.num_waiting_tokens = others + num_tokens

    def prepared(self, ticket: Ticket) -> None:
        """The ticket's request is on its way to an engine, or to its end."""
        if ticket.is_preparing:
            ticket.is_preparing = False
            self.num_preparing -= 1

    def started(self, ticket: Ticket) -> None:
        """The ticket's request waits no more."""
        if ticket.is_waiting:
            self._start_times.append(self._clock())
            self._leave_queue(ticket)

    def abort(self, labels: Iterable[str]) -> set[str]:
        """Those with these labels go no further once they are prepared; returns those that were not prepared yet."""
        tickets = [self._labels[label] for label in labels if label in self._labels]
        aborted = set()
        for ticket in tickets:
            if ticket.is_preparing and ticket.label is not None:
                ticket.is_aborted = True
                aborted.add(ticket.label)
        return aborted

    def close(self, ticket: Ticket) -> None:
        """Forget the ticket."""
        if not ticket.is_live:
            return
        ticket.is_live = False
        self.num_live -= 1
        self.prepared(ticket)
        self._leave_queue(ticket)
        if ticket.label is not None:
            del self._labels[ticket.label]
        if not self.num_live:
            self.idle.set()

    def retry_after_s(self) -> float:
        """Expected time until those who wait now have started."""
        wait_s = self._expected_wait_s(self.num_waiting, 2)
        return RETRY_AFTER_S_UNKNOWN if wait_s is None else min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _check_tokens(self, num_others: int, num_tokens: int) -> None:
        """What is longer than the whole bound is let in when nobody else waits: its limit is another."""
        if num_others and num_others + num_tokens > self._max_queue_tokens:
            raise QueueFullError(self.retry_after_s())

    def _expected_wait_s(self, num_ahead: int, num_starts_min: int) -> float | None:
        """None: not enough starts to tell."""
        num_starts = len(self._start_times)
        if num_starts < num_starts_min:
            return None
        return num_ahead * (self._clock() - self._start_times[0]) / num_starts

    def _certain_wait_s(self, num_ahead: int) -> float:
        num_behind_the_next = max(num_ahead - self._num_slots, 0)
        return CERTAIN_SHARE * (self._expected_wait_s(num_behind_the_next, MEASURED_STARTS_MIN) or 0.0)

    def _leave_queue(self, ticket: Ticket) -> None:
        if ticket.is_waiting:
            self._count_priority(ticket, -1)
            ticket.is_waiting = False
            self.num_waiting -= 1
            self.num_waiting_tokens -= ticket.num_tokens

    def _count_priority(self, ticket: Ticket, change: int) -> None:
        if ticket.is_waiting:
            self._waiting_by_priority[ticket.priority] += change
            if not self._waiting_by_priority[ticket.priority]:
                del self._waiting_by_priority[ticket.priority]
