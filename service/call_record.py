"""What is known of one call of Generate or Complete: on its way, and at its end.

What lives here: the two records, and how a call's time is divided. What must not: clocks, I/O, text of users (the label
is theirs, and bounded by `convert.py`). Log line, metrics and trace are made from the same `CallRecord`, so that they
never differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """A stream's way through engines; written by the dispatcher. Monotonic seconds."""

    sent_s: float | None = None
    """When the first attempt went to an engine."""
    engine_queue_s: float | None = None
    """How long it then waited there for its first step, as that engine tells with its first output."""
    first_output_s: float | None = None
    last_output_s: float | None = None
    attempts: list[tuple[float, int]] = field(default_factory=list)
    """When it was sent, and to the engine of which replica."""
    deaths: list[tuple[float, str]] = field(default_factory=list)
    """When an engine that had it died, and the death's id."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call that is over. Times are monotonic seconds; what it did not reach is None."""

    method: str
    """`Generate` or `Complete`."""
    label: str
    code: str
    """Name of the gRPC status code."""
    reason: str
    """Of ErrorInfo; empty: none."""
    finish: str
    """Name of its last sequence's finish reason, in lower case; empty: none finished."""
    started_s: float
    ended_s: float
    timeline: Timeline
    operation: str = "text_completion"
    """`chat` or `text_completion`, as OpenTelemetry's conventions have it."""
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def total_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def scheduled_s(self) -> float | None:
        """When its first step began; an engine that has not told yet is taken to have begun at once."""
        sent_s = self.timeline.sent_s
        return None if sent_s is None else sent_s + (self.timeline.engine_queue_s or 0.0)

    @property
    def queue_s(self) -> float:
        """From the call's begin until its first step: checks, tokenization, the wait for an engine and in its queue.
        All of it for a call that never came so far.
        """
        return (self.ended_s if self.scheduled_s is None else self.scheduled_s) - self.started_s

    @property
    def prefill_s(self) -> float | None:
        """From there until its first output; until its end if none came."""
        if self.scheduled_s is None:
            return None
        first_s = self.timeline.first_output_s
        return (self.ended_s if first_s is None else first_s) - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """From there until its end, deaths and a slow reader included. The three add up to `total_s`."""
        first_s = self.timeline.first_output_s
        return None if first_s is None else self.ended_s - first_s
