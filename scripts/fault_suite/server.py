"""The server under test: `scripts/serve` in a session of its own, its log and processes as anyone could see them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.server import SERVE

ENGINE_MODULE = "scheduler.engine.process"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
POLL_S = 0.005
PIPE_BYTES_MIN = 4096
READ_BYTES = 4096
TAIL_LINES = 40
STRAY_LIMIT_S = 3.0
"""The issue's own: no process is left so long after the front end's end."""
RECORDS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log."""

    at_s: float
    """When it was read here."""
    event: str
    fields: Mapping[str, Any]


class Server:
    """Spawned at once; see `running` for one that serves."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], port: int = 0) -> None:
        self.flags = list(flags)
        self.began_s = time.monotonic()
        self.records: list[Record] = []
        self.num_log_bytes = 0
        self.strange_lines: list[str] = []
        """Lines since `serving` that are no JSON objects."""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reads = threading.Event()
        self._reads.set()
        self._family: dict[int, psutil.Process] = {}
        reading_end, writing_end = os.pipe2(os.O_CLOEXEC)
        self._reading_end = reading_end
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EMBERLINE_") or k == "EMBERLINE_CACHE"}
        kept.pop("PYTHONPATH", None)  # ours, for this suite
        self._popen = subprocess.Popen(
            [SERVE, f"--port={port}", "--log-format=json", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writing_end,
            env={**kept, **environment},
            start_new_session=True,  # Ctrl-C ends the suite, which then stops the server
        )
        os.close(writing_end)
        self._reader = threading.Thread(target=self._read_log, name="server log", daemon=True)
        self._reader.start()

    # What it says

    def _read_log(self) -> None:
        partial = b""
        with contextlib.suppress(OSError):
            while data := os.read(self._reading_end, READ_BYTES):
                self.num_log_bytes += len(data)
                *lines, partial = (partial + data).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
                self._reads.wait()

    def _take(self, line: str) -> None:
        self._tail.append(line)
        record: Any = None
        with contextlib.suppress(ValueError):
            record = json.loads(line)
        if isinstance(record, dict):
            if len(self.records) < RECORDS_MAX:
                self.records.append(Record(time.monotonic(), str(record.get("event")), record))
        elif self.records and line.strip():
            self.strange_lines.append(line)

    @property
    def tail(self) -> str:
        """The log's last lines."""
        return "\n".join(self._tail)

    def events(self, event: str, since_s: float = 0.0) -> list[Record]:
        """The records of this event that were read at or after that moment."""
        return [record for record in list(self.records) if record.event == event and record.at_s >= since_s]

    @property
    def deaths(self) -> list[Record]:
        """Its `fatal error` records."""
        return self.events("fatal error")

    @property
    def address(self) -> str:
        """Where it serves."""
        return str(self.events("serving")[0].fields["address"])

    def pause_log(self) -> None:
        """Stop reading stderr: the pipe, made as small as it gets, is soon full."""
        self._reads.clear()
        with contextlib.suppress(OSError):  # more than that is in it already
            fcntl.fcntl(self._reading_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES_MIN)

    def resume_log(self) -> None:
        """Read on."""
        self._reads.set()

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for it; False if the time is up, or the server has ended meanwhile and it is still not so."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            if self.status is not None:
                await asyncio.sleep(0.2)  # for the rest of its log
                return condition()
            await asyncio.sleep(POLL_S)
        return True

    async def wait_for(self, event: str, limit_s: float, count: int = 1, since_s: float = 0.0) -> Record:
        """The `count`th record of an event. Raises BenchmarkError if it does not come."""
        if not await self.until(lambda: len(self.events(event, since_s)) >= count, limit_s):
            raise BenchmarkError(f"no {event!r} in the log within {limit_s:g} s (status {self.status}):\n{self.tail}")
        return self.events(event, since_s)[count - 1]

    # Its processes

    @property
    def pid(self) -> int:
        """The front end's: scripts/serve becomes it."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status, −N for signal N; None while it runs."""
        return self._popen.poll()

    def family(self) -> list[psutil.Process]:
        """All that it has started and that lives; remembered, so that an orphan is found again."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._known(child)
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if pid not in self._family and pid != self.pid and os.getsid(pid) == self.pid:
                    self._family[pid] = psutil.Process(pid)
        return [process for process in self._family.values() if _lives(process)]

    def _known(self, process: psutil.Process) -> psutil.Process:
        """The same object for the same process: it remembers what it has measured."""
        if self._family.get(process.pid) != process:  # the pid may be another's by now
            self._family[process.pid] = process
        return self._family[process.pid]

    def engines(self) -> list[psutil.Process]:
        """Its engine processes, helpers included: serving, starting, standing by or waiting to be one."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if ENGINE_MODULE in child.cmdline() and _lives(child):
                        found.append(self._known(child))
        return found

    def serving_pids(self) -> list[int]:
        """Of the engines that serve, by the log: the latest to be ready of each replica. They may be dead."""
        latest: dict[int, int] = {}
        for record in list(self.records):
            if record.event == "engine ready":
                latest[int(record.fields.get("engine", 0))] = int(record.fields["pid"])
            elif record.event == "serving" and "engine_pid" in record.fields and not latest:
                latest[0] = int(record.fields["engine_pid"])
        return list(latest.values())

    def engine_pid(self, replica: int = 0) -> int:
        """The engine that serves."""
        pids = self.serving_pids()
        if replica >= len(pids):
            raise BenchmarkError(f"the log names no engine {replica}:\n{self.tail}")
        return pids[replica]

    def helpers(self) -> list[psutil.Process]:
        """Engine processes that do not serve: standbys, spares, engines that start."""
        serving = set(self.serving_pids())
        return [process for process in self.engines() if process.pid not in serving]

    def zombies(self) -> list[int]:
        """Children that have ended and that it has not taken leave of."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.status() == psutil.STATUS_ZOMBIE:
                        found.append(child.pid)
        return found

    def signal_engine(self, number: signal.Signals, pid: int | None = None) -> float:
        """To the engine that serves, or to another process of this server's; the moment just before it.

        Raises BenchmarkError if the pid is not a child of the server: it may be anyone's by now.
        """
        target = self.engine_pid() if pid is None else pid
        if target not in {process.pid for process in self.engines()}:
            raise BenchmarkError(f"{target} is no engine of this server (any more)")
        at_s = time.monotonic()
        os.kill(target, number)
        return at_s

    def signal(self, number: signal.Signals) -> float:
        """To the front end; the moment just before it."""
        at_s = time.monotonic()
        if self.status is None:
            self._popen.send_signal(number)
        return at_s

    def memory_bytes(self) -> int:
        """Resident memory of the front end alone."""
        return int(psutil.Process(self.pid).memory_info().rss)

    # Its end

    async def wait(self, limit_s: float) -> int | None:
        """Its exit status, the log read to the end; None if it lives on."""
        if await self.until(lambda: self.status is not None, limit_s):
            self.resume_log()
            await asyncio.to_thread(self._reader.join, 2.0)
        return self.status

    async def leftovers(self, limit_s: float = STRAY_LIMIT_S) -> list[int]:
        """Processes of its that live on so long after it."""
        for _ in range(int(limit_s / 0.02)):
            if not self.family():
                return []
            await asyncio.sleep(0.02)
        return [process.pid for process in self.family()]

    def is_port_free(self, address: str) -> bool:
        """Whether another server could listen there now."""
        host, _, port = address.rpartition(":")
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                listener.bind((host, int(port)))
                listener.listen()
                return True
        return False

    async def stop(self) -> int | None:
        """SIGTERM, and SIGKILL to what does not listen and to all that is left. Harmless if it has ended."""
        self.family()
        self.signal(signal.SIGTERM)
        if await self.wait(STOP_LIMIT_S) is None:
            self.kill()
            await self.wait(5.0)
        self.kill()
        return self.status

    def kill(self) -> None:
        """SIGKILL to it and to all it has started."""
        family = self.family()
        self.signal(signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil checks that it is still the same process

    def close(self) -> None:
        """After its end."""
        self._reads.set()
        self._reader.join(1.0)
        if not self._reader.is_alive():
            os.close(self._reading_end)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@asynccontextmanager
async def spawned(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, port: int = 0
) -> AsyncIterator[Server]:
    """Gone after the block, with all it started, however the block ends."""
    server = Server(flags, environment or {}, port)
    try:
        yield server
    finally:
        try:
            if server.status is None:
                await server.stop()
        finally:
            server.kill()
            server.close()


@asynccontextmanager
async def running(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, port: int = 0
) -> AsyncIterator[Server]:
    """The same, once it serves."""
    async with spawned(flags, environment, port) as server:
        await server.wait_for("serving", START_LIMIT_S)
        yield server
