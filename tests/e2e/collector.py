"""An OTLP collector's stand-in: a gRPC server with OpenTelemetry's own TraceService, which keeps what it is sent."""

from __future__ import annotations

import threading
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """What a test asks of one."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    status: int


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc] # the stub is not annotated
    """Enter it to start it."""

    def __init__(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._changed = threading.Condition()
        self._spans: list[Span] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, count: int, timeout_s: float = 60.0) -> list[Span]:
        """The spans of a trace, once there are so many."""
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.of(trace_id)) >= count, timeout_s)
        assert there, f"{len(self.of(trace_id))} of {count} spans within {timeout_s} s"
        return self.of(trace_id)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        """OTLP's one rpc for traces."""
        with self._changed:
            for resource_spans in request.resource_spans:
                resource = _attributes(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    self._spans += [_span(span, resource) for span in scope_spans.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(10.0)


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        resource=resource,
        status=span.status.code,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
