"""scheduler/engine/process.py: an engine process reports its own failure, and never outlives its front end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from scheduler import logs
from scheduler.codec import FrameDecoder, Message, encode
from scheduler.config import EngineConfig
from scheduler.core.config import SchedulerConfig
from scheduler.core.scheduler import Scheduler
from scheduler.engine.channel import Channel, FrontEndGoneError
from scheduler.engine.engine_core import EngineCore
from scheduler.engine.flight_recorder import FlightRecorder
from scheduler.engine.process import STACKS_SIGNAL, _receive_activation, _receive_config, _run, _ToldToStopError
from scheduler.flight_record import SIZE_BYTES, FlightReader, FlightWriter
from scheduler.messages import Abort, Activate, EngineFailed, LoadProgress, Phase, Ready, Shutdown, StandingBy
from scheduler.model.disk_cache import writable_directory
from tests.fakes import FakeRunner
from tests.model.tiny import SUPPORTED, save_model

EXIT_TIMEOUT_S = 120
T = TypeVar("T")


SPARE_ENGINE = """
import os, sys
from scheduler.engine import process
from scheduler.messages import LoadProgress

receive = process._receive_config

def ask(channel):
    threads = len(os.listdir("/proc/self/task"))
    warm = {"torch", "transformers", "numba", "scheduler.model.startup"} <= set(sys.modules)
    channel.send(LoadProgress(f"warm={warm} threads={threads}", 0.0))
    return receive(channel)

process._receive_config = ask
process.main()
"""

HANGING_ENGINE = """
import ctypes, sys
from scheduler.engine import process
from scheduler.messages import LoadProgress

def spin_in_python():
    while True:
        pass

def sleep_in_c_with_the_gil():
    while True:  # a signal ends one call
        ctypes.PyDLL(None).sleep(3600)

def load(channel, *_):
    channel.send(LoadProgress("hanging", 0.0))
    {hang}()

process._load = load
process.main()
"""

LOGGING_ENGINE = """
import logging
from scheduler.engine import process

def load(*_):
    logging.getLogger("scheduler.model.x").warning("no cache in %s", "folder")
    raise ValueError("broken")

process._load = load
process.main()
"""


class Engine:
    """A started process, our end of its socket, and the memory into which it writes its stacks."""

    def __init__(self, child: subprocess.Popen[bytes], connection: socket.socket, stacks_fd: int) -> None:
        self.child = child
        self.connection = connection
        self.stacks_fd = stacks_fd
        self._decoder = FrameDecoder()
        self._messages: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.connection.sendall(b"".join(encode(message) for message in messages))

    def read_until(self, kind: type[T]) -> T:
        """The next message of this kind; the others before it are dropped."""
        self.connection.settimeout(EXIT_TIMEOUT_S)
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, EngineFailed), message.traceback
            data = self.connection.recv(1 << 16)
            assert data, f"the engine ended without a {kind.__name__}"
            self._messages += self._decoder.feed(data)


@contextmanager
def started_engine(*code: str, environment: dict[str, str] | None = None) -> Iterator[Engine]:
    ours, theirs = socket.socketpair()
    fd, stacks_fd = os.memfd_create("flight"), os.memfd_create("stacks")
    os.ftruncate(fd, SIZE_BYTES)
    command = [sys.executable, *(code or ("-m", "scheduler.engine.process"))]
    command += ["--socket-fd", str(theirs.fileno()), "--flight-recorder-fd", str(fd), "--stacks-fd", str(stacks_fd)]
    child = subprocess.Popen(
        command,
        pass_fds=[theirs.fileno(), fd, stacks_fd],
        stderr=subprocess.PIPE,
        process_group=0,
        env=os.environ | (environment or {}),
    )
    theirs.close()
    os.close(fd)
    try:
        yield Engine(child, ours, stacks_fd)
    finally:
        ours.close()
        os.close(stacks_fd)
        child.kill()
        child.communicate()


@contextmanager
def engine_process(*code: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    with started_engine(*code) as engine:
        yield engine.child, engine.connection


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
        runner = FakeRunner(num_kv_blocks=1, block_size=4)
        core = EngineCore(Scheduler(bounds), runner, channel.receive, recorder, time.monotonic)
        loop = threading.Thread(target=_run, args=(core, channel, recorder), daemon=True)
        loop.start()
        while reader.read().phase is not Phase.IDLE:
            time.sleep(0.001)
        front_end.sendall(encode(Shutdown()))
        loop.join(EXIT_TIMEOUT_S)
        assert not loop.is_alive()


# ------------------------------------------------------------------------------------------------- spare and standby


def test_a_process_without_a_configuration_has_its_imports_behind_it() -> None:
    """It waits with everything imported and no pool of threads; a configuration that comes later is taken then."""
    one_thread_each = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4"}
    with started_engine("-c", SPARE_ENGINE, environment=one_thread_each) as engine:
        assert engine.read_until(LoadProgress).stage == "imports"
        # Its own thread and that of its log. numpy's library starts threads at its import, unless told not to.
        assert engine.read_until(LoadProgress).stage == "warm=True threads=2"
        told_s = time.monotonic()
        engine.send(EngineConfig(model="/nowhere/at/all"))
        weights, report = read_all(engine.connection)
        assert isinstance(weights, LoadProgress)
        assert weights.elapsed_s <= time.monotonic() - told_s  # the time it waited is nobody's loading time
        assert isinstance(report, EngineFailed)
        assert "does not exist" in report.message
        assert engine.child.wait(EXIT_TIMEOUT_S) == 1


def test_a_shutdown_that_comes_with_the_configuration_ends_it_quietly(tmp_path: Path) -> None:
    """A stop during the imports is a clean stop: the configuration still waits in the socket, but is nobody's error.
    A process that never got one ends as well.
    """
    with started_engine("-c", SPARE_ENGINE) as engine:
        engine.send(Shutdown(), EngineConfig(model=str(tmp_path)))
        assert all(isinstance(message, LoadProgress) for message in read_all(engine.connection))
        assert engine.child.wait(EXIT_TIMEOUT_S) == 0


@pytest.mark.slow
def test_a_standby_serves_when_it_is_told_to(tmp_path: Path) -> None:
    """It says StandingBy and nothing more, allocates its pool at Activate, and tells how long that took."""
    directory = save_model(SUPPORTED["llama"], tmp_path / "model")
    (tmp_path / "cache").mkdir()
    numba_cache = writable_directory("numba")  # compiled kernels are shared, profiles are not
    assert numba_cache is not None
    (tmp_path / "cache" / "numba").symlink_to(numba_cache)
    config = EngineConfig(model=directory, num_threads=1, max_num_seqs=2, num_kv_blocks=8, standby=True)
    with started_engine(environment={"EMBERLINE_CACHE": str(tmp_path / "cache")}) as engine:
        engine.send(config)
        assert engine.read_until(StandingBy).pid == engine.child.pid
        engine.connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            engine.connection.recv(1)
        told_s = time.monotonic()
        engine.send(Activate(device_index=5))  # which means nothing on a CPU
        ready = engine.read_until(Ready)
        assert 0 < ready.startup_s <= time.monotonic() - told_s
        assert (ready.pid, ready.num_kv_blocks, ready.device) == (engine.child.pid, 8, "cpu")
        assert ready.step_s_per_token > 0
        engine.send(Shutdown())
        assert engine.child.wait(EXIT_TIMEOUT_S) == 0


@pytest.mark.parametrize("wait_for", [_receive_config, _receive_activation])
def test_whoever_waits_takes_a_shutdown_and_an_end_of_file(wait_for: Callable[[Channel], object]) -> None:
    """Both end a process that does not serve yet; anything else that is not what it waits for is our bug."""
    for message, error in ((Shutdown(), _ToldToStopError), (Abort((1,)), TypeError), (None, FrontEndGoneError)):
        front_end, theirs = socket.socketpair()
        with front_end, theirs:
            if message is None:
                front_end.close()
            else:
                front_end.sendall(encode(message))
            with pytest.raises(error):
                wait_for(Channel(theirs))


# ---------------------------------------------------------------------------------------------------------- stacks


@pytest.mark.parametrize("hang", ["spin_in_python", "sleep_in_c_with_the_gil"])
def test_a_hung_engine_gives_its_stacks(hang: str) -> None:
    """Whether Python code never ends or a C call keeps the GIL: the signal brings every thread's Python stack."""
    with started_engine("-c", HANGING_ENGINE.format(hang=hang)) as engine:
        assert engine.read_until(LoadProgress).stage == "hanging"
        stacks = ""
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while f"in {hang}" not in stacks:  # it may not yet be where it hangs
            assert time.monotonic() < deadline_s, stacks
            os.ftruncate(engine.stacks_fd, 0)
            os.kill(engine.child.pid, STACKS_SIGNAL)
            time.sleep(0.01)
            stacks = os.pread(engine.stacks_fd, 1 << 16, 0).decode()
        assert stacks.count("hread 0x") == 2  # the loop's and the log's
        assert engine.child.poll() is None
