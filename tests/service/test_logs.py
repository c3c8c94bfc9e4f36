"""Logs that nobody waits for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import warnings

import pytest

from scheduler import logs
from service.cli import CALLERS_FAULTS
from tests.service.support import HANG_S, CapturedLogs, captured_logs


class Pipe:
    """A stderr that blocks until somebody reads."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._data = b""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while data := os.read(self.read_fd, 65536):
            self._data += data

    def fill(self) -> None:
        os.set_blocking(self.write_fd, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.write_fd, b"filling\n" * 512)
        os.set_blocking(self.write_fd, True)

    def drain(self) -> None:
        self._thread.start()

    def close(self) -> list[str]:
        os.close(self.write_fd)
        self._thread.join(HANG_S)
        os.close(self.read_fd)
        return self._data.decode().splitlines()


def test_a_blocked_stderr_stalls_nobody() -> None:
    """While nobody reads, writing returns at once and drops what does not fit; afterwards the count is told, and a
    critical line was kept.
    """
    pipe = Pipe()
    pipe.fill()
    writer = logs.StderrWriter(pipe.write_fd, lambda count: f"dropped {count}\n".encode(), queue_bytes_max=10_000)
    writer.start()
    for _ in range(3000):
        writer.write(b"x" * 99 + b"\n")
    writer.write(b"the cause\n", must_keep=True)
    assert not writer.flush(0.01)
    pipe.drain()
    writer.close(HANG_S)
    lines = pipe.close()
    num_dropped = sum(int(line.split()[1]) for line in lines if line.startswith("dropped"))
    num_written = sum(line == "x" * 99 for line in lines)
    assert num_written + num_dropped == 3000
    assert num_written <= 200
    assert "the cause" in lines


def test_a_stderr_that_is_gone_is_no_error() -> None:
    """Nobody reads any more: lines vanish, and the process goes on."""
    pipe = Pipe()
    os.close(pipe.read_fd)
    writer = logs.StderrWriter(pipe.write_fd, lambda _: b"")
    writer.start()
    for _ in range(10):
        writer.write(b"x\n")
    assert writer.flush(HANG_S)
    writer.close(HANG_S)
    os.close(pipe.write_fd)


def test_records_are_json_lines(log: CapturedLogs) -> None:
    """Each record is one object on one line, with time, level, event and process first."""
    logs.get_logger().info("hello", value=1, text="a\nb", other="é")
    (record,) = log.records
    assert list(record)[:3] == ["timestamp", "level", "event"]
    assert {"level": "info", "event": "hello", "process": "test", "value": 1, "text": "a\nb"}.items() <= record.items()
    assert log.text.count("\n") == 1


def test_levels_filter() -> None:
    """What is below the level is not written."""
    with captured_logs("warning") as log:
        logs.get_logger().info("quiet")
        logs.get_logger().warning("loud")
        assert [record["event"] for record in log.records] == ["loud"]


def test_libraries_are_logged_without_arguments_and_tracebacks(log: CapturedLogs) -> None:
    """A library's message may hold a user's text in its arguments or in an exception: only template and type get in."""
    try:
        int("secret")
    except ValueError:
        logging.getLogger("some.library").exception("failed on %s", "secret")
    (record,) = log.of("library message")
    assert record["message"] == "failed on %s"
    assert record["exception_type"] == "builtins.ValueError"
    assert "secret" not in log.text
    assert "Traceback" not in log.text


@pytest.mark.parametrize("name", ["some.library", "service.part"])
def test_an_exception_as_a_message_is_its_type(log: CapturedLogs, name: str) -> None:
    """Its text may hold a caller's."""
    logging.getLogger(name).error(ValueError("secret"))
    (record,) = log.of("library message")
    assert record["message"] == "builtins.ValueError"
    assert "secret" not in log.text


@pytest.mark.parametrize(
    "message",
    [
        "Invalid encoding on %s",
        "Unexpected [UnicodeDecodeError] raised by servicer method [/a]",
        "ExecuteBatchError raised in core by servicer method [/a.B/C]",
    ],
)
def test_errors_that_callers_cause_do_not_grow_the_log(message: str) -> None:
    """What grpc logs of them is debug; another error of its own stays one."""
    for level in ("debug", "info"):
        with captured_logs(level, quiet=CALLERS_FAULTS) as log:
            try:
                bytes([0xFF]).decode()
            except UnicodeDecodeError:
                logging.getLogger("grpc._cython.cygrpc").exception(message)
                logging.getLogger("grpc._cython.cygrpc").error("Unexpected [ValueError] raised")
            levels = [record["level"] for record in log.of("library message")]
            assert levels == (["debug", "error"] if level == "debug" else ["error"])


def test_python_warnings_are_records(log: CapturedLogs) -> None:
    """Warnings of the interpreter are log records, not text between them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # pytest has put its own hook in the place of ours
        logging.captureWarnings(True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    (record,) = log.of("library message")
    assert "old thing" in record["message"]


def test_long_values_are_cut(log: CapturedLogs) -> None:
    """A value has 2 KB, a traceback more; nothing makes a line of unbounded length."""
    logs.get_logger().error("long", value="v" * 10**6, traceback="t" * 10**6)
    (record,) = log.records
    assert len(record["value"]) == logs.VALUE_CHARS_MAX + 1
    assert len(record["traceback"]) == logs.TRACEBACK_CHARS_MAX + 1


def test_another_process_is_forwarded_as_it_is(log: CapturedLogs) -> None:
    """A record of the engine keeps its time, level and process; what is no record is not taken for one."""
    line = json.dumps({"event": "hi", "level": "warning", "timestamp": "then", "process": "engine", "n": 1})
    record = logs.parse_line(line)
    assert record is not None
    logs.forward(record, engine=0)
    (forwarded,) = log.records
    assert forwarded == {**json.loads(line), "engine": 0}
    for other in ("", "text", "{", '{"event": 1, "level": "info"}', '{"event": "x", "level": "odd"}', "[1]"):
        assert logs.parse_line(other) is None


def test_what_a_record_says_of_its_engine_does_not_count(log: CapturedLogs) -> None:
    """A field of the same name, or one that a logger's own arguments have, is no error."""
    logs.forward({"event": "hi", "level": "warning", "engine": 7, "self": 1}, engine=0)
    (forwarded,) = log.records
    assert (forwarded["event"], forwarded["engine"]) == ("hi", 0)


def test_our_own_modules_are_logged_with_their_arguments(log: CapturedLogs) -> None:
    """They hold no text of a caller; a library whose name begins alike is still a library."""
    logging.getLogger("scheduler.model.attention.cpu").warning("no cache in %s", "folder")
    logging.getLogger("schedulers").warning("no cache in %s", "folder")
    assert [record["message"] for record in log.of("library message")] == ["no cache in folder", "no cache in %s"]


def test_closing_a_stuck_writer_takes_its_time_once() -> None:
    """Flushing and ending the thread share one deadline: the thread is left no more than what flushing has left."""
    pipe = Pipe()
    pipe.fill()
    writer = logs.StderrWriter(pipe.write_fd, lambda _: b"")
    writer.start()
    writer.write(b"x\n")
    waits: list[float] = []
    writer._thread.join = waits.append  # type: ignore[method-assign, assignment]
    writer.close(0.05)
    assert waits == [0]
    pipe.drain()
    pipe.close()


def test_an_unforeseen_exception_is_described_without_its_text() -> None:
    """Type and places are told, never the message."""

    def fail() -> None:
        raise KeyError("secret")

    try:
        fail()
    except KeyError as error:
        described = logs.describe(error)
    assert described["exception_type"] == "builtins.KeyError"
    assert described["where"][-1].endswith(" fail")
    assert "secret" not in str(described)
