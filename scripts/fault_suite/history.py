"""What clients asked for and what they saw, written down as it happened. Data only: judging it is `rules.py`'s.

Times are seconds of CLOCK_MONOTONIC, taken when the client has the thing in hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """What one client wants. Sent again after a refusal it is still the same ask."""

    number: int
    """Its place in the pool: asks of equal number have equal fields, and so the same answer."""
    fields: Mapping[str, Any]
    """Of GenerateRequest, as protojson writes them. `output.token_ids` is always on."""
    leave_after_tokens: int | None = None
    """The client cancels once it has so many tokens; 0: as soon as it has sent the request. None: it reads on."""
    is_poison: bool = False
    """It makes the step fail that computes it."""

    @property
    def max_tokens(self) -> int:
        """The bound that the request carries."""
        return int(self.fields["stopping"]["max_tokens"])


@dataclass(frozen=True, slots=True)
class Message:
    """One response."""

    at_s: float
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    has_prompt: bool = False
    finish_reason: str | None = None
    """Without its prefix, such as `EOS`."""
    usage_completion: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended, its google.rpc details taken apart."""

    code: str
    reason: str = ""
    """Of ErrorInfo."""
    death_id: str = ""
    pushback_ms: int | None = None
    message: str = ""

    @property
    def name(self) -> str:
        """Such as `OK` or `UNAVAILABLE ENGINE_DEAD`."""
        return f"{self.code} {self.reason}".rstrip()


@dataclass(slots=True)
class Call:
    """One attempt at an ask, as its client saw it."""

    ask: Ask
    sent_s: float
    messages: list[Message] = field(default_factory=list)
    left_s: float | None = None
    """When the client cancelled it."""
    ended_s: float | None = None
    status: Status | None = None
    """None: it has not ended."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(token_id for message in self.messages for token_id in message.token_ids)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(message.text for message in self.messages)

    @property
    def finish_reason(self) -> str | None:
        """Of the message that had one."""
        return next((message.finish_reason for message in self.messages if message.finish_reason), None)

    @property
    def usage_completion(self) -> int | None:
        """Of the message that had usage."""
        return next((m.usage_completion for m in self.messages if m.usage_completion is not None), None)

    @property
    def is_refusal(self) -> bool:
        """It was told to come back later, and had had nothing: the client sends the same again."""
        status = self.status
        return (
            status is not None
            and status.code == "UNAVAILABLE"
            and not self.messages
            and status.pushback_ms is not None
            and status.pushback_ms >= 0
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an undisturbed server says to an ask."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Episode:
    """One fault: from just before it until the server was seen to serve again."""

    fault: str
    began_s: float
    recovered_s: float = float("inf")
    death_ids: list[str] = field(default_factory=list)
    """Of the `fatal error` records that were logged meanwhile."""
    deaths_min: int = 0
    deaths_max: int = 0
    num_spoiled_max: int = 0
    """How many streams may end INTERNAL because the fault was in what was done for them alone."""

    @property
    def num_convicted_max(self) -> int:
        """How many requests it may make look like killers: one for each death after its first, for whoever was being
        tried alone just then.
        """
        return max(0, len(self.death_ids) - 1)
