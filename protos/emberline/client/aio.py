"""The client for asyncio: the twin of `sync.py`, word for word where asyncio allows it.

What lives here: waiting. What must not: decisions (`_progress.py`), requests (`request.py`), shapes (`results.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from emberline.client import _messages, errors, request, results
from emberline.client._core import Attempts, Defaults, Stubs, attempts, cancelled, health_status, incomplete
from emberline.client._progress import Resume
from emberline.client.connection import DEFAULT_ADDRESS, HEALTH_SERVICE, Connection, Tls, Token
from emberline.client.request import Options, Prompt, Turn
from emberline.v1 import admin_pb2, info_pb2, tokenizer_pb2

Metadata = Sequence[tuple[str, str | bytes]]


class AsyncStream(AsyncIterator[results.Delta]):
    """The deltas of one request, as they come. The call begins when the stream is made.

    Ends after the delta with `usage`; raises EmberlineError if it cannot. Leaving it (`close`, the end of an
    `async with`, the reading task's cancellation, the last reference gone, as after a `break`) cancels the call at
    once, and the server frees what it held. One task at a time reads; `close` may come from any.
    """

    def __init__(self, begin: Callable[..., Any], all_attempts: Attempts) -> None:
        self.finish: results.Finish | None = None
        """Of the sequence that ended last; None while it goes on."""
        self.usage: results.Usage | None = None
        """None until the end."""
        self._begin = begin
        self._attempts = all_attempts
        self._closed = asyncio.Event()
        self._call = self._attempt()

    @property
    def num_resumes(self) -> int:
        """How often another attempt was made."""
        return self._attempts.progress.num_resumes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> results.Delta:
        progress = self._attempts.progress
        while True:
            if self._closed.is_set():
                raise cancelled()
            try:
                response = await self._call.read()
                if response is not grpc.aio.EOF:
                    message = progress.take(response)
                    if message is not None:
                        return self._give(results.delta(message))
                    continue
                failure: errors.EmberlineError = incomplete()
            except grpc.RpcError as error:
                failure = errors.from_rpc_error(error)
            except asyncio.CancelledError as error:
                self.close()
                if _is_task_cancelled():
                    raise
                raise cancelled() from error
            except BaseException:  # a server that is not the like of the first
                self.close()
                raise
            if progress.is_finished:
                raise StopAsyncIteration  # all has come; how the connection ended is of no interest
            await self._mend(failure)

    async def answer(self) -> results.Answer:
        """Read all of it. For a stream that has not been read from yet."""
        fold = results.Fold()
        async for delta in self:
            fold.add(delta)
        return fold.answer()

    def close(self) -> None:
        """Cancel the call if it is still open. Harmless afterwards; reading on raises RequestCancelledError."""
        if not self._attempts.progress.is_finished:
            self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def _attempt(self) -> Any:
        return self._begin(self._attempts.progress.request(), **self._attempts.arguments())

    async def _mend(self, error: errors.EmberlineError) -> None:
        try:
            async with asyncio.timeout(self._attempts.delay_s(error)):
                await self._closed.wait()
        except TimeoutError:
            self._call = self._attempt()
        else:
            raise cancelled()

    def _give(self, delta: results.Delta) -> results.Delta:
        self.finish = delta.finish or self.finish
        self.usage = delta.usage
        return delta


class AsyncClient:
    """Calls Emberline servers under asyncio. It belongs to the event loop in which it makes its first call; an
    `async with` block or `close()` closes its channels.

        async with AsyncClient("10.0.0.1:50051,10.0.0.2:50051") as client:
            async for delta in client.generate("The capital of France is", temperature=0, max_tokens=8):
                print(delta.text, end="", flush=True)

    The arguments are those of `Client`. Names among several addresses are looked up when it is made, which blocks.
    """

    def __init__(  # noqa: PLR0913 - keywords, each with a default
        self,
        target: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | grpc.ChannelCredentials | None = None,
        server_name: str | None = None,
        token: Token = None,
        allow_plaintext_token: bool = False,
        attempts_max: int = 4,
        health_check: bool | None = None,
        timeout_s: float | None = None,
        resume: bool | Resume = False,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._connection = Connection(
            target, tls, server_name, token, allow_plaintext_token, attempts_max, health_check, channel_options
        )
        self._defaults = Defaults(timeout_s, resume)
        self._made: Stubs | None = None

    @property
    def _stubs(self) -> Stubs:
        """Made at the first call: gRPC's channels belong to the loop that runs then."""
        if self._made is None:
            makers = (grpc.aio.insecure_channel, grpc.aio.secure_channel)
            self._made = Stubs(
                self._connection.dial(*makers, for_inference=True), self._connection.dial(*makers, for_inference=False)
            )
        return self._made

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Sequence[Turn] | None = None,
        timeout_s: float | None = None,
        resume: bool | Resume | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Stream an answer to `prompt` (text, token ids or a ready GenerateRequest) or to `chat`.

        `timeout_s` bounds the whole stream, all attempts together. Raises TypeError or ValueError for what can be no
        request; everything else is raised while reading.
        """
        made = attempts(
            self._connection,
            self._defaults,
            prompt,
            chat,
            options,
            timeout_s=timeout_s,
            resume=resume,
            metadata=metadata,
        )
        return AsyncStream(self._stubs.generate, made)

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Sequence[Turn] | None = None,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> results.Answer:
        """The whole answer in one message. If its server dies it is tried again from the begin; a long one is better
        carried on: `generate(…, resume=True).answer()`.
        """
        message = request.generate_request(prompt, chat, options)
        return results.answer(await self._unary(self._stubs.complete, message, timeout_s, metadata))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        chat: Sequence[Turn] | None = None,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        parse_special: bool | None = None,
        add_generation_prompt: bool | None = None,
        with_pieces: bool = False,
        timeout_s: float | None = None,
    ) -> results.Tokenization:
        """What `generate` would make of the same input."""
        message = request.tokenize_request(
            text,
            chat,
            model=model,
            add_special_tokens=add_special_tokens,
            parse_special=parse_special,
            add_generation_prompt=add_generation_prompt,
            with_pieces=with_pieces,
        )
        told = await self._unary(self._stubs.tokenize, message, timeout_s)
        return results.Tokenization(tuple(told.ids), tuple(told.pieces), told.max_prompt_tokens)

    async def detokenize(
        self,
        ids: Iterable[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        message = tokenizer_pb2.DetokenizeRequest(model=model, ids=ids)
        if skip_special_tokens is not None:
            message.skip_special_tokens = skip_special_tokens
        return str((await self._unary(self._stubs.detokenize, message, timeout_s)).text)

    async def model_info(
        self, *, model: str | None = None, timeout_s: float | None = None
    ) -> info_pb2.GetModelInfoResponse:
        """Limits, effective defaults and capabilities, as the protocol's message."""
        message = info_pb2.GetModelInfoRequest(model=model)
        told: info_pb2.GetModelInfoResponse = await self._unary(self._stubs.model_info, message, timeout_s)
        return told

    async def server_info(self, *, timeout_s: float | None = None) -> info_pb2.GetServerInfoResponse:
        """Version, engines and their states, as the protocol's message. Of several servers any one answers."""
        message = info_pb2.GetServerInfoRequest()
        told: info_pb2.GetServerInfoResponse = await self._unary(self._stubs.server_info, message, timeout_s)
        return told

    async def load(self, *, timeout_s: float | None = None) -> info_pb2.GetLoadResponse:
        """How busy the server is, as the protocol's message. Of several servers any one answers."""
        told: info_pb2.GetLoadResponse = await self._unary(self._stubs.load, info_pb2.GetLoadRequest(), timeout_s)
        return told

    async def health(self, service: str = HEALTH_SERVICE, *, timeout_s: float | None = None) -> str:
        """`SERVING`, `NOT_SERVING`, or `SERVICE_UNKNOWN` for a name that the server does not know."""
        message = _messages.HealthCheckRequest(service=service)
        try:
            return health_status(await self._unary(self._stubs.check, message, timeout_s))
        except errors.NotFoundError:
            return "SERVICE_UNKNOWN"

    async def watch_health(
        self, service: str = HEALTH_SERVICE, *, timeout_s: float | None = None
    ) -> AsyncGenerator[str, None]:
        """Each change of `health`, the present state first. Ends when the server ends it; leaving it cancels."""
        message = _messages.HealthCheckRequest(service=service)
        call = self._stubs.watch(message, timeout=timeout_s, metadata=self._connection.metadata())
        try:
            with _errors_of_the_call():
                async for response in call:
                    yield health_status(response)
        finally:
            call.cancel()

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """End live requests; for administrators. True for those that were live."""
        told = await self._unary(self._stubs.abort, admin_pb2.AbortRequest(request_ids=request_ids), timeout_s)
        return {one.request_id: one.aborted for one in told.results}

    async def drain(self, grace_s: float | None = None, *, timeout_s: float | None = None) -> int:
        """Have the server stop once its live requests have ended, or `grace_s` is over; for administrators. How many
        there still are.
        """
        message = admin_pb2.DrainRequest(grace=None if grace_s is None else request.duration(grace_s))
        return int((await self._unary(self._stubs.drain, message, timeout_s)).live_requests)

    async def close(self) -> None:
        """Close the channels; calls that are open end with RequestCancelledError."""
        if self._made is not None:
            for channel in self._made.channels:
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, method: Any, message: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        timeout_s = self._defaults.timeout_s if timeout_s is None else timeout_s
        with _errors_of_the_call():
            return await method(message, timeout=timeout_s, metadata=(*self._connection.metadata(), *metadata))


@contextlib.contextmanager
def _errors_of_the_call() -> Iterator[None]:
    """What gRPC raises, as this client's exceptions."""
    try:
        yield
    except grpc.RpcError as error:
        raise errors.from_rpc_error(error) from error
    except asyncio.CancelledError as error:
        if _is_task_cancelled():
            raise
        raise cancelled() from error


def _is_task_cancelled() -> bool:
    """gRPC raises CancelledError for three things: the waiting task was cancelled, the call was, by `close` or with its
    channel, or the server says CANCELLED. Only the first one is asyncio's.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
