"""One engine process from outside: exec, its output, its reaped exit status.

What lives here: descriptors, the child's environment, signals, waitpid. What must not: decisions about life and death
(`engine.py`). The child is exec'd, never forked on: gRPC does not survive a fork. It is started from the main
thread, because the signal it asks for on its parent's death follows the thread that started it, and in a process group
of its own, so that Ctrl-C reaches us alone.

The exit status comes from a pidfd on the event loop: no thread, no signal handler, and never a guess, for it is told
only once the process is reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from scheduler import logs
from scheduler.flight_record import SIZE_BYTES, FlightReader

ENGINE_COMMAND = (sys.executable, "-P", "-m", "scheduler.engine.process")
"""-P: or a folder `scheduler` where the server happens to be started would be taken for ours."""
LAST_LINES_MAX = 200
LINE_CHARS_MAX = 4096
REAP_POLL_S = 0.005
STACKS_SIGNAL = signal.SIGUSR1
STACKS_BYTES_MAX = 64 * 1024
STACKS_POLL_S = 0.02
_READ_BYTES = 64 * 1024


class EngineProcess:
    """A started process. `connection` is our end of its socket; whoever takes it over closes it."""

    def __init__(self, command: Sequence[str], *, num_threads: int | None, name: str = "0") -> None:
        """Start it. Must run in the main thread, on a running loop.

        Args:
            command: To it the three descriptors' flags are added.
            num_threads: Its compute threads, which must be known before torch loads; None: one per usable core.
            name: Which replica, for the logs.
        """
        self._loop = asyncio.get_running_loop()
        self.name = name
        """May change: a spare becomes a replica."""
        self.started_monotonic_s = time.monotonic()
        self.last_rss_bytes: int | None = None
        self.was_killed_by_us = False
        self._oom_kills_before = _oom_kills()
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._partial_line = b""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES_MAX)
        """What it last wrote to stdout or stderr, records of its log left out."""
        with contextlib.ExitStack() as childs, contextlib.ExitStack() as ours:
            self.connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.callback(self.connection.close)
            childs.callback(child_end.close)
            flight_fd = os.memfd_create("emberline-flight", os.MFD_CLOEXEC)
            childs.callback(os.close, flight_fd)
            os.ftruncate(flight_fd, SIZE_BYTES)
            self._stacks_fd = os.memfd_create("emberline-stacks", os.MFD_CLOEXEC)
            ours.callback(os.close, self._stacks_fd)
            self._output_fd, output_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ours.callback(os.close, self._output_fd)
            childs.callback(os.close, output_end)
            os.set_blocking(output_end, True)
            descriptors = {
                "--socket-fd": child_end.fileno(),
                "--flight-recorder-fd": flight_fd,
                "--stacks-fd": self._stacks_fd,
            }
            flags = [part for name, fd in descriptors.items() for part in (name, str(fd))]
            self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=tuple(descriptors.values()),
                env=_environment(num_threads),
                process_group=0,
            )
            ours.callback(self._popen.wait)
            ours.callback(self._popen.kill)
            self.flight = FlightReader(flight_fd)
            ours.callback(self.flight.close)
            self._pid_fd = os.pidfd_open(self._popen.pid)
            ours.pop_all()  # nothing failed: they are kept
        self._loop.add_reader(self._pid_fd, self._reap)
        self._loop.add_reader(self._output_fd, self._read_output)

    @property
    def pid(self) -> int:
        """The process id; also that of its group."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status once reaped; −N for signal N."""
        return self._popen.returncode

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: it does nothing until it is told to go on."""
        if self._popen.returncode is not None:
            return False  # the number may be another's by now
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    def oom_kills(self) -> int | None:
        """OOM kills in our cgroup since the start; None where the kernel does not tell."""
        now = _oom_kills()
        return None if now is None or self._oom_kills_before is None else now - self._oom_kills_before

    def note_memory(self) -> None:
        """Remember how much memory it holds; a dead process cannot be asked."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.last_rss_bytes = pages * resource.getpagesize()

    async def stacks(self, timeout_s: float) -> str:
        """Its threads' Python stacks, as far as it can still give them within `timeout_s`: a stopped one cannot."""
        if self._popen.returncode is not None:
            return ""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, STACKS_SIGNAL)
        deadline_s = time.monotonic() + timeout_s
        size = -1
        while time.monotonic() < deadline_s:
            await asyncio.sleep(STACKS_POLL_S)
            before, size = size, os.fstat(self._stacks_fd).st_size
            if size > 0 and size == before:
                break
        return os.pread(self._stacks_fd, STACKS_BYTES_MAX, 0).decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL to the process and whatever it started; nothing if it is reaped."""
        if self._popen.returncode is None:
            self.was_killed_by_us = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> int | None:
        """The reaped exit status, or None if there is none within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        return self._popen.returncode

    async def wait_output(self, timeout_s: float) -> None:
        """Wait until everything it wrote has been read, at most `timeout_s` (a grandchild may hold the pipe open)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output_ended.wait(), timeout_s)

    def close(self) -> None:
        """Let go of all descriptors."""
        if self._pid_fd >= 0:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = -1
        self._end_output()
        if self._stacks_fd >= 0:
            os.close(self._stacks_fd)
            self._stacks_fd = -1
        self.flight.close()

    def _reap(self) -> None:
        if self._exited.is_set() or self._pid_fd < 0:
            return  # told by an earlier look; the number may be another's by now
        # The group is killed while the zombie still keeps its number from being given to others.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._popen.poll() is None:
            self._loop.call_later(REAP_POLL_S, self._reap)  # readable, but the status is not there yet
            return
        self._loop.remove_reader(self._pid_fd)
        self._exited.set()

    def _read_output(self) -> None:
        try:
            data = os.read(self._output_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end_output()
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[-LINE_CHARS_MAX:]
        for line in lines:
            self._take_line(line)

    def _end_output(self) -> None:
        if self._output_fd >= 0:
            self._loop.remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = -1
            if self._partial_line:
                self._take_line(self._partial_line)
            self._output_ended.set()

    def _take_line(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace")
        record = logs.parse_line(line)
        if record is not None:
            logs.forward(record, engine=self.name)
            return
        # What is no record of a log (a library's words, a crash dump) is kept for the death record.
        line = line[:LINE_CHARS_MAX].rstrip()
        if line:
            self.last_lines.append(line)
            logs.get_logger().debug("engine output", engine=self.name, line=line)


def signal_name(number: int) -> str:
    """Such as `SIGKILL`; also for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(num_threads: int | None) -> dict[str, str]:
    """Thread counts are read when torch loads, so they must be set before the exec."""
    environment = dict(os.environ)
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # Threads that spin at OpenMP's barriers lose whole time slices as soon as anything else wants a core (our own front
    # end does): a step then takes 5 to 10 times as long. Sleeping costs about 0.1 ms a region.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    return environment


def _oom_kills() -> int | None:
    """The `oom_kill` counter of our cgroup (v2)."""
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/")
        events = Path("/sys/fs/cgroup", path, "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
