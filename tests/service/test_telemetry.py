"""Traces of calls, as a collector receives them; and that nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from scheduler.errors import ConfigurationError
from service import telemetry
from service.exit import ExitCode
from service.telemetry import NoTracing, make_tracing, trace_id_of
from tests.e2e.collector import Collector, Span
from tests.service.front_end import CANARY, error_of, request, rest_of, running
from tests.service.support import HANG_S, CapturedLogs

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with Collector() as collector:
        yield collector


def traced(run: Any, *prompt: int, **fields: Any) -> Any:
    message = request(*prompt, **fields)
    return run.inference.Generate(message, metadata=(("traceparent", TRACEPARENT),), timeout=HANG_S)


async def drain(run: Any) -> None:
    """Stop as SIGTERM does, once: what is queued is sent then."""
    run.server.request_stop()
    assert await run.exit_code() is ExitCode.CLEAN


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        (TRACEPARENT, TRACE_ID),
        ("", ""),
        ("00-" + "0" * 32 + f"-{PARENT_ID}-01", ""),
        (TRACEPARENT.upper(), ""),
        (TRACEPARENT + "\n", ""),
        ("x" * 10_000, ""),
    ],
)
def test_only_a_trace_id_is_taken_for_one(header: str, trace_id: str) -> None:
    """It goes into every line of the call: nothing but 32 hexadecimal digits, not all zero, does."""
    assert trace_id_of(header) == trace_id
    assert NoTracing().begin("Generate", (("traceparent", header), ("traceparent-bin", b"x"))).trace_id == trace_id


async def test_a_calls_spans(model: Path, log: CapturedLogs, collector: Collector) -> None:
    """A server span in the caller's trace, with queue, prefill and decode below it, end to end; attributes are counts
    and names; the log has the same trace id. The last of them is sent while the server drains.
    """
    async with running(model, "--otlp-endpoint", collector.endpoint) as run:
        await rest_of(traced(run, 1, 2, 3, max_tokens=20, request_id="mine"))
        await drain(run)
    spans = by_name(collector.of(TRACE_ID))
    assert set(spans) == {"emberline.v1.InferenceService/Generate", "queue", "prefill", "decode"}
    server = spans.pop("emberline.v1.InferenceService/Generate")
    assert (server.kind, server.parent_id) == (trace_pb2.Span.SPAN_KIND_SERVER, PARENT_ID)
    assert {span.parent_id for span in spans.values()} == {server.span_id}
    assert server.start_ns == spans["queue"].start_ns
    assert spans["queue"].end_ns == spans["prefill"].start_ns
    assert spans["prefill"].end_ns == spans["decode"].start_ns
    assert spans["decode"].end_ns == server.end_ns
    assert server.start_ns < server.end_ns
    expected = {
        "rpc.system": "grpc",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ["max_tokens"],
        "emberline.request_id": "mine",
    }
    assert expected.items() <= server.attributes.items()
    assert server.resource["service.name"] == "emberline"
    assert server.status == trace_pb2.Status.STATUS_CODE_UNSET
    (line,) = log.of("request finished")
    assert line["trace_id"] == TRACE_ID


async def test_the_environment_refines_and_does_not_switch_on(
    model: Path, log: CapturedLogs, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT alone exports nothing; with the flag, OTEL_SERVICE_NAME names the service, and the
    sampler is the environment's: what the caller has not sampled is not sent.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with running(model) as run:
        await rest_of(traced(run, 1, max_tokens=3))
        await drain(run)
    assert collector.spans == []
    async with running(model, "--otlp-endpoint", collector.endpoint) as run:
        await rest_of(traced(run, 1, max_tokens=3))
        unsampled = (("traceparent", f"00-{'a' * 32}-{PARENT_ID}-00"),)
        await rest_of(run.inference.Generate(request(1, max_tokens=3), metadata=unsampled))
        await drain(run)
    assert len(collector.spans) == 4
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}


async def test_the_sdk_can_be_switched_off(
    model: Path, log: CapturedLogs, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_SDK_DISABLED wins over the flag: nothing is sent, and no line tells a trace of zeros."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with running(model, "--otlp-endpoint", collector.endpoint) as run:
        await rest_of(traced(run, 1, max_tokens=3))
        await rest_of(run.generate(1, max_tokens=3))
        await drain(run)
    assert collector.spans == []
    inside, outside = log.of("request finished")
    assert inside["trace_id"] == TRACE_ID
    assert "trace_id" not in outside


async def test_a_death_is_an_event_of_the_trace(model: Path, log: CapturedLogs, collector: Collector) -> None:
    """With the id that the log has of it, and the replay after it."""
    flags = ("--otlp-endpoint", collector.endpoint, "--on-engine-death", "replay", "--max-engine-restarts", "5")
    async with running(model, *flags) as run:
        stream = traced(run, 1, 2, max_tokens=600)
        await stream.read()
        os.kill(run.server._supervisor.replicas[0].pid, signal.SIGKILL)
        await rest_of(stream)
        await drain(run)
    server = by_name(collector.of(TRACE_ID))["emberline.v1.InferenceService/Generate"]
    (death,) = log.of("fatal error")
    assert server.events == [
        ("engine died", {"emberline.death_id": death["death_id"]}),
        ("stream goes on", {"emberline.engine": 0, "emberline.attempt": 2}),
    ]


async def test_a_refusal_is_traced_without_its_text(model: Path, log: CapturedLogs, collector: Collector) -> None:
    """A caller's fault is no error of the server's span; nothing of what it sent is in any attribute."""
    async with running(model, "--otlp-endpoint", collector.endpoint) as run:
        await error_of(traced(run, text=CANARY, model=CANARY))
        await drain(run)
    spans = by_name(collector.of(TRACE_ID))
    assert set(spans) == {"emberline.v1.InferenceService/Generate", "queue"}
    server = spans["emberline.v1.InferenceService/Generate"]
    assert (server.attributes["rpc.grpc.status_code"], server.attributes["error.type"]) == (5, "UNKNOWN_MODEL")
    assert server.status == trace_pb2.Status.STATUS_CODE_UNSET
    assert CANARY not in repr(collector.spans)


async def test_a_collector_that_is_away_costs_nobody(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens: calls are served as ever, one line tells it however many exports fail, and the drain is over in
    its time, with exit code 0.
    """
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with running(model, "--otlp-endpoint", f"http://127.0.0.1:{port}") as run:
        async with asyncio.timeout(HANG_S):
            while not log.of("traces not exported"):
                await rest_of(run.generate(1, max_tokens=3))
        for _ in range(3):
            await rest_of(run.generate(1, max_tokens=3))
            await asyncio.sleep(0.1)
        await drain(run)
    assert len(log.of("traces not exported")) == 1
    assert not [record for record in log.records if record["event"] == "library message"]


async def test_a_collector_that_hangs_does_not_hold_the_drain(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and never answers; the flush is given up after its time, far below the exporter's own."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(10 * HANG_S))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        async with running(model, "--otlp-endpoint", f"http://127.0.0.1:{deaf.getsockname()[1]}") as run:
            await rest_of(run.generate(1, max_tokens=3))
            began_s = time.monotonic()
            await drain(run)
            assert time.monotonic() - began_s < HANG_S


async def test_a_trace_that_raises_costs_no_call(
    model: Path, log: CapturedLogs, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the begin nor at the end of a call; each is logged once."""
    async with running(model, "--otlp-endpoint", collector.endpoint) as run:

        def fail(*_: object) -> Any:
            raise RuntimeError(CANARY)

        monkeypatch.setattr(telemetry._SpannedCall, "end", fail)
        for _ in range(2):
            await rest_of(run.generate(1, max_tokens=3))
        monkeypatch.setattr(telemetry.OtlpTracing, "begin", fail)
        for _ in range(2):
            await rest_of(run.generate(1, max_tokens=3))
    assert [record["part"] for record in log.of("account not kept")] == ["trace", "begin"]
    assert [line["status"] for line in log.of("request finished")] == ["OK"] * 4
    assert CANARY not in log.text


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says what to install; without the flag nothing is missing."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'emberline-server\[otel\]'"):
        make_tracing("http://127.0.0.1:1", "1.0", "tiny")
    assert isinstance(make_tracing(None, "1.0", "tiny"), NoTracing)
