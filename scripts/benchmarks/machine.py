"""The facts of a machine that explain its figures, without its name or its paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("grpcio", "numba", "numpy", "protobuf", "tokenizers", "torch", "transformers")
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def facts() -> dict[str, object]:
    cpu = _cpuinfo()
    flags = set(cpu.get("flags", "").split())
    return {
        "processor": cpu.get("model name", platform.processor() or platform.machine()),
        "vector_units": [flag for flag in VECTOR_FLAGS if flag in flags],
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry."""
    try:
        entry = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in entry.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with a + if tracked files differ from it; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
