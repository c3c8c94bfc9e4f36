"""The outputs of one request, whichever engine they come from.

What lives here: the meeting of the engine's pace with the reader's. What must not: sockets, choices of an engine, text.
A stream outlives engines: when the one it was with dies it waits here, unchanged, until the next one goes on behind its
last token, or until somebody ends it with an error.

What its reader has not taken yet waits in it, up to a bound in tokens and in bytes. At the bound its owner is told to
*pause* it: it gets no more steps (and may lose its KV blocks to others) until its reader, having caught up with
everything, takes what is there. So a slow reader costs steps only as fast as it reads, and memory up to the bound and
what one step may still bring. Paused is a state of the stream, not of an engine: it holds for the next one, too.

Its time is kept by one timer at most. When the moment for a first step has passed, a stream that waits here for an
engine ends; one that an engine has is that engine's to end (it was told the same moment). At the end of `max_time` the
engine forgets the request at once, however slowly the rest is read, and `next` comes to nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from scheduler.messages import SequenceOutput, TokenLogprobs
from service.call_record import Timeline
from service.errors import CallError
from service.journal import JournalEntry
from service.limits import STREAM_BUFFER_BYTES
from service.time_limits import NO_TIME_LIMITS, TimeLimits

MakeError = Callable[[], CallError]

STREAM_BUFFER_TOKENS = 64
"""Of each sequence; a moment's stumbling of a network, at any pace of an engine."""
_OUTPUT_BYTES = 256
_TOKEN_BYTES = 36
_LOGPROBS_BYTES = 160
_TOP_BYTES = 80
"""What these take as Python objects, about."""


class StreamOwner(Protocol):
    """Acts for a stream; told of each thing once."""

    def leave(self, stream: RequestStream, *, is_over: bool, is_done: bool) -> None:
        """The reader leaves, or its time is up."""

    def end_sequence(self, stream: RequestStream, index: int) -> None:
        """Nothing more is wanted of one sequence, while others go on."""

    def pause(self, stream: RequestStream) -> None: ...

    def unpause(self, stream: RequestStream) -> None: ...

    def is_waiting(self, stream: RequestStream) -> bool:
        """Whether no engine has it."""

    def is_in_step(self, stream: RequestStream) -> bool:
        """Whether its engine is computing it right now."""


class RequestStream:
    """A context manager: leaving it early aborts the request in its engine."""

    def __init__(
        self,
        entry: JournalEntry,
        owner: StreamOwner,
        *,
        time_limits: TimeLimits = NO_TIME_LIMITS,
        buffer_tokens: int = STREAM_BUFFER_TOKENS,
    ) -> None:
        """`buffer_tokens`: tokens of each sequence that may wait for their reader."""
        self.entry = entry
        self.time_limits = time_limits
        self.timeline = Timeline()
        """Its way through engines, kept by its owner."""
        self.is_paused = False
        self._owner = owner
        self._outputs: list[SequenceOutput] = []
        self._num_tokens = 0
        self._num_bytes = 0
        self._buffer_tokens = buffer_tokens * len(entry.emitted)
        self._make_error: MakeError | None = None
        self._is_cut = False
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        first_step = time_limits.first_step
        if first_step is not None:
            self._timer = asyncio.get_running_loop().call_at(first_step.at_s, self._on_time)

    @property
    def request_id(self) -> int:
        """The id that engines know."""
        return self.entry.submit.request_id

    @property
    def is_over(self) -> bool:
        """True once nothing more can come."""
        return self._make_error is not None or self._is_cut or self.entry.is_finished

    async def next(self) -> list[SequenceOutput]:
        """Everything that has come since the last call; waits if that is nothing. Empty: all sequences had finished, or
        `max_time` is over and nothing more comes.

        Raises:
            CallError: a fresh one, if the request or its engine failed, or `end` was called; outputs that came before
                that are given first.
        """
        while not self._outputs and not self.is_over:
            self._wake.clear()
            await self._wake.wait()
        outputs, self._outputs = self._outputs, []
        self._num_tokens = self._num_bytes = 0
        if self.is_paused:
            self.is_paused = False
            self._owner.unpause(self)
        if not outputs and self._make_error is not None:
            raise self._make_error()
        return outputs

    def deliver(self, output: SequenceOutput) -> None:
        """Take what one step brought."""
        self.entry.record(output)
        self._outputs.append(output)
        self._num_tokens += len(output.new_token_ids)
        self._num_bytes += _size_bytes(output)
        self._wake.set()
        is_full = self._num_tokens >= self._buffer_tokens or self._num_bytes >= STREAM_BUFFER_BYTES
        if is_full and not self.is_paused and not self.is_over:
            self.is_paused = True
            self._owner.pause(self)

    def is_late(self, now_s: float) -> bool:
        """Whether a first step from now on would be too late for it."""
        first_step = self.time_limits.first_step
        return first_step is not None and now_s >= first_step.at_s and not self.entry.has_output

    def end_late(self) -> None:
        """End it: the moment for its first step has passed."""
        first_step = self.time_limits.first_step
        assert first_step is not None
        self.end(lambda: first_step.passed_in("queue"))

    def end(self, make_error: MakeError) -> None:
        """Nothing more comes; `next` raises `make_error()`. The first call counts."""
        if not self.is_over:
            self._make_error = make_error
            self._wake.set()

    def end_sequence(self, index: int) -> None:
        """One sequence has reached what only its reader can tell, and the engine need not go on with it. Idempotent."""
        if not self.is_over and index not in self.entry.finished:
            self._owner.end_sequence(self, index)

    def close(self, *, is_done: bool = False) -> None:
        """Leave: the engine forgets the request unless it has ended there. `is_done`: its reader has all there will be,
        though the engine may not know it. Idempotent.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.leave(self, is_over=self.is_over, is_done=is_done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _on_time(self) -> None:
        self._timer = None
        if self.is_over:
            return
        loop = asyncio.get_running_loop()
        end_s = self.time_limits.end_s
        is_at_end = end_s is not None and loop.time() >= end_s
        if self.is_late(loop.time()) and self._owner.is_waiting(self):
            self.end_late()
        elif is_at_end and (self.entry.has_output or self._owner.is_in_step(self)):
            self._is_cut = True
            self._owner.leave(self, is_over=False, is_done=False)
            self._wake.set()
        elif is_at_end:
            # Its engine is about to say the same, if the step that it is in ends.
            self.end_late()
        elif end_s is not None:
            self._timer = loop.call_at(end_s, self._on_time)


def _size_bytes(output: SequenceOutput) -> int:
    """About what it takes in memory."""
    entries: Sequence[TokenLogprobs] = output.logprobs or ()
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.new_token_ids) + _LOGPROBS_BYTES * len(entries)
    if (prompt := output.prompt_logprobs) is not None:
        # Packed: they take what they are, and as much again for ids and ranks.
        size += 2 * (len(prompt.logprobs) + len(prompt.top_logprobs))
    return size + sum(_TOP_BYTES * len(entry.top_token_ids) for entry in entries)
