"""The front end's end of one engine: requests out, tokens in, death told to everyone at once.

What lives here: the socket, the open streams, and the order in which they learn things. What must not: processes (the
supervisor's), text, gRPC. All of it runs on the event loop, nothing in it waits: a send goes to the transport's buffer
(bounded by admission), and one arriving `StepOutputs` wakes each stream it concerns once, however many tokens it has
for it. What a stream has not taken yet waits in its own buffer, bounded by its max_tokens.

An engine is lost once: by end of file, by a reset, or by bytes that are no frame. The observer then decides what each
stream is told and calls `end_streams`, all within the same callback of the loop.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from scheduler.codec import CodecError, FrameDecoder, Message, encode
from scheduler.config import EngineConfig
from scheduler.messages import (
    Abort,
    EngineFailed,
    EngineStats,
    FailureKind,
    LoadProgress,
    Ready,
    RequestFailure,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    Submit,
)
from service.errors import CallError, NeverFitsError, NonFiniteError
from service.journal import Journal, JournalEntry

MakeError = Callable[[], CallError]

_FAILURES: dict[FailureKind, MakeError] = {
    FailureKind.NON_FINITE: NonFiniteError,
    FailureKind.NEVER_FITS: NeverFitsError,
}


class EngineObserver(Protocol):
    """Told what concerns the engine as a whole; the supervisor is the real one."""

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_ready(self, ready: Ready) -> None: ...

    def on_failed(self, report: EngineFailed) -> None: ...

    def on_lost(self, cause: str) -> None: ...


class EngineStream:
    """The outputs of one request. A context manager: leaving it early aborts the request in the engine."""

    def __init__(self, client: EngineClient, entry: JournalEntry) -> None:
        self._client = client
        self.entry = entry
        self._outputs: list[SequenceOutput] = []
        self._make_error: MakeError | None = None
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> int:
        """The id the engine knows."""
        return self.entry.submit.request_id

    async def next(self) -> list[SequenceOutput]:
        """Everything that has come since the last call; waits if that is nothing. Empty: all sequences had finished.

        Raises:
            CallError: a fresh one, if the request or its engine failed, or `end` was called; outputs that came before
                that are given first.
        """
        while not self._outputs and self._make_error is None and not self.entry.is_finished:
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
        if self._make_error is None:
            self._make_error = make_error
            self._wake.set()

    def close(self) -> None:
        """Leave: the engine forgets the request unless it has ended there. Idempotent."""
        is_over = self._make_error is not None or self.entry.is_finished
        self._client.leave(self, abort=not is_over)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()


class EngineClient:
    """Speaks to one engine over one connected socket."""

    def __init__(self, journal: Journal, observer: EngineObserver) -> None:
        self._journal = journal
        self._observer = observer
        self._streams: dict[int, EngineStream] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._decoder = FrameDecoder()
        self._aborts: list[int] = []
        self._is_lost = False
        self.num_messages_sent = 0
        """Messages put on the socket, the configuration not counted."""
        self.stats = EngineStats()
        """As of the last step."""

    async def connect(self, connection: socket.socket, config: EngineConfig) -> None:
        """Take over the socket and send the configuration, the first message of all."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Wire(self), sock=connection)
        self._transport = transport
        transport.write(encode(config))

    def generate(self, submit: Submit) -> EngineStream:
        """Send one request; its outputs come from the stream. The caller has made sure that the engine lives."""
        entry = self._journal.open(submit)
        stream = self._streams[submit.request_id] = EngineStream(self, entry)
        self._send(submit)
        entry.message_ordinal = self.num_messages_sent
        return stream

    def leave(self, stream: EngineStream, *, abort: bool) -> None:
        """Forget a stream. Aborts of one pass of the loop go out as one message."""
        self._journal.close(stream.request_id)
        if self._streams.pop(stream.request_id, None) is None or not abort or self._is_lost:
            return
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._flush_aborts)
        self._aborts.append(stream.request_id)

    def shutdown(self) -> None:
        """Ask the engine to end with status 0."""
        self._send(Shutdown())

    def end_streams(self, make_error: Callable[[JournalEntry], CallError]) -> int:
        """End every open stream with an error of its own; returns how many there were."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.end(functools.partial(make_error, stream.entry))
        return len(streams)

    def close(self) -> None:
        """Let go of the socket; nothing is told to the observer any more."""
        self._is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def receive(self, data: bytes) -> None:
        """Take bytes from the socket."""
        try:
            messages = self._decoder.feed(data)
        except CodecError as error:
            self.lose(f"the engine sent bytes that are no message: {error}")
            return
        for message in messages:
            if self._is_lost:
                return
            self._dispatch(message)

    def lose(self, cause: str) -> None:
        """The connection is over; the observer is told once."""
        if not self._is_lost:
            self._is_lost = True
            self._observer.on_lost(cause)

    def _dispatch(self, message: Message) -> None:
        match message:
            case StepOutputs():
                self._take_step(message)
            case LoadProgress():
                self._observer.on_progress(message)
            case Ready():
                self._observer.on_ready(message)
            case EngineFailed():
                self._observer.on_failed(message)
            case _:
                self.lose(f"the engine sent a {type(message).__name__}, which is not its to send")

    def _take_step(self, step: StepOutputs) -> None:
        self.stats = step.stats
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else it was aborted while this step ran
                stream.deliver(output)
        for failure in step.failures:
            self._fail(failure)

    def _fail(self, failure: RequestFailure) -> None:
        stream = self._streams.get(failure.request_id)
        if stream is not None:
            stream.end(_FAILURES[failure.kind])

    def _flush_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        if not self._is_lost:
            self._send(Abort(tuple(aborts)))

    def _send(self, message: Submit | Abort | Shutdown) -> None:
        if self._transport is None or self._is_lost:
            return  # the observer has been told; whoever waits for an answer is told by it
        self.num_messages_sent += 1
        self._transport.write(encode(message))


class _Wire(asyncio.Protocol):
    """The loop's callbacks for the socket."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.receive(data)

    def eof_received(self) -> bool:
        self._client.lose("the engine closed its socket")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lose(f"the connection to the engine broke: {type(exc).__name__ if exc else 'closed'}")
