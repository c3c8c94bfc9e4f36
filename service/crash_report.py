"""What is left of an engine's death: one JSON file per death, for `emberline autopsy` and for whoever writes tools.

What lives here: the report's content and its file. What must not: finding things out about a death (`death.py`), words
of advice (`autopsy.py`). A report holds numbers, shapes, names of files and of functions, and the callers' labels of
their requests; no prompt, no ids of tokens, no schemas.

Reports of one directory are bounded in number, and files that are not ours are never touched. Nothing here may make a
death worse: what cannot be written is a warning.

`SCHEMA` goes up when a reader of the old form would misread the new one; a new field alone does not move it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scheduler import logs
from scheduler.flight_record import FlightRecord
from scheduler.messages import EngineFailed

SCHEMA = 1
KEEP = 20
NUM_REQUESTS_MAX = 64
LABEL_CHARS_MAX = 64
STACKS_CHARS_MAX = 16 * 1024
TRACEBACK_CHARS_MAX = 16 * 1024
MESSAGE_CHARS_MAX = 2048
NUM_LINES_MAX = 50
LINE_CHARS_MAX = 1024
STALE_S = 3600.0
_FILE_NAME = re.compile(r"death-\d{8}T\d{6}Z-[0-9a-f]{1,64}\.json")
_TEMPORARY_NAME = re.compile(r"\.death-\d{8}T\d{6}Z-[0-9a-f]{1,64}\.json\.\d+\.tmp")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Whose death it was. What the engine has not told yet is empty."""

    index: int
    """Which replica."""
    pid: int
    uptime_s: float
    was_starting: bool
    model: str
    """The name it is served under."""
    device: str = ""
    dtype: str = ""
    attention_backend: str = ""


@dataclass(frozen=True, slots=True)
class EndFacts:
    """How it ended."""

    cause: str
    """How the front end came to know; one line."""
    exit_status: int | None = None
    signal: str | None = None
    """Such as `SIGKILL`."""
    was_killed_by_us: bool = False
    """The signal was our own fence: the engine was given up first."""
    was_hung: bool = False
    """The hang watch gave it up."""
    oom_kills: int | None = None
    """The kernel's, in our control group, since the engine's start; None where it does not tell."""
    report: EngineFailed | None = None
    """The engine's own last word."""
    stacks: str = ""
    """Of its Python threads, where it could still give them."""
    last_lines: Sequence[str] = ()
    """What it wrote to stderr beside its log."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request of the dying step."""

    request_id: int
    """The server's own number."""
    label: str
    """The caller's; empty if the caller had left before."""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    was_alone: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What there was of it, in bytes; None where nobody tells."""

    engine_rss_bytes: int | None = None
    """When it was last seen alive."""
    available_bytes: int | None = None
    """MemAvailable of the machine."""
    cgroup_current_bytes: int | None = None
    cgroup_max_bytes: int | None = None
    """None also if there is no limit."""
    cgroup_events: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What became of the streams and of the engine's place."""

    num_ended: int = 0
    num_replayed: int = 0
    killer_id: int | None = None
    suspect_ids: Sequence[int] = ()
    restart_delay_s: float | None = None
    """None: not started again."""
    num_deaths_in_window: int = 0
    num_restarts_max: int = 0


@dataclass(frozen=True, slots=True)
class CrashFacts:
    """Everything that a report is made of."""

    death_id: str
    time_s: float
    """By the wall clock, since the epoch."""
    server_version: str
    engine: EngineFacts
    end: EndFacts
    flight: FlightRecord
    requests: Sequence[RequestFacts] = ()
    memory: MemoryFacts = MemoryFacts()
    aftermath: Aftermath = Aftermath()


def build_report(facts: CrashFacts) -> dict[str, Any]:
    """The report, ready to be written: plain values, each list and text within its bound."""
    end, own, flight = facts.end, facts.end.report, facts.flight
    aftermath = facts.aftermath
    lines = list(end.last_lines)[-NUM_LINES_MAX:]
    return {
        "schema": SCHEMA,
        "death_id": facts.death_id,
        "time": datetime.fromtimestamp(facts.time_s, UTC).isoformat(timespec="milliseconds"),
        "server_version": facts.server_version,
        "engine": asdict(facts.engine),
        "cause": _cut_end(end.cause, LINE_CHARS_MAX),
        "exception": None
        if own is None
        else {
            "type": own.exception_type,
            "message": _cut_end(own.message, MESSAGE_CHARS_MAX),
            "traceback": _cut_middle(own.traceback, TRACEBACK_CHARS_MAX),
        },
        "exit_status": end.exit_status,
        "signal": end.signal,
        "was_killed_by_us": end.was_killed_by_us,
        "was_hung": end.was_hung,
        "oom_kills": end.oom_kills,
        "phase": (flight if own is None else own).phase.name,
        "step_id": (flight if own is None else own).step_id,
        "num_messages_received": flight.num_messages_received,
        "steps": [asdict(step) for step in flight.steps],
        "num_requests": len(facts.requests),
        "requests": [_request(request) for request in facts.requests[:NUM_REQUESTS_MAX]],
        "blame": {"killer": aftermath.killer_id, "suspects": list(aftermath.suspect_ids)[:NUM_REQUESTS_MAX]},
        "stacks": _cut_middle(end.stacks, STACKS_CHARS_MAX),
        "last_lines": [_cut_end(line, LINE_CHARS_MAX) for line in lines],
        "memory": asdict(facts.memory),
        "streams": {"num_ended": aftermath.num_ended, "num_replayed": aftermath.num_replayed},
        "restart": {
            "delay_s": aftermath.restart_delay_s,
            "num_deaths_in_window": aftermath.num_deaths_in_window,
            "num_restarts_max": aftermath.num_restarts_max,
        },
    }


def read_memory(
    engine_rss_bytes: int | None = None, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MemoryFacts:
    """What the system tells now. Never raises: where there is no such file there is no such fact."""
    group = Path(cgroup, _read(proc / "self/cgroup").rpartition("0::")[2].strip().lstrip("/"))
    meminfo = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    events = re.findall(r"^(\w+) (\d+)$", _read(group / "memory.events"), re.MULTILINE)
    return MemoryFacts(
        engine_rss_bytes=engine_rss_bytes,
        available_bytes=None if meminfo is None else int(meminfo[1]) * 1024,
        cgroup_current_bytes=_number(_read(group / "memory.current")),
        cgroup_max_bytes=_number(_read(group / "memory.max")),
        cgroup_events={name: int(count) for name, count in events},
    )


def write_report(directory: Path, report: dict[str, Any], keep: int = KEEP) -> Path | None:
    """Write it into the directory, whole or not at all, and remove the oldest of ours beyond `keep`.

    Returns where it is; None, after a warning, if it could not be written. It may take as long as the disk does: not on
    the event loop.
    """
    moment = re.sub(r"[-:]|\.\d+|\+00:00", "", report["time"]) + "Z"
    path = directory / f"death-{moment}-{report['death_id']}.json"
    temporary = directory / f".{path.name}.{os.getpid()}.tmp"
    try:
        data = json.dumps(report, indent=1, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(temporary, data + b"\n")
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a path that no system call takes
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or type(error).__name__
        logs.get_logger().warning("crash report not written", path=str(path), reason=reason)
        return None
    with contextlib.suppress(OSError):
        _remove_oldest(directory, path, keep)
    return path


def reports_in(directory: Path) -> list[Path]:
    """The reports in it, the newest first: by the time of death, which their names have to the second, then by that of
    writing. Raises OSError.
    """
    with os.scandir(directory) as entries:
        found = [
            (entry.name[: len("death-00000000T000000Z")], entry.stat().st_mtime_ns, entry.name)
            for entry in entries
            if _FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
    return [directory / name for _, _, name in sorted(found, reverse=True)]


def _write_whole(path: Path, data: bytes) -> None:
    # O_EXCL: whatever already has this name, a link included, is not written through.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def _remove_oldest(directory: Path, newest: Path, keep: int) -> None:
    """By name, that is by the time of death. The one just written stays even if the wall clock was stepped back."""
    entries = [entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
    reports = sorted(entry.name for entry in entries if _FILE_NAME.fullmatch(entry.name) and entry.name != newest.name)
    names = reports[: max(len(reports) - (keep - 1), 0)]
    for entry in entries:  # of a front end that was killed in mid-write; another server's may be being written now
        if _TEMPORARY_NAME.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - STALE_S:
            names.append(entry.name)
    for name in names:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _request(request: RequestFacts) -> dict[str, Any]:
    return asdict(request) | {"label": _cut_end(request.label, LABEL_CHARS_MAX)}


def _cut_end(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut_middle(text: str, limit: int) -> str:
    """Both ends matter: of a traceback the last frames, of stacks the thread that was written first."""
    if len(text) <= limit:
        return text
    half = limit // 2 - 32
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None
