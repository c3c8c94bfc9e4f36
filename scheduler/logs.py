"""Logs of both processes: structlog, to stderr, by one writer that nobody waits for.

What lives here: the set-up and the writer. What must not: events themselves, or knowledge of gRPC or engines. A
caller's text (prompts, generated text, schemas) never goes into a log; that is every caller's duty, and the reason why
library messages are logged by their template alone.

`StderrWriter` is a bounded queue with a thread behind it. A stderr that blocks stalls that thread and nobody else:
what does not fit is dropped and counted, and the count is told when writing goes on. A critical record pushes out
older lines rather than be dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LogFormat = Literal["json", "console"]
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}

QUEUE_BYTES_MAX = 1024 * 1024
VALUE_CHARS_MAX = 2048
TRACEBACK_CHARS_MAX = 24 * 1024
FRAMES_MAX = 12
_FIRST_KEYS = ("timestamp", "level", "event")
_KNOWN_LOGGERS = ("py", "scheduler", "service")
"""Of the interpreter's warnings and of our own modules: their arguments hold no text of a caller."""


class StderrWriter:
    """Writes lines to a descriptor from a thread of its own; `write` never blocks."""

    def __init__(
        self, fd: int, render_dropped: Callable[[int], bytes], *, queue_bytes_max: int = QUEUE_BYTES_MAX
    ) -> None:
        self._fd = fd
        self._render_dropped = render_dropped
        self._queue_bytes_max = queue_bytes_max
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_writing = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stderr-writer", daemon=True)

    def start(self) -> None:
        """Begin to write what `write` has queued."""
        self._thread.start()

    def write(self, line: bytes, *, must_keep: bool = False) -> None:
        """Queue one line, its newline included. Over the bound it is dropped, or older lines are if it must be kept."""
        with self._changed:
            while must_keep and self._lines and self._num_bytes + len(line) > self._queue_bytes_max:
                self._num_bytes -= len(self._lines.popleft())
                self._num_dropped += 1
            if self._num_bytes + len(line) > self._queue_bytes_max and not must_keep:
                self._num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written, at most `timeout_s`; False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Flush, then end the thread, in `timeout_s` together; one that is stuck in a write is left behind (it is a
        daemon).
        """
        deadline_s = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(max(deadline_s - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    return
                chunk = b"".join(self._lines)
                self._lines.clear()
                self._num_bytes = 0
                num_dropped, self._num_dropped = self._num_dropped, 0
                self._is_writing = True
            if num_dropped:
                chunk += self._render_dropped(num_dropped)
            self._write_out(chunk)

    def _write_out(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # whoever gave us stderr made it non-blocking
                select.select([], [self._fd], [])
            except OSError:  # nobody reads it any more; there is nowhere to say so
                return


class _LineLogger:
    """What structlog hands the finished line to."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write

    def msg(self, line: str) -> None:
        self._write(line.encode("utf-8", "backslashreplace") + b"\n")

    debug = info = warning = error = msg

    def critical(self, line: str) -> None:
        self._write(line.encode("utf-8", "backslashreplace") + b"\n", must_keep=True)


class _LibraryHandler(logging.Handler):
    """Takes what libraries log through the standard library into our stream, without tracebacks or their arguments."""

    def __init__(self, quiet: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        is_known = record.name.partition(".")[0] in _KNOWN_LOGGERS
        if not isinstance(record.msg, str):  # an exception, most likely: its text may be a caller's
            text = f"{type(record.msg).__module__}.{type(record.msg).__qualname__}"
        else:
            text = record.getMessage() if is_known else record.msg
        fields: dict[str, Any] = {"logger": record.name, "message": text.partition("\n")[0][:VALUE_CHARS_MAX]}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= describe(error)
        level = min(record.levelno, logging.ERROR)
        if text.startswith(self._quiet.get(record.name, ())):
            level = logging.DEBUG
        get_logger().log(level, "library message", **fields)


def configure(
    log_format: LogFormat,
    level: str,
    *,
    process: str,
    fd: int = 2,
    quiet: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> StderrWriter:
    """Set up this process's logs and start their writer.

    Args:
        log_format: `json` (one object per line) or `console` (coloured text).
        level: A key of `LEVELS`; what is below it is not logged.
        process: Bound to every record: `service` or `engine`.
        fd: Where lines go.
        quiet: By a library's logger, how messages begin that are logged as debug whatever the library calls them.
    """
    renderer = _render_json if log_format == "json" else _console_renderer()
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _stamp(process),
        _bound_values,
        _order,
        renderer,
    ]

    def render_dropped(num_dropped: int) -> bytes:
        record: MutableMapping[str, Any] = {"event": "log lines dropped", "level": "warning", "count": num_dropped}
        for processor in processors[2:]:  # of no call, and with a level
            record = processor(None, "warning", record)  # type: ignore[assignment] # the last one gives the line
        return str(record).encode() + b"\n"

    writer = StderrWriter(fd, render_dropped)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: _LineLogger(writer.write),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryHandler(quiet))
    root.setLevel(max(logging.WARNING, LEVELS[level]))
    logging.captureWarnings(True)
    writer.start()
    return writer


def get_logger() -> FilteringBoundLogger:
    """The logger of this process."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def default_format() -> LogFormat:
    """Coloured text where stderr is a terminal, else JSON lines."""
    return "console" if sys.stderr is not None and sys.stderr.isatty() else "json"


def describe(error: BaseException) -> dict[str, Any]:
    """What may be told of an unforeseen exception: its type and where it was raised, innermost last.

    Never its text, which may hold a caller's, and no traceback: those belong to the death record alone.
    """
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_MAX:]
    return {
        "exception_type": f"{type(error).__module__}.{type(error).__qualname__}",
        "where": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }


def parse_line(line: str) -> dict[str, Any] | None:
    """A record of another process's JSON log, or None if the line is none."""
    if not line.startswith("{"):
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("event"), str) and record.get("level") in LEVELS:
            return record
    return None


def forward(record: Mapping[str, Any], **fields: Any) -> None:
    """Log a record of another process as it is, with more fields, which go before its own of the same name."""
    rest = {key: value for key, value in record.items() if key not in ("event", "level", "self")}
    get_logger().log(LEVELS[record["level"]], record["event"], **(rest | fields))


def _stamp(process: str) -> Processor:
    def stamp(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        record.setdefault("timestamp", datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"))
        record.setdefault("process", process)
        return record

    return stamp


def _bound_values(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in record.items():
        limit = TRACEBACK_CHARS_MAX if key == "traceback" else VALUE_CHARS_MAX
        if isinstance(value, str) and len(value) > limit:
            record[key] = value[:limit] + "…"
    return record


def _order(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    first = {key: record[key] for key in _FIRST_KEYS if key in record}
    return first | {key: value for key, value in record.items() if key not in _FIRST_KEYS}


def _render_json(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> str:
    return json.dumps(record, default=str, ensure_ascii=False)


def _console_renderer() -> Processor:
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # a file of colour codes is found by no grep
    render = structlog.dev.ConsoleRenderer(colors=is_terminal, sort_keys=False)

    def render_console(logger: Any, method: str, record: MutableMapping[str, Any]) -> str:
        frames = record.pop("traceback", None)
        line = str(render(logger, method, record))
        return line if not frames else f"{line}\n{frames}"

    return render_console
