"""A stream between an engine's pace and its reader's, with an owner that takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler.messages import FinishReason, SamplingParams, SequenceOutput, StoppingParams, Submit, TokenLogprobs
from service.errors import EngineDeadError, TimeLimitError
from service.journal import Journal
from service.limits import STREAM_BUFFER_BYTES
from service.stream import RequestStream
from service.time_limits import NO_TIME_LIMITS, TimeLimits
from tests.service.support import HANG_S, until


class Notes:
    """What the owner was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.has_engine = True
        self.steps = True

    def leave(self, stream: RequestStream, *, is_over: bool, is_done: bool) -> None:
        self.told.append(f"leave over={is_over} done={is_done}")

    def end_sequence(self, stream: RequestStream, index: int) -> None:
        stream.entry.finished.add(index)
        self.told.append(f"end {index}")

    def pause(self, stream: RequestStream) -> None:
        self.told.append("pause")

    def unpause(self, stream: RequestStream) -> None:
        self.told.append("unpause")

    def is_waiting(self, stream: RequestStream) -> bool:
        return not self.has_engine

    def is_in_step(self, stream: RequestStream) -> bool:
        return self.steps


def open_stream(notes: Notes, *, time_limits: TimeLimits = NO_TIME_LIMITS, buffer_tokens: int = 4) -> RequestStream:
    entry = Journal().open(Submit(1, (1, 2), SamplingParams(), StoppingParams(max_tokens=100)))
    return RequestStream(entry, notes, time_limits=time_limits, buffer_tokens=buffer_tokens)


def in_s(**limits: float) -> TimeLimits:
    return TimeLimits.from_arrival(asyncio.get_running_loop().time(), **limits)


def token(*token_ids: int, reason: FinishReason | None = None, num_top: int | None = None) -> SequenceOutput:
    logprobs = None
    if num_top is not None:
        logprobs = tuple(TokenLogprobs(-1.0, 1, tuple(range(num_top)), (0.0,) * num_top) for _ in token_ids)
    return SequenceOutput(1, 0, token_ids, logprobs, finish_reason=reason)


async def test_a_full_stream_is_paused_once_and_goes_on_when_its_reader_has_taken_all() -> None:
    """At the bound, not before it; what comes while it is paused changes nothing; nothing is lost."""
    notes = Notes()
    stream = open_stream(notes, buffer_tokens=4)
    for number in range(3):
        stream.deliver(token(number))
    assert notes.told == []
    for number in range(3, 6):
        stream.deliver(token(number))
    assert (notes.told, stream.is_paused) == (["pause"], True)
    outputs = await stream.next()
    assert [output.new_token_ids for output in outputs] == [(number,) for number in range(6)]
    assert (notes.told, stream.is_paused) == (["pause", "unpause"], False)
    stream.deliver(token(6))
    assert notes.told == ["pause", "unpause"]


async def test_logprobs_fill_a_stream_by_their_bytes() -> None:
    """Long before the bound in tokens; and what is there is no more than the bound and the last output."""
    notes = Notes()
    stream = open_stream(notes, buffer_tokens=10_000)
    num_tokens = 0
    while not notes.told:
        stream.deliver(token(1, num_top=20))
        num_tokens += 1
    assert STREAM_BUFFER_BYTES // 4000 < num_tokens < STREAM_BUFFER_BYTES // 1000


async def test_an_output_that_is_the_last_pauses_nothing() -> None:
    """There are no more steps to be had."""
    notes = Notes()
    stream = open_stream(notes, buffer_tokens=1)
    stream.deliver(token(1, reason=FinishReason.MAX_TOKENS))
    assert notes.told == []


@pytest.mark.parametrize("has_engine", [True, False])
async def test_only_what_waits_here_expires_here(*, has_engine: bool) -> None:
    """Past the moment for a first step, a stream that no engine has ends, with the limit's name; one that an engine has
    is the engine's to end."""
    notes = Notes()
    notes.has_engine = has_engine
    stream = open_stream(notes, time_limits=in_s(max_queue_time_s=0.01))
    if has_engine:
        await asyncio.sleep(0.05)
        assert not stream.is_over
        stream.end_late()
    with pytest.raises(TimeLimitError) as caught:
        await asyncio.wait_for(stream.next(), HANG_S)
    assert (caught.value.limit, caught.value.place) == ("max_queue_time", "queue")


async def test_the_wait_is_over_with_the_first_output() -> None:
    """A stream that has begun is not late, whether it then waits for another engine or not."""
    notes = Notes()
    notes.has_engine = False
    stream = open_stream(notes, time_limits=in_s(max_queue_time_s=0.01))
    stream.deliver(token(1))
    await asyncio.sleep(0.05)
    assert not stream.is_over
    assert not stream.is_late(asyncio.get_running_loop().time() + HANG_S)


async def test_max_time_lets_go_of_the_engine_at_once_and_keeps_what_came() -> None:
    """The engine is told to forget it though nobody has read a token; the reader gets them, and then nothing more. An
    engine's death changes nothing any more."""
    notes = Notes()
    stream = open_stream(notes, time_limits=in_s(max_time_s=0.01))
    stream.deliver(token(1))
    await until(lambda: notes.told)
    assert notes.told == ["leave over=False done=False"]
    stream.end(lambda: EngineDeadError("id", in_step=True, retry_after_s=None))
    assert len(await stream.next()) == 1
    assert await stream.next() == []


@pytest.mark.parametrize("in_step", [True, False])
async def test_max_time_before_the_first_token(*, in_step: bool) -> None:
    """While its prompt is computed it ends as any other, with nothing; if it never had a step, it was late."""
    notes = Notes()
    notes.steps = in_step
    stream = open_stream(notes, time_limits=in_s(max_time_s=0.01))
    if in_step:
        assert await asyncio.wait_for(stream.next(), HANG_S) == []
        return
    with pytest.raises(TimeLimitError) as caught:
        await asyncio.wait_for(stream.next(), HANG_S)
    assert (caught.value.limit, caught.value.place) == ("max_time", "queue")


@pytest.mark.parametrize(
    "end",
    [
        lambda stream: stream.close(),
        lambda stream: stream.deliver(token(1, reason=FinishReason.EOS)),
        lambda stream: stream.end(lambda: EngineDeadError("id", in_step=False, retry_after_s=1)),
    ],
)
async def test_a_stream_that_is_over_has_no_more_time_to_lose(end: Callable[[RequestStream], None]) -> None:
    """Its timer does nothing after its end, of whatever kind."""
    notes = Notes()
    stream = open_stream(notes, time_limits=in_s(max_time_s=0.01))
    end(stream)
    told = list(notes.told)
    await asyncio.sleep(0.05)
    assert notes.told == told
