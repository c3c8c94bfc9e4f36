"""What a scrape is told: names, help, labels, and where each number comes from.

What lives here: the families. What must not: counting, HTTP. Runs in the exporter's thread and takes no lock: it reads
numbers, tuples and frozen records that the loop replaces whole. What changes between two of its reads makes a scrape a
moment older in one place than in another, no more. Where one raises, the rest of its group is left out; that is logged
once and counted.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.utils import floatToGoString

from scheduler.messages import EngineStats
from service.admission import Admission
from service.config import ServerConfig
from service.dispatch import Dispatcher
from service.info import VERSION
from service.metrics.instruments import Histogram
from service.metrics.recorder import EngineMetrics, Metrics
from service.replica import EngineState, Replica
from service.supervisor import Supervisor
from service.totals import Totals

PREFIX = "emberline_"
Samples = Iterable[tuple[Sequence[str], float]]


class Collector(PrometheusCollector):
    """All families of one server."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        totals: Totals,
        supervisor: Supervisor,
        admission: Admission,
        dispatcher: Dispatcher,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._totals = totals
        self._supervisor = supervisor
        self._admission = admission
        self._dispatcher = dispatcher
        # Memory, CPU time and descriptors of the front end, under the names that all Prometheus clients use.
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Every family, each on its own."""
        for family in (
            self._server,
            self._calls,
            self._latencies,
            self._queue,
            self._deaths,
            self._engines,
            self._steps,
            self._process.collect,
            self._failures,  # last: it counts what failed before it
        ):
            try:
                yield from family()
            except Exception as error:  # noqa: BLE001 - the guard: what remains is told all the same
                self._metrics.failed(f"collect {family.__name__.strip('_')}", error)

    def _server(self) -> Iterator[Metric]:
        supervisor, config = self._supervisor, self._config
        yield _gauge("build_info", "1, with the versions in labels", ("version", "python"), [
            ((VERSION, platform.python_version()), 1)
        ])  # fmt: skip
        ready = supervisor.ready
        if ready is not None:
            labels = ("model", "model_type", "dtype", "device", "attention_backend")
            model = config.served_model_name, ready.model_type, ready.dtype, ready.device, ready.attention_backend
            yield _gauge("model_info", "1, with what is served in labels", labels, [(model, 1)])
        yield _gauge("serving", "1 while a request sent now would be served", (), [((), supervisor.is_serving)])
        yield _gauge("standby_ready", "1 while a spare engine has its model loaded", (), [((), supervisor.has_standby)])

    def _calls(self) -> Iterator[Metric]:
        metrics, totals = self._metrics, self._totals
        yield _counter(
            "requests",
            "Calls of Generate and Complete that have ended, by gRPC code, ErrorInfo reason and finish reason",
            ("code", "reason", "finish"),
            metrics.calls.values(),
        )
        yield _gauge("live_requests", "Calls of Generate and Complete that have not ended", (), [
            ((), totals.num_live_calls)
        ])  # fmt: skip
        yield _total("generated_tokens", "Output tokens, over all engines, dead ones included",
                     totals.num_generated_tokens)  # fmt: skip
        yield _histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended OK", metrics.call_prompt_tokens
        )
        yield _histogram(
            "request_output_tokens", "Output tokens of a request that ended OK", metrics.call_output_tokens
        )

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _histogram(
            "time_to_first_token_seconds", "From a call's begin to its first output in this server", metrics.ttft_s
        )
        yield _histogram(
            "inter_token_latency_seconds",
            "Between two steps that brought a stream tokens; replays after a death included",
            metrics.between_tokens_s,
        )
        yield _histogram("request_duration_seconds", "From begin to end of a call that ended OK", metrics.call_s)
        yield _histogram("request_queue_seconds", "Of that, until its first step", metrics.queue_s)
        yield _histogram("request_prefill_seconds", "Of that, from there to its first output", metrics.prefill_s)
        yield _histogram("request_decode_seconds", "Of that, from there to its end", metrics.decode_s)

    def _queue(self) -> Iterator[Metric]:
        admission, config = self._admission, self._config
        yield _gauge("queue_requests", "Requests that wait for their first output", (), [((), admission.num_waiting)])
        yield _gauge("queue_requests_max", "--max-queue-requests", (), [((), config.max_queue_requests)])
        yield _gauge("queue_tokens", "Prompt tokens, and entries of long options, of these", (), [
            ((), admission.num_waiting_tokens)
        ])  # fmt: skip
        yield _gauge("queue_tokens_max", "--max-queue-tokens", (), [((), config.max_queue_tokens)])
        yield _counter("queue_rejections", "Calls told QUEUE_FULL", (), self._metrics.rejections.values())
        yield _gauge("streams_without_engine", "Streams that wait for an engine to serve, or for a trial to end", (), [
            ((), self._dispatcher.num_waiting)
        ])  # fmt: skip

    def _deaths(self) -> Iterator[Metric]:
        totals = self._totals
        yield _counter("engine_deaths", "Engine deaths, by cause", ("cause",), self._metrics.deaths.values())
        yield _total("engine_restarts", "Engines that became ready in the place of a dead one", totals.num_restarts)
        yield _gauge("engine_restarts_max", "--max-engine-restarts: deaths within five minutes after which a place "
                     "stays empty", (), [((), self._config.max_engine_restarts)])  # fmt: skip
        yield _total("stream_replays", "Times a stream went on with another engine after a death", totals.num_replays)
        yield _total("poison_requests_found", "Requests found to have killed an engine", totals.num_poison_found)
        yield _total("poison_requests_refused", "Calls refused since the same request has killed an engine",
                     totals.num_poison_refused)  # fmt: skip

    def _engines(self) -> Iterator[Metric]:
        replicas = [(str(replica.index), replica) for replica in self._supervisor.replicas]
        states = [
            ((index, state.name.lower()), replica.state is state)
            for index, replica in replicas
            for state in EngineState
        ]
        yield _gauge("engine_state", "1 for the state that the engine's place is in", ("engine", "state"), states)
        stats = [(index, replica.ready, _stats(replica)) for index, replica in replicas]

        def gauge(name: str, text: str, value: Callable[[EngineStats], float]) -> Metric:
            return _gauge(name, text, ("engine",), [((index,), value(one)) for index, _, one in stats])

        yield gauge("requests_running", "Requests in the running batch", lambda one: one.num_running)
        yield gauge("requests_waiting", "Requests that wait in the engine, preempted ones included", lambda one:
                    one.num_waiting)  # fmt: skip
        yield gauge("waiting_tokens", "Tokens that these still have to compute", lambda one: one.num_waiting_tokens)
        yield gauge("kv_blocks_used", "KV blocks that sequences hold", lambda one: one.num_used_kv_blocks)
        yield _gauge("kv_blocks", "KV blocks of the pool", ("engine",), [
            ((index,), 0 if ready is None else ready.num_kv_blocks) for index, ready, _ in stats
        ])  # fmt: skip
        yield _gauge("engine_resident_memory_bytes", "Resident memory of the engine's process", ("engine",), [
            ((index,), _resident_bytes(replica)) for index, replica in replicas
        ])  # fmt: skip

    def _steps(self) -> Iterator[Metric]:
        # Every place from the beginning on, or the first increase of each would be lost.
        noted = {str(replica.index): None for replica in self._supervisor.replicas} | dict(self._metrics.engines)
        engines = [(name, one) for name, one in noted.items() if one is not None]

        def counter(name: str, text: str, value: Callable[[EngineMetrics], int]) -> Metric:
            return _counter(name, text, ("engine",), [
                ((engine,), 0 if one is None else value(one)) for engine, one in noted.items()
            ])  # fmt: skip

        yield counter("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", lambda one:
                      one.num_query_tokens)  # fmt: skip
        yield counter("prefix_cache_hit_tokens", "Of these, tokens that were there", lambda one: one.num_hit_tokens)
        yield counter("preemptions", "Sequences whose KV blocks were taken for others", lambda one: one.num_preemptions)
        yield counter(
            "engine_output_tokens", "Output tokens that steps have brought", lambda one: one.num_output_tokens
        )

        def histogram(name: str, text: str, pick: Callable[[EngineMetrics], Histogram]) -> Metric:
            family = HistogramMetricFamily(PREFIX + name, text, labels=("engine",))
            for engine, one in engines:
                _add_histogram(family, (engine,), pick(one))
            return family

        yield histogram("engine_step_duration_seconds", "Duration of a step", lambda one: one.step_s)
        yield histogram("engine_step_sequences", "Sequences in a step", lambda one: one.step_seqs)
        yield histogram("engine_step_tokens", "Tokens that a step computed", lambda one: one.step_tokens)

    def _failures(self) -> Iterator[Metric]:
        num_failures = sum(self._metrics.failures.copy().values())
        yield _total("metric_failures", "Times that keeping or telling a metric has raised; the log tells which",
                     num_failures)  # fmt: skip


def _stats(replica: Replica) -> EngineStats:
    """`Replica.stats` for another thread: its engine may go between two looks."""
    engine = replica.engine
    return engine.client.stats if engine is not None and replica.is_serving else EngineStats()


def _resident_bytes(replica: Replica) -> int:
    engine = replica.engine
    process = None if engine is None else engine.process
    return 0 if process is None else process.last_rss_bytes or 0


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _total(name: str, text: str, number: int) -> Metric:
    return _counter(name, text, (), [((), number)])


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=())
    _add_histogram(family, (), histogram)
    return family


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, histogram.buckets(), strict=True)), histogram.total)
