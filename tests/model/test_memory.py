"""Memory is counted where it is limited: machine, control groups of either version, and the largest step."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.config import EngineConfig
from scheduler.model.memory import (
    KV_POOL_CPU_BYTES_MAX,
    available_host_bytes,
    measure_peak_bytes,
    pool_budget_bytes,
    release_file_pages,
)

MIB = 1 << 20
CPU = torch.device("cpu")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    8192 kB\n"}


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    """MemAvailable, in bytes; None where nothing can be read."""
    assert available_host_bytes(write(tmp_path, MACHINE)) == 8 * MIB
    assert available_host_bytes(tmp_path / "empty") is None


def test_a_group_v2_or_its_parent_may_have_less(tmp_path: Path) -> None:
    """The tightest group on the way up counts; file cache that can be dropped does not count as used."""
    pod = "sys/fs/cgroup/kubepods/pod1"
    root = write(
        tmp_path,
        {
            **MACHINE,
            "proc/self/cgroup": "0::/kubepods/pod1/container\n",
            f"{pod}/container/memory.max": "max\n",
            f"{pod}/container/memory.current": "5\n",
            f"{pod}/memory.max": f"{4 * MIB}\n",
            f"{pod}/memory.current": f"{3 * MIB}\n",
            f"{pod}/memory.stat": f"anon 1\ninactive_file {MIB // 2}\n",
        },
    )
    assert available_host_bytes(root) == MIB + MIB // 2


def test_a_group_v1_may_have_less(tmp_path: Path) -> None:
    """The older hierarchy is read as well; its way of saying `no limit` is a number larger than any machine."""
    group = "sys/fs/cgroup/memory"
    files = {f"{group}/memory.limit_in_bytes": f"{6 * MIB}", f"{group}/memory.usage_in_bytes": f"{5 * MIB}"}
    assert available_host_bytes(write(tmp_path, {**MACHINE, **files})) == MIB
    write(tmp_path, {f"{group}/memory.limit_in_bytes": "9223372036854771712"})
    assert available_host_bytes(tmp_path) == 8 * MIB


def test_the_pool_leaves_headroom_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step is set aside first, then a share is taken, up to a bound."""
    config = EngineConfig(model="any")
    monkeypatch.setattr("scheduler.model.memory.available_host_bytes", lambda: 1100 * MIB)
    assert pool_budget_bytes(config, CPU, 100 * MIB) == 400 * MIB
    assert pool_budget_bytes(config, CPU, 2000 * MIB) < 0
    monkeypatch.setattr("scheduler.model.memory.available_host_bytes", lambda: 1 << 50)
    assert pool_budget_bytes(config, CPU, 0) == KV_POOL_CPU_BYTES_MAX


def test_the_peak_of_a_step_is_measured() -> None:
    """Memory that a step takes and gives back again is seen."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not count resident memory")
    peak = measure_peak_bytes(lambda: np.ones(64 * MIB, dtype=np.uint8).sum(), CPU)
    assert 60 * MIB < peak < 200 * MIB


def _resident_bytes(address: int) -> int:
    """Of the mapping at this address."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(word, 16) for word in words[0].split("-"))
            is_it = start <= address < end
        elif is_it and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("no such mapping")


def test_pages_of_files_are_let_go_unless_they_were_written_to(tmp_path: Path) -> None:
    """What was only read takes no memory afterwards and reads the same again; a mapping that holds a change of its own
    is left as it is, and so is memory of no file."""
    size = 64 * mmap.PAGESIZE
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (size // 256))
    with path.open("rb") as file:
        read, written = (mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=3) for _ in range(2))
    anonymous = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arrays = [np.frombuffer(memory, dtype=np.uint8) for memory in (read, written, anonymous)]
    written[5] = 77
    anonymous[:] = b"x" * size
    sums = [int(array.sum()) for array in arrays]
    addresses = [array.ctypes.data for array in arrays]
    assert [_resident_bytes(address) >= size for address in addresses] == [True, True, True]
    release_file_pages([address + 3 * mmap.PAGESIZE for address in addresses])
    assert [_resident_bytes(address) >= size for address in addresses] == [False, True, True]
    assert [int(array.sum()) for array in arrays] == sums
