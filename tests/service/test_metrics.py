"""What is counted, what a scrape is told, and that neither can hurt who is counted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from scheduler.errors import StartupError
from scheduler.flight_record import FlightRecord
from scheduler.messages import EngineFailed, EngineStats, Phase, SequenceOutput, StepOutputs
from service.call_record import CallRecord, Timeline
from service.death import Death, cause_kind
from service.dispatch import Dispatcher
from service.engine_client import EngineClient
from service.exit import ExitCode
from service.journal import Journal, JournalEntry
from service.metrics import exporter
from service.metrics.exporter import CONNECTIONS_MAX, MetricsExporter
from service.metrics.instruments import LABEL_SETS_MAX, Counter, Histogram
from service.metrics.recorder import DEATH_CAUSES, Metrics
from service.replica import Replica
from service.stream import RequestStream
from tests.service.fake_engine import Trigger
from tests.service.front_end import CANARY, error_of, rest_of, running
from tests.service.support import HANG_S, CapturedLogs, submit, until

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def ask(address: str, text: str) -> tuple[str, Mapping[str, str], str]:
    """Status line, header fields and body of the answer to a raw request."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(text.encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


async def scrape(address: str) -> Scrape:
    """Samples by name and labels."""
    status, _, body = await ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def value(samples: Scrape, name: str, **labels: str) -> float:
    return samples["emberline_" + name, tuple(sorted(labels.items()))]


def address_of(run: object) -> str:
    address = run.server._observation.metrics_address  # type: ignore[attr-defined]
    assert isinstance(address, str)
    return address


# --------------------------------------------------------------------------------------------------------- instruments


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    """Counts are cumulative and bounds inclusive, as `le` says; what is larger than all is in +Inf alone."""
    histogram = Histogram((1, 2, 4))
    for observed in (0.5, 1, 1.5, 2, 4, 5):
        histogram.observe(observed)
    assert histogram.buckets() == [2, 4, 5, 6]
    assert histogram.total == 14


def test_no_observation_spoils_the_sum() -> None:
    """NaN is refused: a sum that is NaN stays so for ever."""
    histogram = Histogram((1,))
    with pytest.raises(ValueError, match="not a number"):
        histogram.observe(math.nan)
    assert (histogram.buckets(), histogram.total) == ([0, 0], 0)


def test_a_counter_has_no_more_series_than_its_bound() -> None:
    """Beyond it counts go on, without their labels."""
    counter = Counter(1)
    for number in range(LABEL_SETS_MAX + 5):
        counter.add((str(number),))
    series = dict(counter.values())
    assert len(series) == LABEL_SETS_MAX + 1
    assert series["other",] == 5


def test_series_that_are_known_begin_at_zero() -> None:
    """Else the first death would be no increase: a series that appears with 1 has never grown."""
    assert dict(Metrics().deaths.values()) == {(cause,): 0 for cause in DEATH_CAUSES}
    assert dict(Counter().values()) == {(): 0}


# ------------------------------------------------------------------------------------------------------------ recorder


def step(num_seqs: int = 2, **stats: int) -> StepOutputs:
    outputs = tuple(SequenceOutput(n, 0, (7,)) for n in range(num_seqs))
    return StepOutputs(1, outputs, (), EngineStats(**stats), 0.02, num_seqs, 10 * num_seqs)


def test_a_places_totals_outlive_its_engines() -> None:
    """An engine counts from zero again after its predecessor's death; the place's counters only grow."""
    metrics = Metrics()
    first = step(num_prompt_tokens_total=100, num_cached_tokens_total=40, num_preemptions_total=2)
    metrics.step("0", EngineStats(), first)
    metrics.step("0", first.stats, step(num_prompt_tokens_total=150, num_cached_tokens_total=60))
    metrics.step("0", EngineStats(), step(num_prompt_tokens_total=30, num_cached_tokens_total=1))
    place = metrics.engines["0"]
    assert (place.num_query_tokens, place.num_hit_tokens, place.num_output_tokens) == (180, 61, 6)
    assert place.step_seqs.buckets()[1] == 3


def call(code: str = "OK", reason: str = "", finish: str = "eos") -> CallRecord:
    timeline = Timeline(sent_s=11.0, first_output_s=12.0, last_output_s=14.0, attempts=[(11.0, 0)])
    return CallRecord("Generate", "label", code, reason, finish, 10.0, 15.0, timeline)


def test_refusals_do_not_make_latencies_look_good() -> None:
    """They are counted by code and reason; times are of calls that ended OK."""
    metrics = Metrics()
    metrics.call_finished(call())
    metrics.call_finished(call("RESOURCE_EXHAUSTED", "QUEUE_FULL", ""))
    assert dict(metrics.calls.values())["RESOURCE_EXHAUSTED", "QUEUE_FULL", ""] == 1
    assert metrics.rejections.values() == [((), 1)]
    assert metrics.call_s.buckets()[-1] == 1
    assert (metrics.queue_s.total, metrics.prefill_s.total, metrics.decode_s.total) == (1, 1, 3)


def test_a_metric_that_raises_reaches_nobody(log: CapturedLogs) -> None:
    """It is logged once however often it happens, counted each time, and told in the next scrape."""
    metrics = Metrics()
    for _ in range(3):
        metrics.first_token(math.nan)
    metrics.between_tokens(math.nan)
    assert metrics.failures == {"first_token": 3, "between_tokens": 1}
    assert [record["metric"] for record in log.of("metric failed")] == ["first_token", "between_tokens"]


def test_what_the_loop_notes_costs_it_little() -> None:
    """A step with 64 outputs, each an interval: below the 5 µs per output that it may cost, by an order of magnitude of
    room for a busy machine. (The figure is printed; on two quiet cores it is under 1 µs.)
    """
    metrics, message, before = Metrics(), step(64), EngineStats()
    best_s = math.inf
    for _ in range(20):
        began_s = time.perf_counter()
        metrics.step("0", before, message)
        for _ in range(64):
            metrics.between_tokens(0.03)
        best_s = min(best_s, time.perf_counter() - began_s)
    print(f"{best_s / 64 * 1e6:.2f} µs per output")
    assert best_s / 64 < 50e-6


@dataclass
class DeadProcess:
    returncode: int | None = -9
    was_killed_by_us: bool = False
    num_oom_kills: int | None = 0

    def oom_kills(self) -> int | None:
        return self.num_oom_kills


def death(*, is_hang: bool = False, exception_type: str = "") -> Death:
    report = EngineFailed(exception_type, "", "", Phase.EXECUTE, 1, "", False) if exception_type else None
    return Death("id", "cause", False, is_hang, 0.0, FlightRecord(Phase.EXECUTE, 1, 1, 1, ()), report)


@pytest.mark.parametrize(
    ("died", "process", "cause"),
    [
        (death(is_hang=True), DeadProcess(was_killed_by_us=True), "hang"),
        (death(exception_type="torch.OutOfMemoryError"), DeadProcess(1), "out_of_memory"),
        (death(exception_type="builtins.MemoryError"), DeadProcess(1), "out_of_memory"),
        (death(exception_type="builtins.RuntimeError"), DeadProcess(1), "exception"),
        (death(), DeadProcess(num_oom_kills=1), "out_of_memory"),
        (death(), DeadProcess(num_oom_kills=None), "signal"),
        (death(), DeadProcess(0), "exit"),
        (death(), DeadProcess(was_killed_by_us=True), "connection"),
        (death(), DeadProcess(None), "connection"),
    ],
)
def test_a_death_is_of_one_kind(died: Death, process: DeadProcess, cause: str) -> None:
    """Its own word counts first, then the kernel's, then how the process ended; each kind has a series from the
    beginning on."""
    assert cause_kind(died, process) == cause  # type: ignore[arg-type] # all that is asked of a process
    assert cause in DEATH_CAUSES


# ------------------------------------------------------------------------------------------ what engines tell of calls


class Nobody:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_the_time_between_tokens_is_between_steps() -> None:
    """Two sequences of one call get their tokens in one step: that is no interval of zero, but none at all."""
    metrics, client = Metrics(), EngineClient(Nobody())
    dispatcher = Dispatcher(Journal(), Nobody(), Nobody(), Nobody(), metrics=metrics)
    stream = RequestStream(JournalEntry(submit(1, 5)), Nobody())
    replica = Replica(0, engine=SimpleNamespace(client=client))  # type: ignore[arg-type] # all that is asked of it
    for now_s in (1.0, 1.5, 3.5):
        client.step_taken_s = now_s
        dispatcher._note_output(replica, stream, 1)
        dispatcher._note_output(replica, stream, 1)
    assert (metrics.between_tokens_s.buckets()[-1], metrics.between_tokens_s.total) == (2, 2.5)
    assert (stream.timeline.first_output_s, stream.timeline.last_output_s) == (1.0, 3.5)
    assert dispatcher._totals.num_generated_tokens == 6


async def test_a_calls_wait_in_its_engine_is_that_of_its_first_attempt() -> None:
    """What a later engine tells is not when the call's first step was: it has had output since."""
    stream = RequestStream(JournalEntry(submit(1, 5)), Nobody())
    client = EngineClient(Nobody())
    client.send(stream, submit(1, 5))
    for queue_s, token_id in ((0.5, 7), (None, 8), (3.0, 9)):
        outputs = (SequenceOutput(1, 0, (token_id,), queue_s=queue_s),)
        client._take_step(StepOutputs(1, outputs, (), EngineStats()))
        stream.timeline.first_output_s = 1.0  # as the dispatcher notes it
    assert stream.timeline.engine_queue_s == 0.5


# ------------------------------------------------------------------------------------------------------- a real scrape


async def test_a_scrape_tells_what_has_happened(model: Path, log: CapturedLogs) -> None:
    """Calls by outcome, tokens, latencies, steps and the engine's state, as a Prometheus parser reads them; and nothing
    of what callers sent.
    """
    async with running(model, "--metrics-port", "0") as run:
        address = address_of(run)
        for n in range(3):
            await rest_of(run.generate(1, 2, n, max_tokens=20, request_id=f"{CANARY}-{n}"))
        bad = await error_of(run.generate(text=CANARY, model=CANARY))
        assert bad.code() is grpc.StatusCode.NOT_FOUND
        samples = await scrape(address)
        assert value(samples, "requests_total", code="OK", reason="", finish="max_tokens") == 3
        assert value(samples, "requests_total", code="NOT_FOUND", reason="UNKNOWN_MODEL", finish="") == 1
        assert value(samples, "generated_tokens_total") == 60
        assert value(samples, "engine_output_tokens_total", engine="0") == 60
        assert value(samples, "time_to_first_token_seconds_count") == 3
        assert value(samples, "request_duration_seconds_count") == 3
        assert value(samples, "inter_token_latency_seconds_count") == 57
        assert value(samples, "request_output_tokens_sum") == 60
        assert value(samples, "serving") == 1
        assert value(samples, "engine_state", engine="0", state="ready") == 1
        assert value(samples, "kv_blocks", engine="0") == 64
        assert value(samples, "queue_requests_max") == 1024
        assert value(samples, "live_requests") == 0
        assert samples["process_resident_memory_bytes", ()] > 0
        _, _, body = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert CANARY not in body


async def test_names_follow_the_conventions(model: Path, log: CapturedLogs) -> None:
    """OpenMetrics, stricter than Prometheus's own text, reads it, too: counters end in _total, every family has help,
    and base units alone are in the names.
    """
    async with running(model, "--metrics-port", "0") as run:
        await rest_of(run.generate(1, 2, max_tokens=5))
        request = "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text; version=1.0.0\r\n\r\n"
        _, fields, body = await ask(address_of(run), request)
        assert fields["Content-Type"].startswith("application/openmetrics-text")
        families = list(openmetrics_families(body))
        assert len(families) > 30
        for family in families:
            assert family.documentation
            assert family.name.startswith(("emberline_", "process_"))
            assert not family.name.endswith(("_ms", "_millis", "_mb", "_count", "_total"))


@pytest.mark.parametrize(
    "accept",
    [
        # Prometheus 3 and 2, a browser, nothing in particular, and nonsense
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        "text/html,application/xhtml+xml,*/*;q=0.8",
        "*/*",
        "application/openmetrics-text;version=new",
    ],
)
async def test_whoever_asks_gets_a_form_that_it_can_read(model: Path, log: CapturedLogs, accept: str) -> None:
    """Each form is read by the parser that its content type names."""
    async with running(model, "--metrics-port", "0") as run:
        _, fields, body = await ask(address_of(run), f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n")
        is_open = fields["Content-Type"].startswith("application/openmetrics-text")
        assert is_open or fields["Content-Type"].startswith("text/plain")
        families = list((openmetrics_families if is_open else text_string_to_metric_families)(body))
        assert any(family.name == "emberline_serving" for family in families)


async def test_deaths_restarts_and_replays_are_counted(model: Path, log: CapturedLogs) -> None:
    """A death is counted by its cause, its successor as a restart, each stream that went on as a replay; counters of
    the place outlive the engine.
    """
    flags = ("--metrics-port", "0", "--on-engine-death", "replay", "--max-engine-restarts", "5")
    async with running(model, *flags) as run:
        calls = [run.generate(1, n, max_tokens=600) for n in range(4)]
        for one in calls:
            await one.read()
        os.kill(run.server._supervisor.replicas[0].pid, signal.SIGKILL)
        for one in calls:
            await rest_of(one)
        samples = await scrape(address_of(run))
        assert value(samples, "engine_deaths_total", cause="signal") == 1
        assert value(samples, "engine_restarts_total") == 1
        assert value(samples, "stream_replays_total") == 4
        assert value(samples, "generated_tokens_total") == 2400
        assert value(samples, "engine_output_tokens_total", engine="0") >= 2400


@pytest.mark.parametrize(
    ("trigger", "cause"),
    [(Trigger.RAISE, "exception"), (Trigger.EXIT_ZERO, "exit"), (Trigger.GARBAGE, "connection")],
)
async def test_a_death_has_one_cause(model: Path, log: CapturedLogs, trigger: Trigger, cause: str) -> None:
    """Its own exception, an exit, or bytes that are no message: each is counted as what it is, and as nothing else."""
    async with running(model, "--metrics-port", "0", "--max-engine-restarts", "5") as run:
        await error_of(run.generate(trigger, 1))
        await until(lambda: log.of("fatal error"))
        samples = await scrape(address_of(run))
        counted = {other: value(samples, "engine_deaths_total", cause=other) for other in DEATH_CAUSES}
        assert counted == dict.fromkeys(DEATH_CAUSES, 0) | {cause: 1}


async def test_broken_instruments_cost_no_call(model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every counter and histogram raising, calls are answered as ever, and a scrape still tells the gauges."""

    def fail(*_: object) -> None:
        raise RuntimeError(CANARY)

    async with running(model, "--metrics-port", "0") as run:
        monkeypatch.setattr(Histogram, "observe", fail)
        monkeypatch.setattr(Counter, "add", fail)
        monkeypatch.setattr(Histogram, "buckets", fail)
        deltas = await rest_of(run.generate(1, 2, max_tokens=30))
        assert deltas[-1].usage.completion == 30
        samples = await scrape(address_of(run))
        assert value(samples, "serving") == 1
        assert value(samples, "generated_tokens_total") == 30
    assert log.of("metric failed")
    assert CANARY not in log.text


# ------------------------------------------------------------------------------------------------------------ the port


async def test_only_what_there_is_is_answered(model: Path, log: CapturedLogs) -> None:
    """The root tells the way; another path is 404, another method 405; HEAD has no body; garbage costs its connection
    alone."""
    async with running(model, "--metrics-port", "0") as run:
        address = address_of(run)
        assert address.startswith("127.0.0.1:")
        status, _, body = await ask(address, "GET / HTTP/1.1\r\n\r\n")
        assert "200" in status
        assert "/metrics" in body
        assert "404" in (await ask(address, "GET /secret HTTP/1.1\r\n\r\n"))[0]
        assert "405" in (await ask(address, "POST /metrics HTTP/1.1\r\n\r\n"))[0]
        status, fields, body = await ask(address, "HEAD /metrics HTTP/1.1\r\n\r\n")
        assert ("200" in status, body) == (True, "")
        assert int(fields["Content-Length"]) > 1000
        for garbage in ("\r\n\r\n", "x" * (exporter.HEADER_BYTES_MAX + 1) + "\r\n\r\n", "GET\r\n\r\n"):
            await ask(address, garbage)
        await scrape(address)
    assert not [record for record in log.of("internal error") if record["level"] == "error"]


async def test_scrapers_that_hang_harm_nobody(model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """While those that say nothing use up the connections, others are told 503 and calls are served; once they are gone
    a scrape is answered again.
    """
    monkeypatch.setattr(exporter, "CONNECTION_TIMEOUT_S", 10.0 * HANG_S)
    async with running(model, "--metrics-port", "0") as run:
        host, _, port = address_of(run).rpartition(":")
        hanging = [await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS_MAX)]
        server = run.server._observation._exporter
        assert server is not None
        await until(lambda: server._num_connections == CONNECTIONS_MAX)
        assert "503" in (await ask(address_of(run), "GET /metrics HTTP/1.1\r\n\r\n"))[0]
        assert (await rest_of(run.generate(1, 2, max_tokens=5)))[-1].usage.completion == 5
        for _, writer in hanging:
            writer.close()
        await until(lambda: server._num_connections == 0)
        await scrape(address_of(run))


async def test_a_scraper_that_hangs_is_sent_away(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its time, whether it says nothing or one byte now and then."""
    monkeypatch.setattr(exporter, "CONNECTION_TIMEOUT_S", 0.3)
    async with running(model, "--metrics-port", "0") as run:
        host, _, port = address_of(run).rpartition(":")
        silent, idle = await asyncio.open_connection(host, int(port))
        _, slow = await asyncio.open_connection(host, int(port))

        async def trickle() -> None:
            while True:
                slow.write(b"G")
                await slow.drain()
                await asyncio.sleep(0.05)

        async with asyncio.timeout(HANG_S):
            with contextlib.suppress(ConnectionResetError):
                assert await silent.read() == b""
            with pytest.raises(ConnectionError):
                await trickle()
        for writer in (idle, slow):
            writer.close()


async def test_a_scrape_is_answered_while_the_loop_hangs(model: Path, log: CapturedLogs) -> None:
    """The thread needs nothing of the loop; what it tells is what there was."""
    async with running(model, "--metrics-port", "0") as run:
        host, _, port = address_of(run).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:  # this is the hang
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b""
            while data := connection.recv(2**16):
                answer += data
        assert b"emberline_serving 1.0" in answer


async def test_a_port_in_use_fails_the_start(model: Path, log: CapturedLogs) -> None:
    """Exit code 3, before anything is loaded, and the reason names the flag."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with running(model, "--metrics-port", str(taken.getsockname()[1]), wait=False) as run:
            assert await run.exit_code() is ExitCode.COULD_NOT_START
    (record,) = log.of("could not start")
    assert "--metrics-port" in record["reason"]
    assert "address already in use" in record["reason"]
    assert not log.of("engine starting")


def test_the_address_is_bound_at_once() -> None:
    """Two exporters never share a port; an IPv6 address is written as a URL has it."""
    first = MetricsExporter("::1", 0, Metrics())  # type: ignore[arg-type] # never collected
    first.start()
    try:
        assert first.address is not None
        assert first.address.startswith("[::1]:")
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(StartupError, match="address already in use"):
            MetricsExporter("::1", port, Metrics()).start()  # type: ignore[arg-type]
    finally:
        first.close()


async def test_beyond_every_bound_connections_are_closed(model: Path, log: CapturedLogs) -> None:
    """A flood of them takes no more than its bound; the server closes the rest at once, and ends in its time."""
    async with running(model, "--metrics-port", "0") as run:
        host, _, port = address_of(run).rpartition(":")
        limit = CONNECTIONS_MAX + exporter.REFUSALS_MAX
        hanging = [await asyncio.open_connection(host, int(port)) for _ in range(limit)]
        server = run.server._observation._exporter
        assert server is not None
        await until(lambda: server._num_connections == limit)
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(exporter.CONNECTION_TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, one in [*hanging, (reader, writer)]:
            one.close()
    assert not log.of("library message")
