"""Traces of calls, for OpenTelemetry: off unless `--otlp-endpoint` names a collector.

What lives here: the spans of a call, the exporter's set-up and its end. What must not: text of users, anything that a
call waits for. OpenTelemetry is an extra (`emberline-server[otel]`) and is imported only when a collector is named.

    server span  emberline.v1.InferenceService/Generate   parent: the caller's `traceparent`; events: deaths, replays
      └ queue    until its first step
      └ prefill  until its first output
      └ decode   until its end

The children are made at the end of the call, from its record: nothing is done per token. Spans go to a queue with a
bound (what does not fit is dropped) and from there, in a thread of the SDK's, to the collector by OTLP over gRPC. What
fails there is logged once a minute at most. The SDK's own environment variables (OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT) refine
it; none of them switches it on. Attributes follow the conventions for RPC and for generative AI: counts, never content.

Without a collector a call still carries the trace id that its caller sent, into the logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from google.rpc import code_pb2

from scheduler import logs
from scheduler.errors import ConfigurationError
from service.call_record import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

INFERENCE_SERVICE = "emberline.v1.InferenceService"
COMPLAINT_INTERVAL_S = 60.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PROPAGATED_KEYS = ("traceparent", "tracestate")
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that make a server's span an error, as the conventions for gRPC have it."""

Metadata = Iterable[tuple[str, str | bytes]]


class CallTrace(Protocol):
    """One call's part in a trace."""

    trace_id: str
    """32 hexadecimal digits; empty: none."""

    def end(self, call: CallRecord) -> None:
        """It is over."""


class Tracing(Protocol):
    """Begins them."""

    def begin(self, method: str, metadata: Metadata) -> CallTrace:
        """A call that begins now."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Send what is queued, for so long at most."""
        ...


class _NotTraced:
    __slots__ = ("trace_id",)

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id

    def end(self, _call: CallRecord) -> None:
        pass


class NoTracing:
    """No collector is named."""

    def begin(self, _method: str, metadata: Metadata) -> CallTrace:
        return _NotTraced(trace_id_of(_carrier(metadata).get("traceparent", "")))

    async def close(self, timeout_s: float) -> None:
        pass


def trace_id_of(traceparent: str) -> str:
    """The trace id in a W3C `traceparent`; empty if it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return "" if found is None or found[1] == "0" * 32 else found[1]


def make_tracing(endpoint: str | None, version: str, model: str) -> Tracing:
    """Tracing to the collector at `endpoint`, a URL; none if that is None.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    return NoTracing() if endpoint is None else OtlpTracing(_otlp_exporter(endpoint), version, model)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )
    except ImportError:
        raise ConfigurationError("--otlp-endpoint needs the extra otel: pip install 'emberline-server[otel]'") from None
    return OTLPSpanExporter(endpoint=endpoint)


class OtlpTracing:
    """Spans of all calls, by an exporter that nobody waits for."""

    def __init__(self, exporter: SpanExporter, version: str, model: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - an extra
            TraceContextTextMapPropagator,
        )

        _complain_rarely(time.monotonic)
        ours = Resource.create({"service.name": "emberline", "service.version": version})
        # Its sampler, limits and the processor's bounds come from the environment, or the SDK's defaults.
        self._provider: TracerProvider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("emberline", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def begin(self, method: str, metadata: Metadata) -> CallTrace:
        """A server span, in the trace of the caller's `traceparent` if there is one."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an extra

        start_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{INFERENCE_SERVICE}/{method}",
            context=self._propagator.extract(_carrier(metadata)),
            kind=SpanKind.SERVER,
            start_time=start_ns,
        )
        return _SpannedCall(self._tracer, span, start_ns, self._model)

    async def close(self, timeout_s: float) -> None:
        """In a thread that is left behind if it takes longer: the process ends right after."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            with contextlib.suppress(Exception):  # whatever an exporter raises in its last moment
                self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="traces-flush", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout_s)


class _SpannedCall:
    __slots__ = ("_model", "_span", "_start_ns", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer, span: Span, start_ns: int, model: str) -> None:
        self._tracer = tracer
        self._span = span
        self._start_ns = start_ns
        self._model = model
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else ""  # invalid: OTEL_SDK_DISABLED

    def end(self, call: CallRecord) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context  # noqa: PLC0415 - an extra

        span = self._span

        def ns(monotonic_s: float) -> int:
            return self._start_ns + round((monotonic_s - call.started_s) * 1e9)

        try:
            if not span.is_recording():
                return
            span.set_attributes(_attributes(call, self._model))
            for died_s, death_id in call.timeline.deaths:
                span.add_event("engine died", {"emberline.death_id": death_id}, ns(died_s))
            for number, (sent_s, engine) in enumerate(call.timeline.attempts[1:], 2):
                span.add_event("stream goes on", {"emberline.engine": engine, "emberline.attempt": number}, ns(sent_s))
            if call.code in _SERVER_FAULTS:
                span.set_status(StatusCode.ERROR, call.reason or None)
            parent = set_span_in_context(span)
            for name, begin_s, end_s in _phases(call):
                self._tracer.start_span(name, context=parent, start_time=ns(begin_s)).end(ns(end_s))
        finally:
            span.end(ns(call.ended_s))


def _phases(call: CallRecord) -> Sequence[tuple[str, float, float]]:
    """Name, begin and end of each phase that the call came to."""
    scheduled_s, first_s = call.scheduled_s, call.timeline.first_output_s
    if scheduled_s is None:
        return [("queue", call.started_s, call.ended_s)]
    phases = [("queue", call.started_s, scheduled_s), ("prefill", scheduled_s, first_s or call.ended_s)]
    if first_s is not None:
        phases.append(("decode", first_s, call.ended_s))
    return phases


def _attributes(call: CallRecord, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "rpc.system": "grpc",
        "rpc.service": INFERENCE_SERVICE,
        "rpc.method": call.method,
        "rpc.grpc.status_code": code_pb2.Code.Value(call.code),
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "emberline",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": call.num_sequences,
        "gen_ai.usage.input_tokens": call.num_prompt_tokens,
        "gen_ai.usage.output_tokens": call.num_output_tokens,
        "emberline.usage.cached_tokens": call.num_cached_tokens,
        "emberline.request_id": call.label,
        "emberline.attempts": len(call.timeline.attempts),
    }
    if call.finish:
        attributes["gen_ai.response.finish_reasons"] = (call.finish,)
    if call.code != "OK":
        attributes["error.type"] = call.reason or call.code
    return attributes


def _carrier(metadata: Metadata) -> dict[str, str]:
    """What a propagator reads; metadata has each key in lower case."""
    return {key: value for key, value in metadata if key in _PROPAGATED_KEYS and isinstance(value, str)}


class _RareComplaints(logging.Handler):
    """Takes what OpenTelemetry's own loggers say: a collector that is away would fill the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._told_s: float | None = None
        self._num_untold = 0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._clock()
        if self._told_s is not None and now_s - self._told_s < COMPLAINT_INTERVAL_S:
            self._num_untold += 1
            return
        num_untold, self._num_untold, self._told_s = self._num_untold, 0, now_s
        # The template alone, as for every library; `num_untold`: how many there were since the last one told.
        text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        logs.get_logger().warning("traces not exported", message=text, num_untold=num_untold)


def _complain_rarely(clock: Callable[[], float]) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [_RareComplaints(clock)]
