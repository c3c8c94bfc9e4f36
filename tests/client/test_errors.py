"""What gRPC raises, as this client tells it. The details are google's own messages; the client reads them without."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from emberline.client import errors


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailers: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        self._told = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._told[0]

    def details(self) -> str:
        return "what the server says"

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._told[1]


def packed(*details: Any) -> tuple[str, bytes]:
    status = status_pb2.Status(code=1, message="m")
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        status.details.append(wrapped)
    return ("grpc-status-details-bin", status.SerializeToString())


def info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="emberline", metadata=metadata)


def test_all_details_are_read() -> None:
    """Reason, metadata, delay and fields, whatever else stands between them; the cause is gRPC's own error."""
    delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=250_000_000))
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="must be in [0, 1]")
    unknown = error_details_pb2.Help(links=[error_details_pb2.Help.Link(url="https://example.org")])
    failure = Failure(
        grpc.StatusCode.UNAVAILABLE, (packed(unknown, info("ENGINE_DEAD", death_id="d1", x="y"), delay, bad),)
    )
    error = errors.from_rpc_error(failure)
    assert type(error) is errors.EngineDeadError
    assert (error.code, error.reason, error.death_id) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", "d1")
    assert error.metadata == {"death_id": "d1", "x": "y"}
    assert error.retry_after_s == 2.25
    assert error.may_retry
    assert error.field_violations == (errors.FieldViolation("sampling.top_p", "must be in [0, 1]"),)
    assert error.__cause__ is failure
    assert str(error) == "UNAVAILABLE ENGINE_DEAD: what the server says"


@pytest.mark.parametrize(
    ("value", "may_retry", "retry_after_s"),
    [("1500", True, 1.5), ("0", True, 0.0), ("-1", False, None), ("-7", False, None), ("soon", False, None)],
)
def test_pushback(value: str, may_retry: bool, retry_after_s: float | None) -> None:
    """As gRPC's own retries read it: below zero, or no number, forbids another attempt. It goes before RetryInfo."""
    delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=9))
    for order in (1, -1):
        trailers = ((errors.PUSHBACK_KEY, value), packed(delay))[::order]
        error = errors.from_rpc_error(Failure(grpc.StatusCode.UNAVAILABLE, trailers))
        assert (error.may_retry, error.retry_after_s) == (may_retry, retry_after_s)


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x1a\x05\x0a\x01", packed(info("X"))[1][:-2]])
def test_details_that_cannot_be_read_hide_nothing(data: bytes) -> None:
    """The status itself is told all the same."""
    error = errors.from_rpc_error(Failure(grpc.StatusCode.INTERNAL, (("grpc-status-details-bin", data),)))
    assert type(error) is errors.InternalError
    assert "what the server says" in str(error)


def test_a_reason_does_not_change_what_the_code_says() -> None:
    """Somebody else's QUEUE_FULL with INTERNAL is an internal error."""
    error = errors.from_rpc_error(Failure(grpc.StatusCode.INTERNAL, (packed(info("QUEUE_FULL")),)))
    assert type(error) is errors.InternalError


def test_every_code_has_a_class_and_every_class_a_place_in_the_table() -> None:
    """The module's own table at its top names each class once; codes without one are the base."""
    documented = errors.__doc__ or ""
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EmberlineError)
    ]
    for kind in classes:
        assert kind.__name__ in documented
        assert issubclass(kind, errors.EmberlineError)
    for code in grpc.StatusCode:
        error = errors.from_rpc_error(Failure(code))
        assert error.code is code
        assert isinstance(error, errors.EmberlineError)


def test_errors_travel_between_processes() -> None:
    """A pool's worker can raise one: it arrives with all it knows."""
    failure = Failure(grpc.StatusCode.INTERNAL, (packed(info("POISON_REQUEST", death_id="d2")),))
    error = pickle.loads(pickle.dumps(errors.from_rpc_error(failure)))
    assert type(error) is errors.PoisonRequestError
    assert (error.death_id, error.message) == ("d2", "what the server says")
