"""Where the loop notes what happened: one façade, and nothing that it does reaches whoever calls it.

What lives here: the events, and which instruments they move. What must not: reading (`collector.py`), and anything that
an outcome depends on. Every method is guarded: if it raises, that is logged once per method and counted, and the call,
the step or the death goes on as if nothing had been noted. All methods belong to the loop's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from scheduler import logs
from scheduler.messages import EngineStats, StepOutputs
from service.call_record import CallRecord
from service.metrics.instruments import Counter, Histogram

_Rest = ParamSpec("_Rest")

DEATH_CAUSES = ("hang", "out_of_memory", "exception", "signal", "exit", "connection")
"""Of an engine's death; see `service.death.cause_kind`."""
REJECTED = "QUEUE_FULL"
"""The reason of calls for which the queue had no room."""
CALLS_KNOWN = (
    ("OK", "", "eos"),
    ("OK", "", "max_tokens"),
    ("OK", "", "stop_string"),
    ("RESOURCE_EXHAUSTED", REJECTED, ""),
    ("UNAVAILABLE", "ENGINE_DEAD", ""),
    ("INTERNAL", "POISON_REQUEST", ""),
    ("INTERNAL", "NON_FINITE", ""),
    ("INTERNAL", "INTERNAL", ""),
)
"""Endings that somebody may wait for: their first one must be an increase."""

# Steps of a small model on two cores take 20–200 ms, those of a GPU 5–30; a queue can be minutes long.
TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
CALL_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
SEQS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(slots=True)
class EngineMetrics:
    """What is noted of one place of an engine, whichever engines filled it."""

    step_s: Histogram
    step_seqs: Histogram
    step_tokens: Histogram
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0


def _guarded(
    note: Callable[Concatenate[Metrics, _Rest], None],
) -> Callable[Concatenate[Metrics, _Rest], None]:
    @functools.wraps(note)
    def guarded(self: Metrics, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
        try:
            note(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the guard
            self.failed(note.__name__, error)

    return guarded


class Metrics:
    """The instruments of one server."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.between_tokens_s = Histogram(TOKEN_BOUNDS_S)
        self.call_s = Histogram(CALL_BOUNDS_S)
        self.queue_s = Histogram(TTFT_BOUNDS_S)
        self.prefill_s = Histogram(TTFT_BOUNDS_S)
        self.decode_s = Histogram(CALL_BOUNDS_S)
        self.call_prompt_tokens = Histogram(TOKENS_BOUNDS)
        self.call_output_tokens = Histogram(TOKENS_BOUNDS)
        self.calls = Counter(3, known=CALLS_KNOWN)
        self.rejections = Counter()
        self.deaths = Counter(1, known=[(cause,) for cause in DEATH_CAUSES])
        self.failures: dict[str, int] = {}
        self.engines: dict[str, EngineMetrics] = {}

    @_guarded
    def step(self, engine: str, before: EngineStats, step: StepOutputs) -> None:
        """An engine has sent a step; `before`: the totals of the same engine as it last sent them."""
        noted = self.engines.get(engine)
        if noted is None:
            noted = self.engines[engine] = EngineMetrics(
                Histogram(STEP_BOUNDS_S), Histogram(SEQS_BOUNDS), Histogram(TOKENS_BOUNDS)
            )
        stats = step.stats
        noted.num_query_tokens += stats.num_prompt_tokens_total - before.num_prompt_tokens_total
        noted.num_hit_tokens += stats.num_cached_tokens_total - before.num_cached_tokens_total
        noted.num_preemptions += stats.num_preemptions_total - before.num_preemptions_total
        for output in step.outputs:
            noted.num_output_tokens += len(output.new_token_ids)
        if step.num_seqs:  # else nothing was computed: only the stats have changed, or requests have failed
            noted.step_s.observe(step.step_s)
            noted.step_seqs.observe(step.num_seqs)
            noted.step_tokens.observe(step.num_batched_tokens)

    @_guarded
    def first_token(self, ttft_s: float) -> None:
        """A call has its first output, so long after it began."""
        self.ttft_s.observe(ttft_s)

    @_guarded
    def between_tokens(self, interval_s: float) -> None:
        """A step has brought a stream tokens, so long after the step that brought it the ones before."""
        self.between_tokens_s.observe(interval_s)

    @_guarded
    def call_refused(self, code: str, reason: str) -> None:
        """A call got no further than the door."""
        self.calls.add((code, reason, ""))
        if reason == REJECTED:
            self.rejections.add()

    @_guarded
    def call_finished(self, call: CallRecord) -> None:
        """A call of Generate or Complete is over. Times and sizes are noted of those that ended well: refusals would
        make them look good.
        """
        self.calls.add((call.code, call.reason, call.finish))
        if call.reason == REJECTED:
            self.rejections.add()
        if call.code != "OK":
            return
        self.call_s.observe(call.total_s)
        for histogram, value in (
            (self.queue_s, call.queue_s),
            (self.prefill_s, call.prefill_s),
            (self.decode_s, call.decode_s),
        ):
            if value is not None:
                histogram.observe(value)
        self.call_prompt_tokens.observe(call.num_prompt_tokens)
        self.call_output_tokens.observe(call.num_output_tokens)

    @_guarded
    def engine_died(self, cause: str) -> None:
        """An engine in a replica's place is dead and its cause known; one of DEATH_CAUSES."""
        self.deaths.add((cause,))

    def failed(self, metric: str, error: Exception) -> None:
        """Something of the metrics raised. Logged once for each; counted each time. Uses none of the instruments."""
        num_before = self.failures.get(metric, 0)
        self.failures[metric] = num_before + 1
        if not num_before:
            logs.get_logger().error("metric failed", metric=metric, **logs.describe(error))
