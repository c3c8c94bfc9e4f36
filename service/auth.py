"""Who may call what: bearer tokens, their scopes, and the client certificates of administrators.

What lives here: the tokens' file, the decision, and the interceptor that acts on it before anything of a request is
read. What must not: how a refusal looks to a caller (`status.py`), certificates as such (`tls.py`).

`--auth-tokens` is a file with a line per token: a name, its scopes, and the SHA-256 of the token in hexadecimal. `#`
begins a comment.

    # name       scopes            sha256
    web-app      inference,info    3b2f…
    on-call      info,admin        91ac…

The token itself is in no file of the server's: `openssl rand -hex 32` makes one, `printf %s "$TOKEN" | sha256sum` its
digest. Two lines may have the same name, so that a token can be renewed while both are good. A scope never implies
another. A caller sends `authorization: Bearer <token>`.

A token is compared with every line, in a time that depends on neither: `hmac.compare_digest` over the digests, without
an early end. Health needs no token, as probes have none. What no scope is known for, `SERVICE_SCOPES` below, is not
served at all while tokens are asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog

from scheduler import logs
from scheduler.errors import ConfigurationError
from service.errors import CallError, PermissionDeniedError, UnauthenticatedError
from service.reloading import Reloading, read_file
from service.status import Context, abort_with

SCOPES = ("inference", "info", "admin")
SERVICE_SCOPES: dict[str, str | None] = {
    "emberline.v1.InferenceService": "inference",
    "emberline.v1.TokenizerService": "inference",
    "emberline.v1.InfoService": "info",
    "emberline.v1.AdminService": "admin",
    "grpc.channelz.v1.Channelz": "admin",  # it tells the addresses of all callers
    "grpc.health.v1.Health": None,
    "grpc.reflection.v1.ServerReflection": "info",
    "grpc.reflection.v1alpha.ServerReflection": "info",
}
"""What a token must have to call a service; None: nothing. A test holds every registered service to be here."""
ADMIN_SERVICES = tuple(f"/{service}/" for service, scope in SERVICE_SCOPES.items() if scope == "admin")

FILE_BYTES_MAX = 1024 * 1024
TOKENS_MAX = 1024
"""Each is looked at for each call: so many take 0.04 ms."""
TOKEN_CHARS_MAX = 4096
NAME_CHARS_MAX = 64
REFUSALS_INTERVAL_S = 60.0

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]]


@dataclass(frozen=True, slots=True)
class Token:
    """One line of the file."""

    name: str
    """Of the caller that has it; it may be told in logs."""
    scopes: frozenset[str]
    digest: bytes


def load_tokens(path: Path) -> tuple[Token, ...]:
    """Raises ConfigurationError with the number of the line at fault; never with what the line holds."""
    try:
        data = read_file(path, FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigurationError(f"--auth-tokens {path}: {error.strerror}") from None
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigurationError(f"--auth-tokens {path}: it holds other characters than ASCII") from None
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].split()
        if content:
            tokens.append(_token(content, number))
    if not tokens:
        raise ConfigurationError(f"--auth-tokens {path}: no token is in it, so that nobody could call")
    if len(tokens) > TOKENS_MAX or len(data) > FILE_BYTES_MAX:
        raise ConfigurationError(f"--auth-tokens {path}: more than {TOKENS_MAX} tokens or {FILE_BYTES_MAX} bytes")
    if len({token.digest for token in tokens}) < len(tokens):
        raise ConfigurationError(f"--auth-tokens {path}: the same token is in it twice")
    return tuple(tokens)


def _token(parts: list[str], number: int) -> Token:
    def refuse(why: str) -> NoReturn:
        raise ConfigurationError(f"--auth-tokens: line {number}: {why}")

    if len(parts) != 3:
        refuse("must be a name, its scopes joined by commas, and a SHA-256 in hexadecimal")
    name, scopes, digest = parts[0], parts[1].split(","), parts[2]
    if not (name.isprintable() and len(name) <= NAME_CHARS_MAX):
        refuse(f"the name must be at most {NAME_CHARS_MAX} printable characters")
    if not set(scopes) <= set(SCOPES):
        refuse(f"the scopes must be of {', '.join(SCOPES)}")
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        raw = b""
    if len(raw) != hashlib.sha256().digest_size:
        refuse("the third part must be the SHA-256 of the token, 64 hexadecimal digits, not the token")
    return Token(name, frozenset(scopes), raw)


def authenticate(tokens: Sequence[Token], metadata: Metadata) -> Token:
    """The token that a call's metadata presents. Raises UnauthenticatedError."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or len(values[0]) > TOKEN_CHARS_MAX:
        raise UnauthenticatedError
    scheme, _, presented = values[0].partition(" ")
    if scheme.lower() != "bearer":
        raise UnauthenticatedError
    digest = hashlib.sha256(presented.strip().encode()).digest()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token  # and on: the time must not tell where
    if found is None:
        raise UnauthenticatedError
    return found


def service_of(method: str) -> str:
    """`/package.Service/Method` → `package.Service`."""
    return method.removeprefix("/").partition("/")[0]


class TokenAuth(grpc.aio.ServerInterceptor):
    """Lets in whoever has a token for the service. Nothing of a refused call's request is read."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError if the file is no good."""
        self._tokens = Reloading(
            "auth tokens", [path], lambda: load_tokens(path), lambda tokens: {"num_tokens": len(tokens)}
        )
        self._refusals = _Refusals(clock)

    def has_scope(self, scope: str) -> bool:
        """Whether any token has it."""
        return any(scope in token.scopes for token in self._tokens.value)

    def poll(self) -> None:
        """Take in what has changed. May block on the file."""
        self._tokens.poll()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Called in the call's own task."""
        service = service_of(handler_call_details.method)
        if service in SERVICE_SCOPES and SERVICE_SCOPES[service] is None:
            return await continuation(handler_call_details)
        try:
            token = authenticate(self._tokens.value, handler_call_details.invocation_metadata or ())
            handler = await continuation(handler_call_details)
            if handler is not None and SERVICE_SCOPES.get(service) not in token.scopes:
                raise PermissionDeniedError(SERVICE_SCOPES.get(service) or "none")
        except CallError as error:
            self._refusals.add(error)
            return _refusing(error)
        # Never unbound: the task is the call's own, and its context ends with it.
        structlog.contextvars.bind_contextvars(client=token.name)
        return handler


class AdminCertificates(grpc.aio.ServerInterceptor):
    """Of callers with a certificate, lets those with certain names alone call what administrators call; the name is on
    every line of such a call.

    A name is the certificate's common name or one of its alternative names. The certificate itself has been verified in
    the handshake.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names = frozenset(names)
        self._refusals = _Refusals(clock)

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """The peer is known only where the call is handled."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(ADMIN_SERVICES):
            return handler
        body: Any = handler.stream_unary or handler.stream_stream

        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            names = self._names & certificate_names(context)
            if not names:
                error = PermissionDeniedError("admin")
                self._refusals.add(error)
                await abort_with(context, error)
            structlog.contextvars.bind_contextvars(administrator=min(names))
            return await body(requests, context)

        make = grpc.stream_stream_rpc_method_handler
        if handler.stream_unary is not None:
            make = grpc.stream_unary_rpc_method_handler
        return make(guarded, handler.request_deserializer, handler.response_serializer)


def certificate_names(context: Context) -> set[str]:
    """Of the caller's certificate; none without one."""
    known = context.auth_context()
    values = [*known.get("x509_common_name", ()), *known.get("x509_subject_alternative_name", ())]
    return {value.decode("utf-8", "replace") for value in values if value}


def _refusing(error: CallError) -> _Handler:
    """Ends the call with the error's status. To gRPC every method may be one that streams both ways."""

    async def refuse(_requests: AsyncIterator[Any], context: Context) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Refusals:
    """Who has been turned away, told at once and then once a minute: whoever guesses tokens must not fill the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_s = -REFUSALS_INTERVAL_S
        self._counts = {UnauthenticatedError: 0, PermissionDeniedError: 0}

    def add(self, error: CallError) -> None:
        self._counts[type(error)] += 1
        now_s = self._clock()
        if now_s - self._told_s < REFUSALS_INTERVAL_S:
            return
        self._told_s = now_s
        logs.get_logger().warning(
            "calls refused",
            num_unauthenticated=self._counts[UnauthenticatedError],
            num_permission_denied=self._counts[PermissionDeniedError],
        )
        self._counts = dict.fromkeys(self._counts, 0)
