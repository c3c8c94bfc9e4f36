"""The client for threads.

What lives here: waiting. What must not: decisions (`_progress.py`), requests (`request.py`), shapes (`results.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, Unpack

import grpc

from emberline.client import _messages, errors, request, results
from emberline.client._core import Attempts, Defaults, Stubs, attempts, cancelled, health_status, incomplete
from emberline.client._progress import Resume
from emberline.client.connection import DEFAULT_ADDRESS, HEALTH_SERVICE, Connection, Tls, Token
from emberline.client.request import Options, Prompt, Turn
from emberline.v1 import admin_pb2, info_pb2, tokenizer_pb2

Metadata = Sequence[tuple[str, str | bytes]]


_CHANNEL_OPTIONS = (("SingleThreadedUnaryStream", 1),)
"""The thread that reads a stream drives it itself. With gRPC's other way a stream whose server goes away while a retry
of it is due never has an end, not even by its deadline (seen with grpcio 1.85.3).
"""


class Stream(Iterator[results.Delta]):
    """The deltas of one request, as they come. The call begins when the stream is made.

    Ends after the delta with `usage`; raises EmberlineError if it cannot. Leaving it (`close`, the end of a `with`, the
    last reference gone, as after a `break`) cancels the call at once, and the server frees what it held. One thread at
    a time reads; `close` may come from any.
    """

    def __init__(self, begin: Callable[..., Any], all_attempts: Attempts) -> None:
        self.finish: results.Finish | None = None
        """Of the sequence that ended last; None while it goes on."""
        self.usage: results.Usage | None = None
        """None until the end."""
        self._begin = begin
        self._attempts = all_attempts
        self._closed = threading.Event()
        self._call = self._attempt()

    @property
    def num_resumes(self) -> int:
        """How often another attempt was made."""
        return self._attempts.progress.num_resumes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> results.Delta:
        progress = self._attempts.progress
        while True:
            if self._closed.is_set():
                raise cancelled()
            try:
                message = progress.take(next(self._call))
            except StopIteration:
                if progress.is_finished:
                    raise
                self._mend(incomplete())
            except grpc.RpcError as error:
                if progress.is_finished:
                    raise StopIteration from None  # all has come; how the connection ended is of no interest
                if self._closed.is_set():
                    raise cancelled() from error
                self._mend(errors.from_rpc_error(error))
            except BaseException:  # Ctrl-C, a server that is not the like of the first
                self.close()
                raise
            else:
                if message is not None:
                    return self._give(results.delta(message))

    def answer(self) -> results.Answer:
        """Read all of it. For a stream that has not been read from yet."""
        fold = results.Fold()
        for delta in self:
            fold.add(delta)
        return fold.answer()

    def close(self) -> None:
        """Cancel the call if it is still open. Harmless afterwards; reading on raises RequestCancelledError."""
        if not self._attempts.progress.is_finished:
            self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def _attempt(self) -> Any:
        return self._begin(self._attempts.progress.request(), **self._attempts.arguments())

    def _mend(self, error: errors.EmberlineError) -> None:
        if self._closed.wait(self._attempts.delay_s(error)):
            raise cancelled()
        self._call = self._attempt()
        if self._closed.is_set():  # between the two
            self._call.cancel()

    def _give(self, delta: results.Delta) -> results.Delta:
        self.finish = delta.finish or self.finish
        self.usage = delta.usage
        return delta


class Client:
    """Calls Emberline servers. Safe for many threads at once; a `with` block or `close()` closes its channels.

        with Client("10.0.0.1:50051,10.0.0.2:50051") as client:
            for delta in client.generate("The capital of France is", temperature=0, max_tokens=8):
                print(delta.text, end="", flush=True)

    gRPC does not survive `fork`: make the client in the process that uses it (with `multiprocessing`, the start methods
    `spawn` and `forkserver` do).

    Args:
        target: `HOST`, `HOST:PORT`, several of them (a list, or with commas), or a gRPC target such as
            `dns:///emberline.internal:50051`. A name that stands for several servers is balanced over all of them and
            looked up again by gRPC; of several addresses, names are looked up once, here.
        tls: `Tls()` or gRPC's own channel credentials; None is plaintext.
        server_name: What the servers' certificates must be for, if it is not the first address's host.
        token: A bearer token, or a function that gives one and is asked before each call.
        allow_plaintext_token: Send it without TLS to hosts other than this one.
        attempts_max: Of a call that has brought nothing yet, 1 to 5; 1 never tries again.
        health_check: Whether servers that say NOT_SERVING are left out. By default, where there may be others to take.
        timeout_s: Of each call that does not say its own; None sets no deadline.
        resume: Whether broken streams go on; see `Resume`.
        channel_options: gRPC's, on top of this client's own.

    Raises ValueError or OSError for addresses and files that are of no use; no server is called yet.
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
        options = (*_CHANNEL_OPTIONS, *channel_options)
        self._connection = Connection(
            target, tls, server_name, token, allow_plaintext_token, attempts_max, health_check, options
        )
        self._defaults = Defaults(timeout_s, resume)
        makers = (grpc.insecure_channel, grpc.secure_channel)
        self._stubs = Stubs(
            self._connection.dial(*makers, for_inference=True), self._connection.dial(*makers, for_inference=False)
        )

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Sequence[Turn] | None = None,
        timeout_s: float | None = None,
        resume: bool | Resume | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Stream:
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
        return Stream(self._stubs.generate, made)

    def complete(
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
        return results.answer(self._unary(self._stubs.complete, message, timeout_s, metadata))

    def tokenize(
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
        told = self._unary(self._stubs.tokenize, message, timeout_s)
        return results.Tokenization(tuple(told.ids), tuple(told.pieces), told.max_prompt_tokens)

    def detokenize(
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
        return str(self._unary(self._stubs.detokenize, message, timeout_s).text)

    def model_info(self, *, model: str | None = None, timeout_s: float | None = None) -> info_pb2.GetModelInfoResponse:
        """Limits, effective defaults and capabilities, as the protocol's message."""
        message = info_pb2.GetModelInfoRequest(model=model)
        told: info_pb2.GetModelInfoResponse = self._unary(self._stubs.model_info, message, timeout_s)
        return told

    def server_info(self, *, timeout_s: float | None = None) -> info_pb2.GetServerInfoResponse:
        """Version, engines and their states, as the protocol's message. Of several servers any one answers."""
        message = info_pb2.GetServerInfoRequest()
        told: info_pb2.GetServerInfoResponse = self._unary(self._stubs.server_info, message, timeout_s)
        return told

    def load(self, *, timeout_s: float | None = None) -> info_pb2.GetLoadResponse:
        """How busy the server is, as the protocol's message. Of several servers any one answers."""
        told: info_pb2.GetLoadResponse = self._unary(self._stubs.load, info_pb2.GetLoadRequest(), timeout_s)
        return told

    def health(self, service: str = HEALTH_SERVICE, *, timeout_s: float | None = None) -> str:
        """`SERVING`, `NOT_SERVING`, or `SERVICE_UNKNOWN` for a name that the server does not know."""
        message = _messages.HealthCheckRequest(service=service)
        try:
            return health_status(self._unary(self._stubs.check, message, timeout_s))
        except errors.NotFoundError:
            return "SERVICE_UNKNOWN"

    def watch_health(self, service: str = HEALTH_SERVICE, *, timeout_s: float | None = None) -> Iterator[str]:
        """Each change of `health`, the present state first. Ends when the server ends it; leaving it cancels."""
        message = _messages.HealthCheckRequest(service=service)
        call = self._stubs.watch(message, timeout=timeout_s, metadata=self._connection.metadata())
        try:
            for response in call:
                yield health_status(response)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """End live requests; for administrators. True for those that were live."""
        told = self._unary(self._stubs.abort, admin_pb2.AbortRequest(request_ids=request_ids), timeout_s)
        return {one.request_id: one.aborted for one in told.results}

    def drain(self, grace_s: float | None = None, *, timeout_s: float | None = None) -> int:
        """Have the server stop once its live requests have ended, or `grace_s` is over; for administrators. How many
        there still are.
        """
        message = admin_pb2.DrainRequest(grace=None if grace_s is None else request.duration(grace_s))
        return int(self._unary(self._stubs.drain, message, timeout_s).live_requests)

    def close(self) -> None:
        """Close the channels; calls that are open end with RequestCancelledError."""
        for channel in self._stubs.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, method: Any, message: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        timeout_s = self._defaults.timeout_s if timeout_s is None else timeout_s
        try:
            return method(message, timeout=timeout_s, metadata=(*self._connection.metadata(), *metadata))
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error
