"""The outputs of one request, whichever engine they come from.

What lives here: the meeting of the engine's pace with the reader's. What must not: sockets, choices of an engine, text.
A stream outlives engines: when the one it was with dies it waits here, unchanged, until the next one goes on behind its
last token, or until somebody ends it with an error. What its reader has not taken yet waits in it, bounded by the
request's max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from scheduler.messages import SequenceOutput
from service.errors import CallError
from service.journal import JournalEntry

MakeError = Callable[[], CallError]


class StreamOwner(Protocol):
    """Told once, when the reader leaves."""

    def leave(self, stream: RequestStream, *, is_over: bool, is_done: bool) -> None: ...


class RequestStream:
    """A context manager: leaving it early aborts the request in its engine."""

    def __init__(self, entry: JournalEntry, owner: StreamOwner) -> None:
        self.entry = entry
        self._owner = owner
        self._outputs: list[SequenceOutput] = []
        self._make_error: MakeError | None = None
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> int:
        """The id that engines know."""
        return self.entry.submit.request_id

    @property
    def is_over(self) -> bool:
        """True once nothing more can come."""
        return self._make_error is not None or self.entry.is_finished

    async def next(self) -> list[SequenceOutput]:
        """Everything that has come since the last call; waits if that is nothing. Empty: all sequences had finished.

        Raises:
            CallError: a fresh one, if the request or its engine failed, or `end` was called; outputs that came before
                that are given first.
        """
        while not self._outputs and not self.is_over:
            self._wake.clear()
            await self._wake.wait()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._make_error is not None:
            raise self._make_error()
        return outputs

    def deliver(self, output: SequenceOutput) -> None:
        """Take what one step brought."""
        self.entry.record(output)
        self._outputs.append(output)
        self._wake.set()

    def end(self, make_error: MakeError) -> None:
        """Nothing more comes; `next` raises `make_error()`. The first call counts."""
        if not self.is_over:
            self._make_error = make_error
            self._wake.set()

    def close(self, *, is_done: bool = False) -> None:
        """Leave: the engine forgets the request unless it has ended there. `is_done`: its reader has all there will be,
        though the engine may not know it. Idempotent.
        """
        self._owner.leave(self, is_over=self.is_over, is_done=is_done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()
