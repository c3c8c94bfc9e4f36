"""The front end's end of one engine's socket: requests out, tokens in.

What lives here: the socket, the streams this engine serves, and the order in which they learn things. What must not:
processes and their deaths (`engine.py`), the choice of an engine (`dispatch.py`), text, gRPC. All of it runs on the
event loop, nothing in it waits: a send goes to the transport's buffer (bounded by admission), and one arriving
`StepOutputs` wakes each stream it concerns once, however many tokens it has for it.

An engine is lost once: by end of file, by a reset, or by bytes that are no frame. Whoever is told then takes the
streams with `detach`, within the same callback of the loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Protocol

from scheduler.codec import CodecError, FrameDecoder, Message, encode
from scheduler.config import EngineConfig
from scheduler.messages import (
    Abort,
    Activate,
    EngineFailed,
    EngineStats,
    FailureKind,
    LoadProgress,
    Pause,
    Ready,
    RequestFailure,
    Shutdown,
    StandingBy,
    StepOutputs,
    Submit,
    Unpause,
)
from service.errors import (
    BadGuideError,
    CallError,
    GuideDeadEndError,
    GuideLimitError,
    InternalError,
    NeverFitsError,
    NonFiniteError,
    PoisonRequestError,
    RequestOutOfMemoryError,
)
from service.stream import RequestStream

_FAILURES: dict[FailureKind, Callable[[RequestFailure], CallError]] = {
    FailureKind.NON_FINITE: lambda _: NonFiniteError(),
    FailureKind.NEVER_FITS: lambda _: NeverFitsError(),
    FailureKind.STEP_FAILED: lambda _: PoisonRequestError(),
    FailureKind.OUT_OF_MEMORY: lambda _: RequestOutOfMemoryError(),
    FailureKind.BAD_GUIDE: lambda _: BadGuideError(),
    FailureKind.GUIDE_DEAD_END: lambda _: GuideDeadEndError(),
    FailureKind.GUIDE_TOO_SLOW: lambda _: GuideLimitError("time"),
    FailureKind.INTERNAL: lambda failure: InternalError(failure.incident_id),
}


class ClientObserver(Protocol):
    """Told what concerns the engine as a whole, and which streams a step has brought something."""

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_standing_by(self, standing_by: StandingBy) -> None: ...

    def on_ready(self, ready: Ready) -> None: ...

    def on_output(self, stream: RequestStream, num_tokens: int) -> None: ...

    def on_failed(self, report: EngineFailed) -> None: ...

    def on_lost(self, cause: str) -> None: ...


class EngineClient:
    """Speaks to one engine over one connected socket."""

    def __init__(
        self,
        observer: ClientObserver,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[EngineStats, StepOutputs], None] = lambda _before, _step: None,
    ) -> None:
        """`on_step`: told of each step first, with the stats before it; it must not raise."""
        self._observer = observer
        self._clock = clock
        self._on_step = on_step
        self._streams: dict[int, RequestStream] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._decoder = FrameDecoder()
        self._aborts: list[int] = []
        self._sequence_aborts: list[tuple[int, int]] = []
        self._pauses: dict[int, bool] = {}
        """Streams to be paused (true) or to go on (false), as of the last word on each."""
        self._is_lost = False
        self.num_messages_sent = 0
        """Messages put on the socket since the engine was ready or about to be."""
        self.stats = EngineStats()
        """As of the last step."""
        self.num_generated_tokens = 0
        """Output tokens that it has brought, those of streams that had left included."""
        self.last_step_s = 0.0
        """How long its last step took."""
        self.step_taken_s = 0.0
        """When the last step's outputs came in."""

    async def connect(self, connection: socket.socket) -> None:
        """Take over the socket."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Wire(self), sock=connection)
        self._transport = transport

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def configure(self, config: EngineConfig) -> None:
        """Send the configuration, the first message of all."""
        self._write(config)

    def activate(self, activation: Activate) -> None:
        """Tell a standby to serve."""
        self._write(activation)

    def send(self, stream: RequestStream, submit: Submit) -> None:
        """Give the engine one request; its outputs go to the stream. The caller has made sure that the engine lives."""
        self._streams[submit.request_id] = stream
        self._send(submit)
        stream.entry.on_sent(submit, self.num_messages_sent)

    def leave(self, request_id: int, *, abort: bool) -> None:
        """Forget a stream. Aborts of one pass of the loop go out as one message."""
        if self._streams.pop(request_id, None) is None or not abort or self._is_lost:
            return
        self._pauses.pop(request_id, None)
        self._foresee_aborts()
        self._aborts.append(request_id)

    def abort_sequence(self, request_id: int, index: int) -> None:
        """Let the engine forget one sequence of a stream; it goes out with the other aborts."""
        if request_id in self._streams:
            self._foresee_aborts()
            self._sequence_aborts.append((request_id, index))

    def pause(self, request_id: int) -> None:
        """No more steps for it until `unpause`. Those of one pass of the loop go out as one message, behind whatever
        was sent in it.
        """
        self._set_paused(request_id, is_paused=True)

    def unpause(self, request_id: int) -> None:
        """It may go on."""
        self._set_paused(request_id, is_paused=False)

    def shutdown(self) -> None:
        """Ask the engine to end with status 0."""
        self._send(Shutdown())

    def streams(self) -> list[RequestStream]:
        """Every stream that is not over, in the order in which they were sent."""
        return [stream for stream in self._streams.values() if not stream.is_over]

    def detach(self) -> list[RequestStream]:
        """Let go of all streams; returns those that are not over."""
        streams = self.streams()
        self._streams.clear()
        return streams

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
            case StandingBy():
                self._observer.on_standing_by(message)
            case Ready():
                self._observer.on_ready(message)
            case EngineFailed():
                self._observer.on_failed(message)
            case _:
                self.lose(f"the engine sent a {type(message).__name__}, which is not its to send")

    def _take_step(self, step: StepOutputs) -> None:
        self.step_taken_s = self._clock()
        self._on_step(self.stats, step)
        self.stats = step.stats
        self.last_step_s = step.step_s
        for output in step.outputs:
            self.num_generated_tokens += len(output.new_token_ids)
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else it was aborted while this step ran
                if output.queue_s is not None and stream.timeline.first_output_s is None:
                    stream.timeline.engine_queue_s = output.queue_s
                stream.deliver(output)
                self._observer.on_output(stream, len(output.new_token_ids))
        for failure in step.failures:
            stream = self._streams.get(failure.request_id)
            if stream is not None:
                self._fail(stream, failure)

    @staticmethod
    def _fail(stream: RequestStream, failure: RequestFailure) -> None:
        if failure.kind is FailureKind.QUEUE_TIMEOUT:
            stream.end_late()
        else:
            stream.end(lambda: _FAILURES[failure.kind](failure))

    def _set_paused(self, request_id: int, *, is_paused: bool) -> None:
        if not self._pauses:
            asyncio.get_running_loop().call_soon(self._flush_pauses)
        self._pauses[request_id] = is_paused

    def _flush_pauses(self) -> None:
        pauses, self._pauses = self._pauses, {}
        if self._is_lost:
            return
        for make, is_paused in ((Pause, True), (Unpause, False)):
            request_ids = tuple(request_id for request_id, wish in pauses.items() if wish is is_paused)
            if request_ids:
                self._send(make(request_ids))

    def _foresee_aborts(self) -> None:
        if not self._aborts and not self._sequence_aborts:
            asyncio.get_running_loop().call_soon(self._flush_aborts)

    def _flush_aborts(self) -> None:
        abort = Abort(tuple(self._aborts), tuple(self._sequence_aborts))
        self._aborts.clear()
        self._sequence_aborts.clear()
        if not self._is_lost:
            self._send(abort)

    def _send(self, message: Submit | Abort | Pause | Unpause | Shutdown) -> None:
        if self._write(message):
            self.num_messages_sent += 1

    def _write(self, message: Message) -> bool:
        if self._transport is None or self._is_lost:
            return False  # the observer has been told; whoever waits for an answer is told by it
        self._transport.write(encode(message))
        return True


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
