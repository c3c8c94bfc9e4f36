"""One engine's death: what is known of it, and how that is told.

What lives here: the facts, the one record `fatal error`, the facts of the crash report, the one line for the
termination log. What must not: finding a death (`engine.py`), deciding what follows (`supervisor.py`, `dispatch.py`),
the report's file (`crash_report.py`).
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.flight_record import FlightRecord
from scheduler.messages import EngineFailed, Ready
from service import crash_report
from service.crash_report import RequestFacts
from service.engine_process import EngineProcess, signal_name

STEPS_IN_RECORD_MAX = 4
LINES_IN_RECORD_MAX = 50
LINES_CHARS_IN_RECORD_MAX = 8 * 1024
SUSPECTS_IN_RECORD_MAX = 4
"""A record is as long for many streams as for few; the crash report has more."""
STACKS_CHARS_IN_RECORD_MAX = 8 * 1024
CONFIGURATION_TYPES = ("ConfigurationError", "ModelUnsupportedError")
OUT_OF_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError")
FORESEEN_TYPES = ("StartupError", *CONFIGURATION_TYPES)


@dataclass(slots=True)
class Aftermath:
    """What became of a dead engine's streams."""

    num_ended: int = 0
    num_replayed: int = 0
    requests: list[RequestFacts] = field(default_factory=list)
    """Those of the dying step."""
    killer_id: int | None = None
    """Which of them is known to have done it."""
    killer_label: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows for the dead engine's place."""

    restart_in_s: float | None = None
    """None: no engine is started in it any more."""
    gives_up: bool = False
    """No engine serves and none will: the server ends."""
    is_first_start: bool = False
    """It never had an engine that was ready."""
    num_deaths_in_window: int = 0
    num_restarts_max: int = 0


@dataclass(slots=True)
class Death:
    """One engine's end. Filled in as it becomes known."""

    death_id: str
    cause: str
    """How it was found; one line."""
    was_starting: bool
    is_hang: bool
    monotonic_s: float
    record: FlightRecord
    """Where it was."""
    report: EngineFailed | None
    """Its last word."""
    aftermath: Aftermath = field(default_factory=Aftermath)
    decision: Decision = Decision()
    stacks: str = ""
    """Of its Python threads, if it hung and could still give them."""
    root_cause: str = ""
    """One line, for the termination log; known once it is reaped."""

    @property
    def is_foreseen(self) -> bool:
        """The engine said in considered words why it cannot start."""
        return self._kind in FORESEEN_TYPES

    @property
    def is_configuration(self) -> bool:
        """The engine refused its configuration while starting."""
        return self._kind in CONFIGURATION_TYPES

    @property
    def _kind(self) -> str:
        if self.report is None or not self.report.starting:
            return ""
        return self.report.exception_type.rpartition(".")[2]


def record_fields(death: Death, engine: str, process: EngineProcess) -> dict[str, Any]:
    """The fields of `fatal error`, the process reaped if the kernel let it be."""
    record, report, status = death.record, death.report, process.returncode
    aftermath, decision = death.aftermath, death.decision
    fields: dict[str, Any] = {
        "death_id": death.death_id,
        "cause": death.cause,
        "engine": engine,
        "pid": process.pid,
        "exit_status": _exit_status(status),
        "signal": _signal(status),
        "killed_by_us": process.was_killed_by_us,
        "hung": death.is_hang,
        "oom_kills": process.oom_kills(),
        "starting": death.was_starting,
        "phase": report.phase.name if report is not None else record.phase.name,
        "step_id": report.step_id if report is not None else record.step_id,
        "batch": report.batch if report is not None else record.batch,
        "recent_steps": [str(step) for step in record.steps[:STEPS_IN_RECORD_MAX]],
        "num_messages_received": record.num_messages_received,
        "num_streams_ended": aftermath.num_ended,
        "num_streams_replayed": aftermath.num_replayed,
        "num_suspects": len(aftermath.requests),
        "suspects": [request.label for request in aftermath.requests[:SUSPECTS_IN_RECORD_MAX]],
        "killer": aftermath.killer_label,
        "killer_id": aftermath.killer_id,
        "restart_in_s": decision.restart_in_s,
        "gives_up": decision.gives_up,
        "num_deaths_in_window": decision.num_deaths_in_window,
    }
    if report is not None:
        fields |= {"exception_type": report.exception_type, "message": report.message}
        fields["traceback"] = report.traceback
    else:
        fields["last_lines"] = last_lines(process.last_lines)
    if death.stacks:
        fields["stacks"] = death.stacks[:STACKS_CHARS_IN_RECORD_MAX]
    return fields


def crash_facts(
    death: Death, engine: str, process: EngineProcess, model: str, ready: Ready | None
) -> crash_report.CrashFacts:
    """Everything that the crash report is made of. Reads some files of /proc and /sys."""
    aftermath, decision, status = death.aftermath, death.decision, process.returncode
    return crash_report.CrashFacts(
        death_id=death.death_id,
        time_s=time.time(),
        server_version=importlib.metadata.version("emberline-server"),
        engine=crash_report.EngineFacts(
            index=int(engine),
            pid=process.pid,
            uptime_s=round(death.monotonic_s - process.started_monotonic_s, 3),
            was_starting=death.was_starting,
            model=model,
            device="" if ready is None else ready.device,
            dtype="" if ready is None else ready.dtype,
            attention_backend="" if ready is None else ready.attention_backend,
        ),
        end=crash_report.EndFacts(
            cause=death.cause,
            exit_status=_exit_status(status),
            signal=_signal(status),
            was_killed_by_us=process.was_killed_by_us,
            was_hung=death.is_hang,
            oom_kills=process.oom_kills(),
            report=death.report,
            stacks=death.stacks,
            last_lines=tuple(process.last_lines),
        ),
        flight=death.record,
        requests=aftermath.requests,
        memory=crash_report.read_memory(process.last_rss_bytes),
        aftermath=crash_report.Aftermath(
            num_ended=aftermath.num_ended,
            num_replayed=aftermath.num_replayed,
            killer_id=aftermath.killer_id,
            suspect_ids=[r.request_id for r in aftermath.requests if r.request_id != aftermath.killer_id],
            restart_delay_s=decision.restart_in_s,
            num_deaths_in_window=decision.num_deaths_in_window,
            num_restarts_max=decision.num_restarts_max,
        ),
    )


def root_cause(death: Death, status: int | None) -> str:
    """One line, whatever the exception's message holds."""
    report = death.report
    if report is not None and death.is_foreseen:
        return " ".join(report.message.split())  # considered words; the server says them, in one line
    if report is not None:
        where = ", ".join(part for part in (f"phase {report.phase.name}", report.batch) if part)
        return " ".join(f"{report.exception_type}: {report.message} ({where})".split())
    ending = "not reaped" if status is None else _signal(status) or f"exit status {status}"
    return f"{death.cause} ({ending})"


def cause_kind(death: Death, process: EngineProcess) -> str:
    """One of `service.metrics.recorder.DEATH_CAUSES`, of a death whose process has been reaped if it could be."""
    report, status = death.report, process.returncode
    if death.is_hang:
        return "hang"
    if report is not None:
        return "out_of_memory" if report.exception_type.endswith(OUT_OF_MEMORY_TYPES) else "exception"
    if process.oom_kills():
        return "out_of_memory"
    if process.was_killed_by_us or status is None:
        return "connection"  # it closed its socket or sent what is no message, and lived on
    return "signal" if status < 0 else "exit"


def last_lines(lines: Sequence[str]) -> list[str]:
    """The newest, as many as there is room for; of one that is longer than that, its beginning."""
    kept: list[str] = []
    room = LINES_CHARS_IN_RECORD_MAX
    for line in list(lines)[: -LINES_IN_RECORD_MAX - 1 : -1]:
        if len(line) > room and kept:
            break
        kept.append(line[:room])
        room -= len(kept[-1])
    return kept[::-1]


def _exit_status(status: int | None) -> int | None:
    return status if status is not None and status >= 0 else None


def _signal(status: int | None) -> str | None:
    return signal_name(-status) if status is not None and status < 0 else None
