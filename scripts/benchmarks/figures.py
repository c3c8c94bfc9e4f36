"""What the times mean. Pure; the definitions that docs/benchmarks.md states are these functions.

Times are seconds of one monotonic clock in the client, taken when it has a message in hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Message:
    """A message that brought tokens."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One request's life as its client saw it; at least one message."""

    started_s: float
    """Just before the request was handed to the client library."""
    messages: tuple[Message, ...]
    ended_s: float
    """When its status was in hand."""
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return sum(message.num_tokens for message in self.messages)

    @property
    def first_token_s(self) -> float:
        return self.messages[0].at_s - self.started_s

    @property
    def end_to_end_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a figure in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All streams of one run together."""

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_messages: int
    wall_s: float
    output_tokens_per_s: float
    first_token: Distribution
    inter_token: Distribution
    end_to_end: Distribution


def inter_token_gaps(messages: Sequence[Message]) -> list[float]:
    """Seconds that each token after the first message took.

    k tokens that arrive together, t seconds after the message before them, took t / k each: the reader waited t once
    and then had k. The first message's tokens belong to the time to first token and are not in here.
    """
    gaps: list[float] = []
    for before, message in pairwise(messages):
        gaps += [(message.at_s - before.at_s) / message.num_tokens] * message.num_tokens
    return gaps


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between the two nearest (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values, no percentile")
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> Distribution:
    return Distribution(
        count=len(values),
        mean_s=math.fsum(values) / len(values),
        p50_s=percentile(values, 50),
        p99_s=percentile(values, 99),
        max_s=max(values),
    )


def summary(streams: Sequence[Stream]) -> Summary:
    """Throughput counts from the first request's start to the last one's end: the thin tail of a closed loop is in it.

    At least one stream must have two messages, or there is no latency between tokens to speak of.
    """
    wall_s = max(stream.ended_s for stream in streams) - min(stream.started_s for stream in streams)
    num_output_tokens = sum(stream.num_output_tokens for stream in streams)
    return Summary(
        num_requests=len(streams),
        num_prompt_tokens=sum(stream.num_prompt_tokens for stream in streams),
        num_cached_tokens=sum(stream.num_cached_tokens for stream in streams),
        num_output_tokens=num_output_tokens,
        num_messages=sum(len(stream.messages) for stream in streams),
        wall_s=wall_s,
        output_tokens_per_s=num_output_tokens / wall_s,
        first_token=distribution([stream.first_token_s for stream in streams]),
        inter_token=distribution([gap for stream in streams for gap in inter_token_gaps(stream.messages)]),
        end_to_end=distribution([stream.end_to_end_s for stream in streams]),
    )
