"""A server of our own for a benchmark: `scripts/serve` on a free port, its log read, its end seen to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from scripts.benchmarks.errors import BenchmarkError

SERVE = Path(__file__).resolve().parents[1] / "serve"
STOP_LIMIT_S = 20.0
LOG_LIMIT_S = 2.0
"""For the end of the log after the end of the process; a child that outlives it would keep the pipe open."""
LAST_WORDS_LIMIT_S = 3.0
"""For a server whose engine has died to say why, and end."""
LINE_BYTES_MAX = 1 << 20
TAIL_LINES = 20


class Server:
    """A process that was started here. Its log is read to the end, or it would wait for a reader."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._serving = asyncio.Event()
        self._log = asyncio.ensure_future(self._read_log())
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.events: Counter[str] = Counter()
        """How often each event was logged."""
        self.address = ""
        """Known once it serves."""
        self.startup_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._tail)

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._tail.append(line.decode(errors="replace").rstrip())
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the installer's progress
            if isinstance(record, dict):
                self._take(record)

    def _take(self, record: dict[str, object]) -> None:
        event = str(record.get("event"))
        self.events[event] += 1
        if event == "serving":
            self.address = str(record["address"])
            self._serving.set()

    async def wait_until_serving(self, limit_s: float) -> None:
        """Raises BenchmarkError if it ends first, or takes longer."""
        began_s = time.perf_counter()
        waits = {asyncio.ensure_future(self._serving.wait()), asyncio.ensure_future(self._process.wait())}
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.startup_s = time.perf_counter() - began_s
        if not self._serving.is_set():
            status = self._process.returncode
            what = (
                f"did not serve within {limit_s:g} s" if status is None else f"ended with status {status} at its start"
            )
            raise BenchmarkError(f"the server {what}")

    async def wait(self, limit_s: float) -> int | None:
        """Its exit status, its log read to the end; None if it still runs after the limit."""
        try:
            status = await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            return None
        await asyncio.wait([self._log], timeout=LOG_LIMIT_S)
        return status

    async def stop(self) -> None:
        """SIGTERM, and after STOP_LIMIT_S SIGKILL, to it and to what it started."""
        descendants = self.descendants()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            if await self.wait(STOP_LIMIT_S) is None:
                self._process.kill()
                await self._process.wait()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):  # as it should be; psutil tells a reused pid from ours
                process.kill()
        await asyncio.wait([self._log], timeout=LOG_LIMIT_S)
        self._log.cancel()

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill_engines(self, pids: Sequence[int]) -> float:
        """SIGKILL; returns the moment just before it. Raises BenchmarkError, and kills nothing, if one is not ours."""
        strays = set(pids) - {process.pid for process in self.descendants()}
        if strays:
            raise BenchmarkError(f"no descendants of the server {self.pid}: {sorted(strays)}")
        at_s = time.perf_counter()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return at_s


@asynccontextmanager
async def own_server(flags: Sequence[str], start_limit_s: float) -> AsyncIterator[Server]:
    """Serves within the block, and is gone after it, however the block ends. A BenchmarkError gets its last words."""
    process = await asyncio.create_subprocess_exec(
        SERVE,
        "--port=0",
        "--log-format=json",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        start_new_session=True,  # Ctrl-C ends the benchmark, which then stops the server
    )
    server = Server(process)
    try:
        await server.wait_until_serving(start_limit_s)
        yield server
    except BenchmarkError as error:
        if server.address:
            await server.wait(LAST_WORDS_LIMIT_S)
        await server.stop()
        raise BenchmarkError(f"{error}; the server's last words:\n{server.tail}") from None
    finally:
        await server.stop()
