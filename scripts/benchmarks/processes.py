"""What the server costs: memory and processor time of its whole process tree, looked at once a second.

A thread of its own does it, so that a busy event loop delays no sample. It ends with its `with` block.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

INTERVAL_S = 1.0
"""Reading the PSS of an engine takes the kernel a few milliseconds; more often would be felt."""
SAMPLES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """The tree at one moment."""

    at_s: float
    pss_bytes: int | None
    """Resident memory, a page that k processes share counted 1/k in each; None where the kernel does not tell."""
    rss_bytes: int
    """Resident memory, shared pages counted in each process that has them."""
    cpu_s: float
    """Processor time since the processes began, those that have ended meanwhile included."""


class TreeSampler:
    """Samples the process `pid` and all its descendants from `__enter__` to `__exit__`."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tree-sampler", daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def sample(self) -> Sample:
        """Looks now, beside the regular rhythm."""
        with self._lock:
            sample = self._look()
            self.samples.append(sample)
            return sample

    def since(self, at_s: float) -> list[Sample]:
        with self._lock:
            return [sample for sample in self.samples if sample.at_s >= at_s]

    def _run(self) -> None:
        for _ in range(SAMPLES_MAX):
            self.sample()
            if self._over.wait(INTERVAL_S):
                return

    def _look(self) -> Sample:
        at_s = time.perf_counter()
        rss_bytes = 0
        pss: list[int | None] = []
        for process in self._tree():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    self._cpu_s[process.pid, process.create_time()] = times.user + times.system
                    rss_bytes += process.memory_info().rss
                    pss.append(proportional_bytes(process.pid))
            except psutil.Error:
                continue  # it has just ended; what it cost until the last look is kept
        known = [value for value in pss if value is not None]
        return Sample(at_s, sum(known) if len(known) == len(pss) else None, rss_bytes, sum(self._cpu_s.values()))

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []


def proportional_bytes(pid: int) -> int | None:
    """PSS of one process; None if it is gone, another user's, or the kernel is no Linux."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), None)


def listener(port: int) -> int | None:
    """The process that listens on a TCP port; None if nobody does, or it is another user's."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return connection.pid
    return None
