"""scheduler/engine/process.py: an engine process reports its own failure, and never outlives its front end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler import logs
from scheduler.codec import FrameDecoder, Message, encode
from scheduler.config import EngineConfig
from scheduler.core.config import SchedulerConfig
from scheduler.core.scheduler import Scheduler
from scheduler.engine.channel import Channel
from scheduler.engine.engine_core import EngineCore
from scheduler.engine.flight_recorder import FlightRecorder
from scheduler.engine.process import _run
from scheduler.flight_record import SIZE_BYTES, FlightReader, FlightWriter
from scheduler.messages import EngineFailed, Phase, Shutdown
from tests.fakes import FakeRunner

EXIT_TIMEOUT_S = 120


LOGGING_ENGINE = """
import logging
from scheduler.engine import process

def load(*_):
    logging.getLogger("scheduler.model.x").warning("no cache in %s", "folder")
    raise ValueError("broken")

process._load = load
process.main()
"""


@contextmanager
def engine_process(*code: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("flight")
    os.ftruncate(fd, SIZE_BYTES)
    command = [sys.executable, *(code or ("-m", "scheduler.engine.process"))]
    command += ["--socket-fd", str(theirs.fileno()), "--flight-recorder-fd", str(fd)]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno(), fd], stderr=subprocess.PIPE, process_group=0)
    theirs.close()
    os.close(fd)
    try:
        yield child, ours
    finally:
        ours.close()
        child.kill()
        child.communicate()


def read_all(connection: socket.socket) -> list[Message]:
    """Every message until the end of file."""
    connection.settimeout(EXIT_TIMEOUT_S)
    decoder = FrameDecoder()
    messages: list[Message] = []
    while data := connection.recv(1 << 16):
        messages += decoder.feed(data)
    return messages


def test_a_failing_start_is_one_report_and_status_1(tmp_path: Path) -> None:
    """A model that cannot be loaded ends as EngineFailed(starting) with its traceback, and nothing on stderr."""
    with engine_process() as (child, connection):
        connection.sendall(encode(EngineConfig(model=str(tmp_path))))
        report = read_all(connection)[-1]
        assert isinstance(report, EngineFailed)
        assert report.starting
        assert report.traceback.startswith("Traceback")
        assert child.wait(EXIT_TIMEOUT_S) == 1
        assert child.stderr is not None
        assert b"Traceback" not in child.stderr.read()


def test_what_the_engine_logs_are_records(tmp_path: Path) -> None:
    """Each line is one that the front end takes into its log, at its level; even the last before a failure gets out."""
    with engine_process("-c", LOGGING_ENGINE) as (child, connection):
        (report,) = read_all(connection)
        assert isinstance(report, EngineFailed)
        assert child.stderr is not None
        (line,) = child.stderr.read().decode().splitlines()
        record = logs.parse_line(line)
        assert record is not None
        assert (record["level"], record["process"], record["message"]) == ("warning", "engine", "no cache in folder")


def test_an_engine_whose_front_end_closes_the_socket_ends() -> None:
    """End of file before the configuration ends the process quietly: there is nobody to work for."""
    with engine_process() as (child, connection):
        connection.close()
        assert child.wait(EXIT_TIMEOUT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_is_the_front_ends_to_handle(number: signal.Signals, tmp_path: Path) -> None:
    """Sent to all processes of the service, it leaves an engine to go on: here, to end by its own failure instead."""
    with engine_process() as (child, connection):
        connection.sendall(encode(EngineConfig(model=str(tmp_path))))
        connection.settimeout(EXIT_TIMEOUT_S)
        first = connection.recv(1, socket.MSG_PEEK)  # the first progress: the process is up
        assert first
        os.kill(child.pid, number)
        assert isinstance(read_all(connection)[-1], EngineFailed)
        assert child.wait(EXIT_TIMEOUT_S) == 1


def test_an_idle_engine_ends_when_it_is_told_to() -> None:
    """A Shutdown that finds the loop waiting ends it; nothing else has to come."""
    fd = os.memfd_create("flight")
    os.ftruncate(fd, SIZE_BYTES)
    front_end, theirs = socket.socketpair()
    with front_end, theirs:
        channel, reader = Channel(theirs), FlightReader(fd)
        recorder = FlightRecorder(FlightWriter(fd), time.monotonic_ns, lambda: channel.num_messages_received)
        os.close(fd)
        bounds = SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=1, max_model_len=4, block_size=4, num_kv_blocks=1
        )
        core = EngineCore(Scheduler(bounds), FakeRunner(num_kv_blocks=1, block_size=4), channel.receive, recorder)
        loop = threading.Thread(target=_run, args=(core, channel, recorder), daemon=True)
        loop.start()
        while reader.read().phase is not Phase.IDLE:
            time.sleep(0.001)
        front_end.sendall(encode(Shutdown()))
        loop.join(EXIT_TIMEOUT_S)
        assert not loop.is_alive()
