"""How much memory there is, how much a step takes, and how many KV blocks follow from both.

What must live here: measuring and arithmetic. What must not: allocation, torch modules, anything that loads a model.
Memory is settled before the engine is ready; a number that comes out too small ends the start with one line.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from scheduler.config import EngineConfig
from scheduler.errors import ConfigurationError, StartupError
from scheduler.model.kv_cache import NUM_SCRATCH_BLOCKS

KV_POOL_CPU_BYTES_MAX = 1 << 30
"""The pool's size on a CPU where no flag asks for more: beyond it compute, not memory, bounds the batch."""
KV_POOL_CPU_SHARE = 0.4
"""Of the memory available when weights are loaded. The rest is headroom: page cache, front end, a second engine."""


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the number of KV blocks is decided from."""

    num_bytes_per_block: int
    """Over all layers."""
    num_blocks_useful_max: int
    """What `max_num_seqs` sequences of `max_model_len` tokens can hold; more would never be used."""
    budget_bytes: int
    """What the measurement leaves for the pool; used where no flag overrides it."""
    available_bytes: int | None
    """What the device can give at all, the largest step being set aside: the bound of what a flag may ask for."""


def decide_num_kv_blocks(config: EngineConfig, request: PoolRequest) -> int:
    """Blocks for sequences: `num_kv_blocks` if set, else what `kv_cache_memory_bytes`, else the measured budget, holds
    beside the scratch block.

    Raises ConfigurationError if a flag leaves no block, StartupError if the machine does or lacks what they want.
    """
    num_blocks = _wanted_num_kv_blocks(config, request)
    num_bytes = (num_blocks + NUM_SCRATCH_BLOCKS) * request.num_bytes_per_block
    if request.available_bytes is not None and num_bytes > request.available_bytes:
        raise StartupError(
            f"the KV pool of {num_blocks} blocks does not fit into memory: it takes {num_bytes >> 20} MiB, "
            f"{max(request.available_bytes, 0) >> 20} MiB are left beside weights and activations"
        )
    return num_blocks


def _wanted_num_kv_blocks(config: EngineConfig, request: PoolRequest) -> int:
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < 1:
            raise ConfigurationError(f"--num-kv-blocks must be at least 1, not {config.num_kv_blocks}")
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // request.num_bytes_per_block - NUM_SCRATCH_BLOCKS
        if num_blocks < 1:
            raise ConfigurationError(
                f"--kv-cache-memory of {config.kv_cache_memory_bytes} bytes holds no KV block beside the one kept for "
                f"checks; one takes {request.num_bytes_per_block} bytes"
            )
    else:
        num_blocks = request.budget_bytes // request.num_bytes_per_block - NUM_SCRATCH_BLOCKS
        if num_blocks < 1:
            raise StartupError(
                f"not enough memory for a KV pool: {max(request.budget_bytes, 0) >> 20} MiB are left beside weights "
                f"and activations, one block takes {request.num_bytes_per_block} bytes"
            )
    return min(num_blocks, request.num_blocks_useful_max)


def pool_budget_bytes(config: EngineConfig, device: torch.device, step_peak_bytes: int) -> int:
    """Bytes the KV pool may take, weights being loaded and `step_peak_bytes` set aside for the largest step."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch holds in reserve from the measured step will serve the same step again.
        in_use = total - free - (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        return int(total * config.gpu_memory_utilization) - in_use - step_peak_bytes
    available = available_host_bytes()
    if available is None:
        return KV_POOL_CPU_BYTES_MAX // 2
    return min(KV_POOL_CPU_BYTES_MAX, int((available - step_peak_bytes) * KV_POOL_CPU_SHARE))


def available_device_bytes(device: torch.device, step_peak_bytes: int) -> int | None:
    """Bytes that `device` can still give with `step_peak_bytes` set aside; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - step_peak_bytes
    available = available_host_bytes()
    return None if available is None else available - step_peak_bytes


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process can still get: the least of what the machine and its control groups have to give.

    None where the system does not say. Pages of the file cache that can be dropped count as available.
    """
    machine = _meminfo_available(root)
    limits = [limit for limit in (machine, _cgroup_v2_available(root), _cgroup_v1_available(root)) if limit is not None]
    return min(limits, default=None)


def _meminfo_available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_v2_available(root: Path) -> int | None:
    """The least of what the process's own group and each group above it has left."""
    mount = root / "sys/fs/cgroup"
    found = [line.removeprefix("0::/") for line in _read(root / "proc/self/cgroup").splitlines() if line[:3] == "0::"]
    if not found:
        return None
    own = mount / found[0]
    left = []
    for group in (own, *own.parents):
        if group != mount and mount not in group.parents:
            break
        available = _group_available(group, "memory.max", "memory.current", "inactive_file")
        if available is not None:
            left.append(available)
    return min(left, default=None)


def _cgroup_v1_available(root: Path) -> int | None:
    group = root / "sys/fs/cgroup/memory"
    return _group_available(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _group_available(group: Path, limit_file: str, usage_file: str, reclaimable_key: str) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():  # absent, or the word `max`
        return None
    statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    return max(0, int(limit) - int(usage) + int(statistics.get(reclaimable_key, 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def measure_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Runs `step` and returns by how much the process's memory on `device` rose above where it began, at its highest.

    On a CPU that is resident memory as Linux counts it; elsewhere (no /proc) 0, and the pool's headroom must do.
    """
    gc.collect()  # garbage that is given back during the step would hide what the step takes
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # 5 resets the high-water mark; see proc(5), /proc/pid/clear_refs.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        step()
        return 0
    before = _status_bytes("VmRSS")
    step()
    return max(0, _status_bytes("VmHWM") - before)


def release_file_pages(addresses: Iterable[int]) -> None:
    """Lets go of the pages of the files mapped at these addresses, the whole mappings; what is read again comes back.

    Only of private mappings with no page of their own: what was written to one exists nowhere else. Linux only.
    """
    wanted = sorted(set(addresses))
    start, end = 0, 0
    for line in _read(Path("/proc/self/smaps")).splitlines():
        words = line.split()
        if "-" in words[0]:  # address range, permissions, offset, device, inode, path
            start, end = (int(word, 16) for word in words[0].split("-"))
            index = bisect.bisect_left(wanted, start)
            if not (index < len(wanted) and wanted[index] < end and words[1][3] == "p" and words[4] != "0"):
                start = end = 0
        elif words[0] == "Anonymous:" and words[1] == "0" and end:
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            madvise(start, end - start, mmap.MADV_DONTNEED)


def _status_bytes(field: str) -> int:
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
