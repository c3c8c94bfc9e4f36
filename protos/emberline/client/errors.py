"""What can come of a call, as exceptions: one class for each thing a caller may want to treat differently.

What lives here: the classes, and the one function that makes them of what gRPC raises. What must not: calls, decisions
about retries. The server tells what happened by `google.rpc.ErrorInfo`; where there is none (a proxy, a broken
connection, another server) the status code alone chooses the class.

    EmberlineError
    ├── UnavailableError                 UNAVAILABLE: try again later, or elsewhere
    │   ├── EngineDeadError                  ENGINE_DEAD: `death_id` is that of the server's log
    │   ├── EngineStartingError              ENGINE_STARTING
    │   └── DrainingError                    DRAINING
    ├── ResourceExhaustedError           RESOURCE_EXHAUSTED
    │   ├── QueueFullError                   QUEUE_FULL: `retry_after_s` says when
    │   ├── SlowReaderError                  SLOW_READER: this caller did not read its stream
    │   └── OutOfMemoryError                 OUT_OF_MEMORY: the request needs more memory than there is
    ├── InvalidRequestError              INVALID_ARGUMENT: `field_violations` names the fields and their bounds
    ├── FailedPreconditionError          FAILED_PRECONDITION, such as chat with a model that has no template
    ├── UnsupportedError                 UNIMPLEMENTED: this server does not have the option, or the rpc
    ├── UnauthenticatedError             UNAUTHENTICATED
    ├── PermissionDeniedError            PERMISSION_DENIED
    ├── NotFoundError                    NOT_FOUND: another model than the served one
    ├── AlreadyExistsError               ALREADY_EXISTS: a live call has this request_id
    ├── DeadlineExceededError            DEADLINE_EXCEEDED: the call's deadline, or a limit of the request
    ├── AbortedError                     ABORTED by an administrator
    ├── RequestCancelledError            CANCELLED: by this program
    ├── InternalError                    INTERNAL: the server's own bug; `metadata["incident_id"]`
    │   ├── PoisonRequestError               POISON_REQUEST: the engine dies of this request: never send it again
    │   └── NonFiniteError                   NON_FINITE: the model's output for it is no number
    ├── IncompleteStreamError            the stream ended well but before its end: something between cut it
    └── ResumeMismatchError              the stream cannot go on: the other server is not the like of the first
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from emberline.client import _messages

PUSHBACK_KEY = "grpc-retry-pushback-ms"
STATUS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field at fault."""

    field: str
    """Its path in the request, such as `sampling.top_p`."""
    description: str
    """What it must be, with the bounds."""


@dataclass(frozen=True, slots=True)
class Details:
    """What a status says beyond its code and its message."""

    reason: str = ""
    """Of ErrorInfo, such as `ENGINE_DEAD`; empty if the server gave none."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of ErrorInfo."""
    retry_after_s: float | None = None
    """When it is worth another try, by the server's word; None if it says nothing."""
    may_retry: bool = True
    """False: the server forbids it (pushback −1), because this request may be what did the damage."""
    field_violations: tuple[FieldViolation, ...] = ()
    """Of BadRequest."""


class EmberlineError(Exception):
    """Base of all errors of this client. The original `grpc.RpcError`, if there is one, is its `__cause__`."""

    def __init__(self, code: grpc.StatusCode, message: str, details: Details | None = None) -> None:
        self.code = code
        self.message = message
        self.details = details or Details()
        reason = f" {self.details.reason}" if self.details.reason else ""
        super().__init__(f"{code.name}{reason}: {message}")

    @property
    def reason(self) -> str:
        """Such as `ENGINE_DEAD`; empty if the server gave none."""
        return self.details.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the server adds to the reason."""
        return self.details.metadata

    @property
    def death_id(self) -> str | None:
        """The engine's death that this is about: the server's log and its crash report have the same id."""
        return self.details.metadata.get("death_id")

    @property
    def retry_after_s(self) -> float | None:
        """When it is worth another try; None if the server says nothing."""
        return self.details.retry_after_s

    @property
    def may_retry(self) -> bool:
        """False where the server forbids another try."""
        return self.details.may_retry

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """The fields at fault, for InvalidRequestError."""
        return self.details.field_violations

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers of pools send exceptions to each other."""
        return type(self), (self.code, self.message, self.details)


class UnavailableError(EmberlineError):
    """The server cannot be reached or cannot serve now."""


class EngineDeadError(UnavailableError):
    """The engine that had the request, or the only one, has died."""


class EngineStartingError(UnavailableError):
    """No engine is ready yet."""


class DrainingError(UnavailableError):
    """The server is about to stop."""


class ResourceExhaustedError(EmberlineError):
    """A limit was reached."""


class QueueFullError(ResourceExhaustedError):
    """The server has as much waiting as it may."""


class SlowReaderError(ResourceExhaustedError):
    """This caller left its stream unread for too long."""


class OutOfMemoryError(ResourceExhaustedError):
    """The request alone needs more memory than the engine has."""


class InvalidRequestError(EmberlineError):
    """The request breaks rules; `field_violations` holds all that are broken."""


class FailedPreconditionError(EmberlineError):
    """The served model lacks what the request needs, such as a chat template."""


class UnsupportedError(EmberlineError):
    """The server does not know the option, or the rpc."""


class UnauthenticatedError(EmberlineError):
    """No credentials, or none that the server knows."""


class PermissionDeniedError(EmberlineError):
    """Known credentials that do not open this service."""


class NotFoundError(EmberlineError):
    """No such model here."""


class AlreadyExistsError(EmberlineError):
    """A live call has this request_id."""


class DeadlineExceededError(EmberlineError):
    """The call's deadline, or `max_queue_time` or `max_time`, has passed or is sure to."""


class AbortedError(EmberlineError):
    """An administrator ended the request."""


class RequestCancelledError(EmberlineError):
    """This program cancelled the call."""


class InternalError(EmberlineError):
    """A bug of the server's."""


class PoisonRequestError(InternalError):
    """The engine dies of this request. It must not be sent again, to no server."""


class NonFiniteError(InternalError):
    """The model's output for this request is not finite."""


class IncompleteStreamError(EmberlineError):
    """The stream ended with OK but without its last message."""


class ResumeMismatchError(EmberlineError):
    """Another server would go on differently: it has another model or another tokenizer."""


_BY_REASON: dict[str, type[EmberlineError]] = {
    "ENGINE_DEAD": EngineDeadError,
    "ENGINE_STARTING": EngineStartingError,
    "DRAINING": DrainingError,
    "QUEUE_FULL": QueueFullError,
    "SLOW_READER": SlowReaderError,
    "OUT_OF_MEMORY": OutOfMemoryError,
    "POISON_REQUEST": PoisonRequestError,
    "NON_FINITE": NonFiniteError,
}
_BY_CODE: dict[grpc.StatusCode, type[EmberlineError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def from_rpc_error(error: grpc.RpcError) -> EmberlineError:
    """The exception of what `grpc` or `grpc.aio` raised, which becomes its cause."""
    call: Any = error
    code = call.code() or grpc.StatusCode.UNKNOWN
    details = read_details(call.trailing_metadata() or ())
    by_code = _BY_CODE.get(code, EmberlineError)
    by_reason = _BY_REASON.get(details.reason, by_code)
    # A reason never makes it another kind of error than its code says.
    kind = by_reason if issubclass(by_reason, by_code) else by_code
    made = kind(code, call.details() or code.value[1], details)
    made.__cause__ = error
    return made


def read_details(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> Details:
    """What a status's trailers say. What cannot be read counts as not said: it is an error that is being told."""
    known: dict[str, Any] = {}
    pushback_ms: float | None = None
    for key, value in trailing_metadata:
        if key == STATUS_KEY and isinstance(value, bytes):
            known |= _read_status(value)
        elif key == PUSHBACK_KEY:
            pushback_ms = _number(value)
    if pushback_ms is not None:
        # As gRPC's own retries take it: what is no number, or below zero, forbids another try.
        known["may_retry"] = pushback_ms >= 0
        known["retry_after_s"] = pushback_ms / 1000 if pushback_ms >= 0 else None
    return Details(**known)


def _number(value: str | bytes) -> float:
    try:
        number = int(value)
    except ValueError:
        return -1
    return number if number >= 0 else -1


def _read_status(data: bytes) -> dict[str, Any]:
    known: dict[str, Any] = {}
    try:
        status = _messages.Status.FromString(data)
        for packed in status.details:
            name = packed.type_url.rpartition("/")[2]
            if name not in _messages.DETAILS:
                continue
            detail = _messages.DETAILS[name].FromString(packed.value)
            match name:
                case "google.rpc.ErrorInfo":
                    known["reason"] = detail.reason
                    known["metadata"] = {entry.key: entry.value for entry in detail.metadata}
                case "google.rpc.RetryInfo":
                    known["retry_after_s"] = math.fsum((detail.retry_delay.seconds, detail.retry_delay.nanos / 1e9))
                case "google.rpc.BadRequest":
                    known["field_violations"] = tuple(
                        FieldViolation(violation.field, violation.description) for violation in detail.field_violations
                    )
    except DecodeError:
        return known
    return known
