"""This server's load, told with the end of each call: ORCA's report in trailing metadata.

What lives here: the report's numbers and its encoding. What must not: gRPC's calls (`account.py` sets the metadata),
counting (`totals.py`, the parts). A balancer that speaks ORCA (gRPC's weighted_round_robin, Envoy's client-side
weighted round robin) reads `endpoint-load-metrics-bin` from every answer, and weighs servers by
`rps_fractional / (application_utilization + penalty × eps / rps_fractional)`.

| field | here |
|---|---|
| `application_utilization` | requests that run or wait over the sequences that engines run at once; above 1: a queue |
| `rps_fractional`, `eps` | calls that ended per second, and those that ended for this server's fault or lack of room |
| `utilization["kv_cache"]` | KV blocks in use over all blocks |
| `named_metrics` | `running`, `waiting`, `waiting_tokens`, `live_calls`, `engines_serving` |

gRPC's own client libraries hand the report to their balancer and strike it from what an application sees.

`cpu_utilization` and `mem_utilization` are left out: where a GPU does the work they say nothing, and a balancer takes
the utilization above wherever it is there.

The message is `xds.data.orca.v3.OrcaLoadReport`. The one package that has its stubs (xds-protos) brings hundreds of
others, among them a copy of OpenTelemetry's, so the nine fields are described here, in a pool of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from scheduler.messages import EngineStats
from service.admission import Admission
from service.config import ServerConfig
from service.dispatch import Dispatcher
from service.supervisor import Supervisor
from service.totals import Totals

METADATA_KEY = "endpoint-load-metrics-bin"
RATE_WINDOW_S = 10.0
_SAMPLE_INTERVAL_S = 1.0

_DOUBLE = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
_FIELDS = {
    "cpu_utilization": 1, "mem_utilization": 2, "rps_fractional": 6, "eps": 7, "application_utilization": 9,
}  # fmt: skip
"""Doubles; 3 is deprecated."""
_MAPS = {"request_cost": 4, "utilization": 5, "named_metrics": 8}
"""From strings to doubles."""


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="xds/data/orca/v3/orca_load_report.proto", package="xds.data.orca.v3", syntax="proto3"
    )
    report = file.message_type.add(name="OrcaLoadReport")
    label = descriptor_pb2.FieldDescriptorProto
    for name, number in _FIELDS.items():
        report.field.add(name=name, number=number, type=_DOUBLE, label=label.LABEL_OPTIONAL)
    for name, number in _MAPS.items():
        entry_name = "".join(part.title() for part in name.split("_")) + "Entry"
        entry = report.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=label.TYPE_STRING, label=label.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=_DOUBLE, label=label.LABEL_OPTIONAL)
        report.field.add(
            name=name,
            number=number,
            type=label.TYPE_MESSAGE,
            label=label.LABEL_REPEATED,
            type_name=f".xds.data.orca.v3.OrcaLoadReport.{entry_name}",
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))


OrcaLoadReport = _message_class()


class Rates:
    """Calls per second over the last while: differences of two running totals, sampled once a second at most."""

    def __init__(self, clock: Callable[[], float], totals: Totals) -> None:
        self._clock = clock
        self._totals = totals
        self._samples: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)])

    def per_s(self) -> tuple[float, float]:
        """Of all that ended, and of those that failed."""
        now_s, totals = self._clock(), self._totals
        samples = self._samples
        if now_s - samples[-1][0] >= _SAMPLE_INTERVAL_S:
            samples.append((now_s, totals.num_finished_calls, totals.num_failed_calls))
        while len(samples) > 2 and samples[1][0] <= now_s - RATE_WINDOW_S:
            samples.popleft()
        since_s, num_finished, num_failed = samples[0]
        elapsed_s = max(now_s - since_s, _SAMPLE_INTERVAL_S)
        return (totals.num_finished_calls - num_finished) / elapsed_s, (
            totals.num_failed_calls - num_failed
        ) / elapsed_s


class LoadReporter:
    """Makes a report whenever a call ends."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        totals: Totals,
        supervisor: Supervisor,
        admission: Admission,
        dispatcher: Dispatcher,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._totals = totals
        self._supervisor = supervisor
        self._admission = admission
        self._dispatcher = dispatcher
        self._rates = Rates(clock, totals)

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """As trailing metadata."""
        return ((METADATA_KEY, self.report().SerializeToString()),)

    def report(self) -> Any:
        """An `OrcaLoadReport`, of this moment."""
        serving = [replica for replica in self._supervisor.replicas if replica.is_serving]
        stats = [replica.stats for replica in serving]
        num_running = sum(one.num_running for one in stats)
        num_waiting = self._num_waiting(stats)
        num_blocks = sum(one.num_kv_blocks for one in stats)
        # The call that this is told with was there until now: an idle server is as good as one that just served one.
        num_busy = max(num_running + num_waiting, 1)
        rps, eps = self._rates.per_s()
        report = OrcaLoadReport(
            rps_fractional=rps, eps=eps, application_utilization=num_busy / max(len(serving) * self._max_num_seqs, 1)
        )
        if num_blocks:
            report.utilization["kv_cache"] = sum(one.num_used_kv_blocks for one in stats) / num_blocks
        named = report.named_metrics
        named["running"] = num_running
        named["waiting"] = num_waiting
        named["waiting_tokens"] = sum(one.num_waiting_tokens for one in stats)
        named["live_calls"] = self._totals.num_live_calls
        named["engines_serving"] = len(serving)
        return report

    def _num_waiting(self, stats: list[EngineStats]) -> int:
        """In engines, for one, and on their way there."""
        num_before_engine = self._admission.num_preparing + self._dispatcher.num_waiting
        return sum(one.num_waiting for one in stats) + num_before_engine
