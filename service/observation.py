"""What watches one server: its totals, metrics, traces and load reports, and the door that scrapers use.

What lives here: their building and their end, so that `server.py` has one line for each. What must not: what they do.
None of them is needed to serve: each is guarded where it is called.
"""

from __future__ import annotations

import time

from service.account import Accounts
from service.admission import Admission
from service.config import ServerConfig
from service.dispatch import Dispatcher
from service.info import VERSION
from service.load_report import LoadReporter
from service.metrics.collector import Collector
from service.metrics.exporter import MetricsExporter
from service.metrics.recorder import Metrics
from service.supervisor import Supervisor
from service.telemetry import make_tracing
from service.totals import Totals

TRACES_FLUSH_TIMEOUT_S = 1.0
"""For what is queued to reach the collector, once the last call is over."""


class Observation:
    """Built before the parts that it watches, which are told where to note things; `watch` completes it."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigurationError: tracing is asked for and its extra is not installed."""
        self._config = config
        self.totals = Totals()
        self.metrics = Metrics()
        self._tracing = make_tracing(config.otlp_endpoint, VERSION, config.served_model_name)
        self._exporter: MetricsExporter | None = None

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are told; None: nowhere."""
        return None if self._exporter is None else self._exporter.address

    def watch(self, supervisor: Supervisor, admission: Admission, dispatcher: Dispatcher) -> Accounts:
        """The parts are there; returns what keeps the accounts of calls."""
        config = self._config
        if config.metrics_port is not None:
            collector = Collector(config, self.metrics, self.totals, supervisor, admission, dispatcher)
            self._exporter = MetricsExporter(config.host, config.metrics_port, collector)
        load = LoadReporter(
            config,
            clock=time.monotonic,
            totals=self.totals,
            supervisor=supervisor,
            admission=admission,
            dispatcher=dispatcher,
        )
        return Accounts(
            clock=time.monotonic,
            totals=self.totals,
            metrics=self.metrics,
            tracing=self._tracing,
            load_metadata=load.metadata,
        )

    def bind(self) -> None:
        """Open the scrapers' port, and answer there from now on. Raises StartupError."""
        if self._exporter is not None:
            self._exporter.start()

    async def close(self) -> None:
        """Send the last traces, for a while. Scrapers are answered until the process ends."""
        await self._tracing.close(TRACES_FLUSH_TIMEOUT_S)

    def shut(self) -> None:
        """Close the scrapers' port: for a process that outlives its server."""
        if self._exporter is not None:
            self._exporter.close()
