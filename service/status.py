"""Exception → status: the only table, and the only edge where a call ends badly.

Each class of `service.errors` has one row. Whatever has none is our bug: INTERNAL with an incident id, which
`report_bug` logs, once. No text of an exception and no text of a user reaches a client. A new error is raised for each
call, since one shared by many streams would grow its traceback with each.

`safe_handlers` is how servicers are registered:

    server.add_generic_rpc_handlers(
        (safe_handlers(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], servicer, report_bug),)
    )

The rpc bodies then simply raise errors of `service.errors`; a message that cannot be read (bad UTF-8 in a string is
one), or none at all, is answered INVALID_ARGUMENT before a body is called, without the traceback that grpc would log.
To gRPC every method is one whose requests stream, which is the same on the wire: where they do not, grpc.aio leaves a
call without a message unanswered for ever.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import duration_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2

from service import errors
from service.limits import RECEIVING_CALLS_MAX

DOMAIN = "emberline"
STATUS_BYTES_MAX = 1024
PUSHBACK_KEY = "grpc-retry-pushback-ms"
STATUS_KEY = "grpc-status-details-bin"
RETRY_AFTER_S_MAX = 3600.0
INTAKE_RETRY_AFTER_S = 1.0
REQUEST_TIMEOUT_S = 60.0
"""From a call's headers to the end of its request; the largest one takes seconds on a slow line."""
NEVER = -1.0
"""A pushback that forbids the client's library to retry."""

Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # a string: only in the stubs is the class generic
ReportBug = Callable[[str, Exception], None]
"""Called with an incident id and the exception, once per exception that the table does not know; logs it."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What one error becomes."""

    code: int
    """Of google.rpc.Code; the numbers are gRPC's."""
    reason: str = ""
    """Of ErrorInfo; empty: no ErrorInfo."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Of ErrorInfo."""
    retry_after_s: float | None = None
    """None says nothing about retries; NEVER forbids them."""
    violations: tuple[errors.FieldViolation, ...] = ()


def _engine_dead(error: errors.EngineDeadError) -> _Row:
    retry_after_s = NEVER if error.in_step else error.retry_after_s
    return _Row(code_pb2.UNAVAILABLE, "ENGINE_DEAD", (("death_id", error.death_id),), retry_after_s)


def _poison(error: errors.PoisonRequestError) -> _Row:
    metadata = (("death_id", error.death_id[:64]),) if error.death_id else ()
    return _Row(code_pb2.INTERNAL, "POISON_REQUEST", metadata, NEVER)


def _unsupported(error: errors.UnsupportedOptionError) -> _Row:
    return _Row(code_pb2.UNIMPLEMENTED, "UNSUPPORTED_OPTION", (("options", ", ".join(error.options)[:256]),))


def _never_fits(_: errors.NeverFitsError) -> _Row:
    violation = errors.FieldViolation("input", "with the resumed tokens and one to come it exceeds the whole KV pool")
    return _Row(code_pb2.INVALID_ARGUMENT, violations=(violation,))


def _bad_guide(_: errors.BadGuideError) -> _Row:
    violation = errors.FieldViolation("resume_token_ids", "must follow the guide from its beginning")
    return _Row(code_pb2.INVALID_ARGUMENT, "BAD_GUIDE", (), NEVER, (violation,))


def _guide_dead_end(_: errors.GuideDeadEndError) -> _Row:
    description = "with sampling.allowed_token_ids and stopping.min_tokens it must always leave a token to sample"
    return _Row(code_pb2.INVALID_ARGUMENT, "GUIDE_DEAD_END", (), NEVER, (errors.FieldViolation("guided", description),))


TABLE: dict[type[errors.CallError], Callable[[Any], _Row]] = {
    errors.InvalidRequestError: lambda e: _Row(code_pb2.INVALID_ARGUMENT, violations=e.violations),
    errors.TemplateError: lambda _: _Row(code_pb2.INVALID_ARGUMENT, "TEMPLATE_ERROR"),
    errors.NoChatTemplateError: lambda _: _Row(code_pb2.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE"),
    errors.UnsupportedOptionError: _unsupported,
    errors.UnknownModelError: lambda e: _Row(
        code_pb2.NOT_FOUND, "UNKNOWN_MODEL", (("served_model", e.served_model_name[:128]),)
    ),
    errors.DuplicateRequestIdError: lambda _: _Row(code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    errors.QueueFullError: lambda e: _Row(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", (), e.retry_after_s),
    errors.SlowReaderError: lambda _: _Row(code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER"),
    errors.NeverFitsError: _never_fits,
    errors.EngineStartingError: lambda e: _Row(code_pb2.UNAVAILABLE, "ENGINE_STARTING", (), e.retry_after_s),
    errors.DrainingError: lambda e: _Row(code_pb2.UNAVAILABLE, "DRAINING", (), e.retry_after_s),
    errors.EngineDeadError: _engine_dead,
    errors.NonFiniteError: lambda _: _Row(code_pb2.INTERNAL, "NON_FINITE", (), NEVER),
    errors.PoisonRequestError: _poison,
    errors.RequestOutOfMemoryError: lambda _: _Row(code_pb2.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", (), NEVER),
    errors.UnauthenticatedError: lambda _: _Row(code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.PermissionDeniedError: lambda e: _Row(code_pb2.PERMISSION_DENIED, "SCOPE_MISSING", (("scope", e.scope),)),
    errors.AbortedByAdministratorError: lambda _: _Row(code_pb2.ABORTED, "ABORTED_BY_ADMINISTRATOR"),
    errors.TimeLimitError: lambda e: _Row(
        code_pb2.DEADLINE_EXCEEDED, "TIME_LIMIT", (("limit", e.limit), ("place", e.place))
    ),
    errors.GuideLimitError: lambda e: _Row(code_pb2.INVALID_ARGUMENT, "GUIDE_LIMIT", (("limit", e.what),)),
    errors.BadGuideError: _bad_guide,
    errors.GuideDeadEndError: _guide_dead_end,
    errors.InternalError: lambda e: _Row(code_pb2.INTERNAL, "INTERNAL", (("incident_id", e.incident_id),)),
}
"""Error class → its row. A test walks `service.errors` and fails on a class without one."""


def to_status(error: errors.CallError) -> tuple[status_pb2.Status, tuple[tuple[str, str], ...]]:
    """The status, at most STATUS_BYTES_MAX long, and the trailing metadata that goes with it."""
    row = TABLE[type(error)](error)
    status = status_pb2.Status(code=row.code, message=_message(error, row.violations))
    metadata: tuple[tuple[str, str], ...] = ()
    if row.reason:
        _add(status, error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN, metadata=dict(row.metadata)))
    if row.retry_after_s is not None:
        pushback_ms = -1
        if row.retry_after_s >= 0:
            pushback_ms = math.ceil(min(row.retry_after_s, RETRY_AFTER_S_MAX) * 1000)
            delay = duration_pb2.Duration(seconds=pushback_ms // 1000, nanos=pushback_ms % 1000 * 1_000_000)
            _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
        metadata = ((PUSHBACK_KEY, str(pushback_ms)),)
    if row.violations:
        _add_violations(status, row.violations)
    return status, metadata


def code_and_reason(error: errors.CallError) -> tuple[str, str]:
    """The name of the error's gRPC code, and ErrorInfo's reason (empty: none): for those who tell of calls."""
    row = TABLE[type(error)](error) if type(error) in TABLE else _Row(code_pb2.INTERNAL, "INTERNAL")
    return code_pb2.Code.Name(row.code), row.reason


def _message(error: errors.CallError, violations: Sequence[errors.FieldViolation]) -> str:
    """Errors of this project hold no user text; the first violation goes into the line that people see."""
    text = str(error)
    if violations:
        text += f": {violations[0].field}: {violations[0].description}"
        if len(violations) > 1:
            text += f" (and {len(violations) - 1} more)"
    return text if len(text) <= 200 else text[:199] + "…"


def _add(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _add_violations(status: status_pb2.Status, violations: Sequence[errors.FieldViolation]) -> None:
    """As many as fit, and how many more there are."""
    for num_kept in range(len(violations), -1, -1):
        if num_kept > 32:
            continue  # no status holds so many
        bad_request = error_details_pb2.BadRequest()
        for violation in violations[:num_kept]:
            bad_request.field_violations.add(field=violation.field[:100], description=violation.description[:200])
        if num_kept < len(violations):
            bad_request.field_violations.add(description=f"and {len(violations) - num_kept} more")
        candidate = status_pb2.Status()
        candidate.CopyFrom(status)
        _add(candidate, bad_request)
        if candidate.ByteSize() <= STATUS_BYTES_MAX:
            status.CopyFrom(candidate)
            return


async def abort_with(context: Context, error: errors.CallError) -> NoReturn:
    """End the call with the error's status. Raises grpc's own abort error, which must reach grpc."""
    status, metadata = to_status(error)
    said = context.trailing_metadata() or ()  # what the body has set: grpc would drop it for what it is given here
    trailing = (*said, *metadata, (STATUS_KEY, status.SerializeToString()))
    await context.abort(_GRPC_CODES[status.code], status.message, trailing)
    raise AssertionError("abort returns to nobody")


_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Unreadable:
    """Stands for a request whose bytes are no message of its type."""


_UNREADABLE = _Unreadable()


def _safe_deserializer(message_class: type[Message]) -> Callable[[bytes], Message | _Unreadable]:
    def deserialize(data: bytes) -> Message | _Unreadable:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return _UNREADABLE

    return deserialize


def _readable(request: Message | _Unreadable) -> Message:
    if isinstance(request, _Unreadable):
        violation = errors.FieldViolation("", "the bytes are no message of this type; strings must be valid UTF-8")
        raise errors.InvalidRequestError([violation])
    return request


class _Intake:
    """Of one service: reads each call's one request, for a bounded number of calls at a time. Over the bound the oldest
    has to go: whoever means it sends the message right behind the headers, and has the place for a moment only.
    """

    def __init__(self, check_room: Callable[[], None] | None) -> None:
        self._check_room = check_room
        self._reading: dict[asyncio.Timeout, None] = {}
        """Of the calls whose message has not come, the oldest in front."""

    async def receive(self, context: Context) -> Message:
        """What comes after it is not read."""
        if self._check_room is not None:
            self._check_room()
        if len(self._reading) >= RECEIVING_CALLS_MAX:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            if not oldest.expired():  # else its time is over, and its own task has not run since
                oldest.reschedule(asyncio.get_running_loop().time())
        timeout = asyncio.timeout(REQUEST_TIMEOUT_S)
        had_time = True
        try:
            async with timeout:
                self._reading[timeout] = None
                try:
                    request = await context.read()
                finally:
                    had_time = timeout in self._reading
                    self._reading.pop(timeout, None)
        except TimeoutError:
            if not had_time:
                raise errors.QueueFullError(INTAKE_RETRY_AFTER_S) from None
            violation = errors.FieldViolation("", f"no whole message came within {REQUEST_TIMEOUT_S:g} s")
            raise errors.InvalidRequestError([violation]) from None
        if request is grpc.aio.EOF:
            raise errors.InvalidRequestError([errors.FieldViolation("", "the call ended without a whole message")])
        return _readable(request)


def safe_handlers(
    service: ServiceDescriptor,
    servicer: object,
    report_bug: ReportBug,
    *,
    reader_timeout_s: float | None = None,
    check_room: Callable[[], None] | None = None,
) -> grpc.GenericRpcHandler:
    """Method handlers for an asyncio servicer: deserializers that never raise, and a catch-all around each body.

    The servicer has one method per rpc, `async def Method(request, context)`: a coroutine; where the rpc streams, an
    async generator, or a coroutine that calls `context.write`. It raises `CallError`s, or calls `context.abort` itself.
    One whose single answer is large may be a generator, too, and so hold its place until the answer is written.

    A generator whose reader leaves no room for the next message for `reader_timeout_s` gets SlowReaderError, raised at
    the generator's `yield`: what the call holds is given back then. The status goes out when the reader reads again.

    `check_room` raises a `CallError` where the call would be refused whatever its message says: it is not read then.
    """
    intake = _Intake(check_room)
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name), report_bug, reader_timeout_s, intake)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def safe_dialogue(
    body: Callable[[Any, Context], AsyncGenerator[Any, None]],
    request_class: type[Message],
    response_class: type[Message],
    report_bug: ReportBug,
) -> _Handler:
    """The same for a method that streams both ways; `body` is an async generator of responses."""

    async def readable(requests: AsyncIterator[Message | _Unreadable]) -> AsyncGenerator[Message, None]:
        async for request in requests:
            yield _readable(request)

    async def call(requests: AsyncIterator[Message | _Unreadable], context: Context) -> None:
        try:
            await _writing(body, None)(readable(requests), context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the catch-all around every rpc
            await _end_badly(context, error, report_bug)

    return grpc.stream_stream_rpc_method_handler(
        call,
        request_deserializer=_safe_deserializer(request_class),
        response_serializer=response_class.SerializeToString,
    )


def _handler(
    method: MethodDescriptor,
    body: Callable[..., Any],
    report_bug: ReportBug,
    reader_timeout_s: float | None,
    intake: _Intake,
) -> _Handler:
    assert not method.client_streaming, "such a method is a `safe_dialogue`"
    is_stream = method.server_streaming
    if inspect.isasyncgenfunction(body):
        body, is_stream = _writing(body, reader_timeout_s), True
    # One message or many: on the wire it is the same.
    make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler

    async def call(_requests: AsyncIterator[Message | _Unreadable], context: Context) -> Any:
        try:
            return await body(await intake.receive(context), context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the catch-all around every rpc
            await _end_badly(context, error, report_bug)

    return make(
        call,
        request_deserializer=_safe_deserializer(GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _writing(
    body: Callable[[Any, Context], AsyncGenerator[Message, None]], reader_timeout_s: float | None
) -> Callable[[Any, Context], Awaitable[None]]:
    """A generator body as one that writes. grpc would leave closing the generator to the garbage collector; here its
    `finally` runs in the call's own task, at once.
    """

    async def write_all(request: Any, context: Context) -> None:
        has_headers = False
        async with aclosing(body(request, context)) as responses:
            async for response in responses:
                try:
                    async with asyncio.timeout(reader_timeout_s):
                        if not has_headers:
                            # Apart from the message, which a reader without any window holds up: grpc.aio would take
                            # headers that went along with it for unsent, and fail to send them again with the status.
                            await context.send_initial_metadata(())
                            has_headers = True
                        await context.write(response)
                except TimeoutError:
                    with suppress(StopAsyncIteration):
                        await responses.athrow(errors.SlowReaderError())
                    raise errors.SlowReaderError from None

    return write_all


async def _end_badly(context: Context, error: BaseException, report_bug: ReportBug) -> NoReturn:
    """The table's status for what it knows; for the rest an incident."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error  # the caller went away, or the server stops: grpc knows
        # Something that the body waited for was cancelled by ourselves. grpc would tell the caller nothing, for ever.
        error = RuntimeError("cancelled from within")
    if not isinstance(error, errors.CallError) or type(error) not in TABLE:
        assert isinstance(error, Exception)
        incident_id = secrets.token_hex(8)
        report_bug(incident_id, error)
        error = errors.InternalError(incident_id)
    await abort_with(context, error)
