from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from emberline.v1 import inference_pb2, inference_pb2_grpc
from service import errors, status
from tests.service.support import until

SAMPLES: dict[type[errors.CallError], errors.CallError] = {
    error_class: make()
    for error_class, make in {
        errors.InvalidRequestError: lambda: errors.InvalidRequestError([errors.FieldViolation("text", "required")]),
        errors.TemplateError: errors.TemplateError,
        errors.NoChatTemplateError: errors.NoChatTemplateError,
        errors.UnsupportedOptionError: lambda: errors.UnsupportedOptionError(["guided"]),
        errors.UnknownModelError: lambda: errors.UnknownModelError("tiny"),
        errors.DuplicateRequestIdError: errors.DuplicateRequestIdError,
        errors.QueueFullError: lambda: errors.QueueFullError(1.5),
        errors.SlowReaderError: errors.SlowReaderError,
        errors.NeverFitsError: errors.NeverFitsError,
        errors.EngineStartingError: lambda: errors.EngineStartingError(2.0),
        errors.DrainingError: lambda: errors.DrainingError(1.0),
        errors.EngineDeadError: lambda: errors.EngineDeadError("d-1", in_step=False, retry_after_s=3.0),
        errors.NonFiniteError: errors.NonFiniteError,
        errors.PoisonRequestError: lambda: errors.PoisonRequestError("d-1"),
        errors.RequestOutOfMemoryError: errors.RequestOutOfMemoryError,
        errors.UnauthenticatedError: errors.UnauthenticatedError,
        errors.PermissionDeniedError: lambda: errors.PermissionDeniedError("admin"),
        errors.AbortedByAdministratorError: errors.AbortedByAdministratorError,
        errors.TimeLimitError: lambda: errors.TimeLimitError("deadline", "queue"),
        errors.GuideLimitError: lambda: errors.GuideLimitError("time"),
        errors.BadGuideError: errors.BadGuideError,
        errors.GuideDeadEndError: errors.GuideDeadEndError,
        errors.InternalError: lambda: errors.InternalError("i-1"),
    }.items()
}


def call_errors() -> list[type[errors.CallError]]:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [value for value in classes if issubclass(value, errors.CallError) and value is not errors.CallError]


def details(error: errors.CallError) -> tuple[status_pb2.Status, dict[str, Any], dict[str, str]]:
    """The status, its details by their message's name, and the trailing metadata."""
    found, metadata = status.to_status(error)
    by_name: dict[str, Any] = {}
    for detail in found.details:
        for message_class in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest):
            message = message_class()
            if detail.Unpack(message):
                by_name[message_class.DESCRIPTOR.name] = message
    assert len(by_name) == len(found.details)
    return found, by_name, dict(metadata)


@pytest.mark.parametrize("error_class", call_errors())
def test_every_error_has_its_row(error_class: type[errors.CallError]) -> None:
    """A class of service.errors that the table does not know fails here; each row names a code and gives details."""
    assert error_class in status.TABLE
    found, by_name, _ = details(SAMPLES[error_class])
    assert found.code not in {code_pb2.OK, code_pb2.UNKNOWN}
    assert found.message
    assert by_name
    if "ErrorInfo" in by_name:
        assert by_name["ErrorInfo"].domain == "emberline"


def test_the_table_has_no_row_too_many() -> None:
    """What nobody can raise needs no status."""
    assert set(status.TABLE) == set(call_errors())


@pytest.mark.parametrize(
    ("error", "code", "reason", "pushback"),
    [
        (errors.QueueFullError(1.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL", "1500"),
        (errors.SlowReaderError(), "RESOURCE_EXHAUSTED", "SLOW_READER", None),
        (errors.EngineStartingError(0.0001), "UNAVAILABLE", "ENGINE_STARTING", "1"),
        (errors.DrainingError(0), "UNAVAILABLE", "DRAINING", "0"),
        (errors.EngineDeadError("d", in_step=False, retry_after_s=2), "UNAVAILABLE", "ENGINE_DEAD", "2000"),
        (errors.EngineDeadError("d", in_step=True, retry_after_s=2), "UNAVAILABLE", "ENGINE_DEAD", "-1"),
        (errors.EngineDeadError("d", in_step=False, retry_after_s=None), "UNAVAILABLE", "ENGINE_DEAD", None),
        (errors.EngineStartingError(float("inf")), "UNAVAILABLE", "ENGINE_STARTING", "3600000"),
        (errors.EngineStartingError(), "UNAVAILABLE", "ENGINE_STARTING", None),
        (errors.NonFiniteError(), "INTERNAL", "NON_FINITE", "-1"),
        (errors.PoisonRequestError(), "INTERNAL", "POISON_REQUEST", "-1"),
        (errors.PoisonRequestError("d"), "INTERNAL", "POISON_REQUEST", "-1"),
        (errors.RequestOutOfMemoryError(), "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "-1"),
        (errors.DuplicateRequestIdError(), "ALREADY_EXISTS", "DUPLICATE_REQUEST_ID", None),
        (errors.UnknownModelError("m"), "NOT_FOUND", "UNKNOWN_MODEL", None),
        (errors.UnsupportedOptionError(["n"]), "UNIMPLEMENTED", "UNSUPPORTED_OPTION", None),
        (errors.NoChatTemplateError(), "FAILED_PRECONDITION", "NO_CHAT_TEMPLATE", None),
        (errors.TemplateError(), "INVALID_ARGUMENT", "TEMPLATE_ERROR", None),
        (errors.UnauthenticatedError(), "UNAUTHENTICATED", "UNAUTHENTICATED", None),
        (errors.PermissionDeniedError("admin"), "PERMISSION_DENIED", "SCOPE_MISSING", None),
        (errors.AbortedByAdministratorError(), "ABORTED", "ABORTED_BY_ADMINISTRATOR", None),
        (errors.TimeLimitError("deadline", "admission"), "DEADLINE_EXCEEDED", "TIME_LIMIT", None),
        (errors.GuideLimitError("time"), "INVALID_ARGUMENT", "GUIDE_LIMIT", None),
        (errors.BadGuideError(), "INVALID_ARGUMENT", "BAD_GUIDE", "-1"),
        (errors.GuideDeadEndError(), "INVALID_ARGUMENT", "GUIDE_DEAD_END", "-1"),
    ],
)
def test_codes_reasons_and_pushbacks(error: errors.CallError, code: str, reason: str, pushback: str | None) -> None:
    """The design's table, row by row; RetryInfo says what the pushback says, unless that forbids a retry."""
    found, by_name, metadata = details(error)
    assert code_pb2.Code.Name(found.code) == code
    assert by_name["ErrorInfo"].reason == reason
    assert metadata.get("grpc-retry-pushback-ms") == pushback
    assert ("RetryInfo" in by_name) == (pushback not in {None, "-1"})
    if "RetryInfo" in by_name:
        assert by_name["RetryInfo"].retry_delay.ToMilliseconds() == int(pushback or "")


@pytest.mark.parametrize(
    "error",
    [errors.EngineDeadError("death-7", in_step=False, retry_after_s=None), errors.PoisonRequestError("death-7")],
)
def test_a_death_tells_its_id(error: errors.CallError) -> None:
    """All streams of one death can be told to belong together, and found in the log."""
    found, by_name, _ = details(error)
    assert dict(by_name["ErrorInfo"].metadata) == {"death_id": "death-7"}
    assert "death-7" in found.message


def test_a_poison_without_a_death_names_none() -> None:
    """A request that only made its steps raise has no death to point to."""
    _, by_name, _ = details(errors.PoisonRequestError())
    assert dict(by_name["ErrorInfo"].metadata) == {}


def test_what_never_fits_is_blamed_on_the_input() -> None:
    """A request is refused where its prompt and resumed tokens leave no room for one token; max_tokens has no part."""
    found, by_name, _ = details(errors.NeverFitsError())
    assert [violation.field for violation in by_name["BadRequest"].field_violations] == ["input"]
    assert "max_tokens" not in str(found)


@pytest.mark.parametrize("count", [1, 5, 40, 5000])
def test_a_status_is_small_however_much_is_wrong(count: int) -> None:
    """At most 1 KB in all, since over 16 KB gRPC changes the code; what is cut is counted."""
    violations = [errors.FieldViolation(f"field[{i}]", "must be in [0, 1]") for i in range(count)]
    found, by_name, _ = details(errors.InvalidRequestError(violations))
    assert found.ByteSize() <= status.STATUS_BYTES_MAX
    listed = by_name["BadRequest"].field_violations
    named = [violation for violation in listed if violation.field]
    assert named[0].field == "field[0]"
    if len(named) < count:
        assert listed[-1].description == f"and {count - len(named)} more"
    assert ("more" in found.message) == (count > 1)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError([errors.FieldViolation("f" * 5000, "ü" * 5000)] * 3),
        errors.UnsupportedOptionError(["option"] * 1000),
        errors.UnknownModelError("é" * 5000),
        errors.PoisonRequestError("d" * 5000),
        errors.EngineDeadError("d" * 32, in_step=True, retry_after_s=1.0),
    ],
)
def test_a_status_is_small_whatever_is_in_it(error: errors.CallError) -> None:
    """No single value can make it large."""
    assert status.to_status(error)[0].ByteSize() <= status.STATUS_BYTES_MAX


class Bodies:
    """An InferenceService whose bodies a test brings."""

    def __init__(self, generate: Callable[..., Any], complete: Callable[..., Any]) -> None:
        self.Generate = generate
        self.Complete = complete


class Served:
    """A real server with such bodies, and a channel to it."""

    def __init__(self) -> None:
        self.bugs: list[tuple[str, Exception]] = []
        self.server = grpc.aio.server()

    async def start(
        self,
        generate: Callable[..., Any],
        complete: Callable[..., Any],
        *,
        reader_timeout_s: float | None = None,
        check_room: Callable[[], None] | None = None,
    ) -> None:
        service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
        handlers = status.safe_handlers(
            service,
            Bodies(generate, complete),
            lambda incident, error: self.bugs.append((incident, error)),
            reader_timeout_s=reader_timeout_s,
            check_room=check_room,
        )
        self.server.add_generic_rpc_handlers((handlers,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(None)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served()
    yield server
    await server.stop()


async def unused(_request: object, _context: object) -> Any:
    pytest.fail("this body was not to be called")


REQUEST = inference_pb2.GenerateRequest(text="canary")


async def test_a_raised_error_reaches_the_caller_with_its_details(served: Served) -> None:
    """Code, message, details and pushback, from a unary body and from a stream that has begun."""

    async def generate(_request: object, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        yield inference_pb2.GenerateResponse(text="a")
        raise errors.EngineDeadError("d-1", in_step=False, retry_after_s=0.25)

    async def complete(_request: object, _context: object) -> Any:
        raise errors.QueueFullError(0.5)

    await served.start(generate, complete)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Complete(REQUEST)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "500") in tuple(caught.value.trailing_metadata())
    stream = served.stub.Generate(REQUEST)
    assert (await stream.read()).text == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    sent = rpc_status.from_call(caught.value)
    assert sent is not None
    assert sent.code == code_pb2.UNAVAILABLE
    assert [detail.type_url.rpartition(".")[2] for detail in sent.details] == ["ErrorInfo", "RetryInfo"]
    assert served.bugs == []


async def test_an_unknown_exception_is_an_incident(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL with an incident id that the log has too; its text goes nowhere, and grpc logs no traceback."""

    async def generate(_request: object, context: Any) -> None:
        raise ValueError("canary")

    async def complete(_request: object, _context: object) -> Any:
        raise ZeroDivisionError("canary")

    await served.start(generate, complete)
    with caplog.at_level(logging.WARNING):
        for call in (lambda: served.stub.Complete(REQUEST), lambda: served.stub.Generate(REQUEST).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            sent = rpc_status.from_call(caught.value)
            assert sent is not None
            info = error_details_pb2.ErrorInfo()
            assert sent.details[0].Unpack(info)
            assert (sent.code, info.metadata["incident_id"]) == (code_pb2.INTERNAL, served.bugs[-1][0])
            assert "canary" not in str(caught.value)
    assert [type(error) for _, error in served.bugs] == [ZeroDivisionError, ValueError]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("data", [b"\x1a\x01\xff", b"\xff\xff\xff", b"\x1a\x7f"])
async def test_bytes_that_are_no_message_are_refused(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Bad UTF-8 in a string, and garbage: INVALID_ARGUMENT without a traceback, and no body sees them."""
    await served.start(unused, unused)
    name = "/emberline.v1.InferenceService/"
    with caplog.at_level(logging.WARNING):
        for call in (
            served.channel.unary_unary(name + "Complete")(data),
            served.channel.unary_stream(name + "Generate")(data).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.text == ""
    assert served.bugs == []


async def test_a_bodys_own_abort_passes(served: Served) -> None:
    """context.abort means what it says; it is no bug."""

    async def complete(_request: object, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "none")

    await served.start(unused, complete)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Complete(REQUEST)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert served.bugs == []


async def test_a_cancellation_from_within_is_told_to_the_caller(served: Served) -> None:
    """An awaitable that we cancelled ourselves ends the call; grpc alone would leave the caller waiting for ever."""

    async def complete(_request: object, _context: object) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    await served.start(unused, complete)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Complete(REQUEST, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert len(served.bugs) == 1


async def test_a_callers_cancellation_closes_the_body_at_once(served: Served) -> None:
    """The generator's `finally` runs, and the cancellation is no bug."""
    closed = asyncio.Event()

    async def generate(_request: object, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        try:
            while True:
                yield inference_pb2.GenerateResponse(text="a" * 1000)
                await asyncio.sleep(0)
        finally:
            closed.set()

    await served.start(generate, unused)
    call = served.stub.Generate(REQUEST)
    await call.read()
    call.cancel()
    await asyncio.wait_for(closed.wait(), 30)
    assert served.bugs == []


async def test_a_reader_that_leaves_no_room_is_told_and_holds_nothing(served: Served) -> None:
    """The error is raised in the body, which gives back what it holds while nothing is read; a reader that comes back
    finds SLOW_READER after what was on its way."""
    ended: list[BaseException] = []
    closed = asyncio.Event()

    async def generate(_request: object, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        try:
            while True:
                yield inference_pb2.GenerateResponse(text="a" * 1000)
                await asyncio.sleep(0)
        except BaseException as error:
            ended.append(error)
            raise
        finally:
            closed.set()

    await served.start(generate, unused, reader_timeout_s=0.2)
    call = served.stub.Generate(REQUEST, timeout=30)
    await call.read()
    await asyncio.wait_for(closed.wait(), 30)
    assert [type(error) for error in ended] == [errors.SlowReaderError]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read_on(call)
    sent = rpc_status.from_call(caught.value)
    assert sent is not None
    info = error_details_pb2.ErrorInfo()
    assert sent.details[0].Unpack(info)
    assert (sent.code, info.reason) == (code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER")
    assert served.bugs == []


async def _read_on(call: Any) -> None:
    while await call.read():
        pass


async def test_a_dialogue_is_as_safe_as_a_call(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Where requests stream, too, one that is no message ends the call INVALID_ARGUMENT; a bug is an incident."""

    async def echo(requests: AsyncIterator[Any], _context: object) -> AsyncGenerator[Any, None]:
        async for request in requests:
            if request.text == "canary":
                raise ValueError(request.text)
            yield inference_pb2.GenerateResponse(text=request.text)

    bugs: list[Exception] = []
    method = status.safe_dialogue(
        echo,
        inference_pb2.GenerateRequest,
        inference_pb2.GenerateResponse,
        lambda _incident, error: bugs.append(error),
    )
    served.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Echo", {"Talk": method}),))
    await served.start(unused, unused)
    good = inference_pb2.GenerateRequest(text="hi").SerializeToString()
    with caplog.at_level(logging.WARNING):
        for bad, code in (
            (b"\x1a\x01\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (REQUEST.SerializeToString(), grpc.StatusCode.INTERNAL),
        ):
            call = served.channel.stream_stream("/x.Echo/Talk")()
            await call.write(good)
            assert await call.read() == inference_pb2.GenerateResponse(text="hi").SerializeToString()
            await call.write(bad)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code
            assert "canary" not in str(caught.value)
    assert [type(error) for error in bugs] == [ValueError]
    assert caplog.text == ""


async def test_an_end_before_the_first_message_is_trailers_only(served: Served) -> None:
    """No headers have left, so a client's library may retry the call: here it does, after the pushback."""
    attempts = []

    async def generate(_request: object, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        attempts.append(1)
        if len(attempts) < 2:
            raise errors.EngineStartingError(0.01)
        yield inference_pb2.GenerateResponse(text="ok")

    await served.start(generate, unused)
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s",'
        ' "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    options = [("grpc.service_config", policy)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Generate(REQUEST).read()).text == "ok"
    assert len(attempts) == 2


METHODS = ("Complete", "Generate")


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call of raw bytes ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 30)
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("name", METHODS)
async def test_a_call_without_a_message_is_answered(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Headers and the end, no deadline: INVALID_ARGUMENT; grpc.aio alone would never answer."""
    await served.start(unused, unused)
    with caplog.at_level(logging.WARNING):
        call: Any = served.channel.stream_stream(f"/emberline.v1.InferenceService/{name}")()
        await call.done_writing()
        code, told = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "without a whole message" in told
    assert (served.bugs, caplog.text) == ([], "")


@pytest.mark.parametrize("name", METHODS)
async def test_a_call_whose_message_never_comes_is_answered(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that neither sends nor ends does not hold its call for ever."""
    monkeypatch.setattr(status, "REQUEST_TIMEOUT_S", 0.1)
    await served.start(unused, unused)
    with caplog.at_level(logging.WARNING):
        code, told = await refusal(served.channel.stream_stream(f"/emberline.v1.InferenceService/{name}")())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "within 0.1 s" in told
    assert (served.bugs, caplog.text) == ([], "")


@pytest.mark.parametrize("name", METHODS)
async def test_a_second_message_is_not_read(served: Served, name: str) -> None:
    """The first one is the request; the call is answered whatever follows, and with no end of it in sight."""

    written = asyncio.Event()  # a call that was answered before takes no second message

    async def generate(request: Any, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        await written.wait()
        yield inference_pb2.GenerateResponse(text=request.text)

    async def complete(request: Any, _context: object) -> inference_pb2.CompleteResponse:
        await written.wait()
        return inference_pb2.CompleteResponse(request_id=request.text)

    await served.start(generate, complete)
    call: Any = served.channel.stream_stream(f"/emberline.v1.InferenceService/{name}")()
    await call.write(REQUEST.SerializeToString())
    await call.write(b"\xff\xff\xff")
    written.set()
    answer: bytes = await asyncio.wait_for(call.read(), 30)
    assert b"canary" in answer
    assert await asyncio.wait_for(call.code(), 30) is grpc.StatusCode.OK
    assert served.bugs == []


async def test_callers_that_leave_before_their_message_are_no_bugs(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """To the server this looks much like a call without a message; nothing is logged."""
    await served.start(unused, unused)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            call: Any = served.channel.stream_stream("/emberline.v1.InferenceService/Complete")()
            await call.wait_for_connection()
            await asyncio.sleep(number % 5 * 0.001)
            call.cancel()
        other: Any = served.channel.stream_stream("/emberline.v1.InferenceService/Complete")()
        await other.done_writing()
        await refusal(other)
    assert (served.bugs, caplog.text) == ([], "")


async def test_a_request_that_is_too_large_keeps_grpcs_own_answer() -> None:
    """RESOURCE_EXHAUSTED, though the server's side sees no message."""
    served = Served()
    served.server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
    await served.start(unused, unused)
    for call in (served.stub.Complete, lambda request: served.stub.Generate(request).read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(inference_pb2.GenerateRequest(text="a" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.bugs == []
    await served.stop()


async def test_a_call_whose_time_is_over_in_this_moment_makes_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own time-out has fired and its task has not run yet: the next call is served all the same."""
    monkeypatch.setattr(status, "RECEIVING_CALLS_MAX", 1)
    monkeypatch.setattr(status, "REQUEST_TIMEOUT_S", 0.0)
    intake = status._Intake(None)

    class Silent:
        async def read(self) -> None:
            await asyncio.Event().wait()

    class Prompt:
        async def read(self) -> inference_pb2.GenerateRequest:
            return REQUEST

    late = asyncio.create_task(intake.receive(Silent()))  # type: ignore[arg-type]
    await asyncio.sleep(0)  # it begins to wait for its message
    await asyncio.sleep(0)  # its time-out fires
    (timeout,) = intake._reading
    assert timeout.expired()
    assert await intake.receive(Prompt()) is REQUEST  # type: ignore[arg-type]
    with pytest.raises(errors.CallError):
        await late


async def test_calls_without_a_message_keep_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bound of calls whose message has not come, the oldest is told to come again; a call with its message is
    served at once, and the others still may send theirs."""
    monkeypatch.setattr(status, "RECEIVING_CALLS_MAX", 2)

    async def generate(_request: object, _context: object) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        yield inference_pb2.GenerateResponse(text="a")

    arrived: list[None] = []
    await served.start(generate, unused, check_room=lambda: arrived.append(None))
    method = served.channel.stream_stream(
        "/emberline.v1.InferenceService/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    idle = []
    for number in range(2):
        idle.append(method(timeout=30))
        await until(lambda count=number + 1: len(arrived) == count)
    assert (await served.stub.Generate(REQUEST, timeout=30).read()).text == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await idle[0].read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await idle[1].write(REQUEST)
    assert (await idle[1].read()).text == "a"
    assert await idle[1].code() is grpc.StatusCode.OK
    assert served.bugs == []
