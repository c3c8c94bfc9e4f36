"""A benchmark's own server, with a stand-in for `scripts/serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.processes import TreeSampler, listener
from scripts.benchmarks.server import own_server

SERVES = """
import json, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL)
print("emberline: installing", file=sys.stderr)
while time.process_time() < 0.05:
    pass
print(json.dumps({"event": "serving", "address": "127.0.0.1:" + sys.argv[-1]}), file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
child.wait()
print(json.dumps({"event": "fatal error"}), file=sys.stderr, flush=True)
sys.exit(4)
"""
FAILS = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
HANGS = "import time; time.sleep(60)"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "serve"
    monkeypatch.setattr("scripts.benchmarks.server.SERVE", path)
    return path


def write(path: Path, program: str) -> None:
    path.write_text(f"#!{sys.executable} -IS\n{program}")
    path.chmod(0o755)


def alive(process: psutil.Process) -> bool:
    """A zombie is not: who inherits an orphan may be slow to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_server_is_gone_after_its_block_with_all_it_started(stand_in: Path) -> None:
    """Flags reach it, its address comes from its log, and a child that it leaves behind does not outlive it."""
    write(stand_in, SERVES)
    async with own_server(["7"], start_limit_s=30) as server:
        assert (server.address, server.events["serving"]) == ("127.0.0.1:7", 1)
        processes = [psutil.Process(server.pid), *server.descendants()]
    assert len(processes) == 2
    for _ in range(1000):
        if not any(alive(process) for process in processes):
            return
        await asyncio.sleep(0.01)
    pytest.fail("a process outlives the block")


async def test_an_engine_can_be_killed_and_a_stranger_cannot(stand_in: Path) -> None:
    """A pid that is no descendant is refused; after the death the exit status and the whole log are known."""
    write(stand_in, SERVES)
    async with own_server(["7"], start_limit_s=30) as server:
        (child,) = server.descendants()
        with pytest.raises(BenchmarkError, match="no descendants"):
            server.kill_engines([child.pid, os.getppid()])
        assert child.is_running()
        server.kill_engines([child.pid])
        assert await server.wait(limit_s=30) == 4
        assert server.events["fatal error"] == 1


async def test_a_server_that_does_not_start_is_quoted(stand_in: Path) -> None:
    """The error has its status and its last words."""
    write(stand_in, FAILS)
    with pytest.raises(BenchmarkError, match=r"status 3 at its start.*\nno such model"):
        async with own_server([], start_limit_s=30):
            pass


async def test_a_server_that_never_serves_is_stopped(stand_in: Path) -> None:
    """The start has a limit, too."""
    write(stand_in, HANGS)
    with pytest.raises(BenchmarkError, match=r"did not serve within 0\.2 s"):
        async with own_server([], start_limit_s=0.2):
            pass


async def test_the_sampler_sees_the_whole_tree_and_keeps_what_the_dead_have_cost(stand_in: Path) -> None:
    """Memory is that of both processes; processor time does not fall when one of them ends."""
    write(stand_in, SERVES)
    async with own_server(["7"], start_limit_s=30) as server:
        with TreeSampler(server.pid) as tree:
            before = tree.sample()
            assert before.rss_bytes > psutil.Process(server.pid).memory_info().rss
            assert before.pss_bytes is None or 0 < before.pss_bytes <= before.rss_bytes
            server.kill_engines([process.pid for process in server.descendants()])
            await server.wait(limit_s=30)
            assert tree.sample().cpu_s >= before.cpu_s > 0


async def test_a_port_leads_to_its_process() -> None:
    """So that a server which was there before can be watched as well."""
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with listening:
        assert listener(listening.sockets[0].getsockname()[1]) == os.getpid()
    assert listener(1) is None
