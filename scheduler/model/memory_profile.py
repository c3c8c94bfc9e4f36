"""The measured cost of the largest step, remembered from one start to the next.

What must live here: what the measurement depends on, and its file. What must not: the measurement (`startup.py`), or
anything decided from it: how much memory is free is asked anew at each start.

One small file per combination, `profiles/<key>.json` in the cache, whose name is a hash of everything that the result
depends on. A file that is not there, not readable or not ours to write costs a measurement, never a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from scheduler.config import EngineConfig
from scheduler.model import disk_cache
from scheduler.model.attention.base import AttentionBackend
from scheduler.model.loader import LoadedModel

logger = logging.getLogger(__name__)

PROFILE_VERSION = 1
"""Of the file's form."""
FILES_MAX = 64
"""Profiles kept; those not used for longest give way."""
_PACKAGES = ("emberline-server", "torch", "transformers", "numba", "numpy", "flash-attn")
_ENVIRONMENT_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "PYTORCH_")


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What the largest step takes."""

    step_peak_bytes: int
    """Of the device's memory, above what is held between steps."""
    step_s_per_token: float
    """Its duration over its tokens."""


def remembered(key: str | None, measure: Callable[[], MemoryProfile]) -> MemoryProfile:
    """The profile kept under `key`, or a new one, which is then kept. None: neither read nor kept."""
    directory = None if key is None else _directory()
    if directory is None:
        return measure()
    path = directory / f"{key}.json"
    profile = _read(path)
    if profile is None:
        profile = measure()
        _write(path, profile)
    return profile


def key_of(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend) -> str | None:
    """A hash over everything that the largest step depends on; None where the model's files cannot be told apart."""
    files = _files_identity(config)
    if files is None:
        return None
    facts = {
        "profile_version": PROFILE_VERSION,
        "files": files,
        "model_config": loaded.model.config.to_dict(),
        "dtype": str(loaded.dtype),
        "max_model_len": loaded.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_threads": torch.get_num_threads(),
        "attention": [backend.name, backend.block_size, backend.num_threads],
        "device": _device_name(loaded.device),
        "packages": {name: _version(name) for name in _PACKAGES},
        "sources": _sources_digest(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT_PREFIXES)},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _files_identity(config: EngineConfig) -> list[Any] | None:
    """The model's files by their sizes and times, wherever its name leads to."""
    directory = Path(config.model)
    if not directory.is_dir():
        # Where the files were loaded from just now; asks the hub's cache, not the hub.
        found = huggingface_hub.try_to_load_from_cache(config.model, "config.json", revision=config.revision)
        if not isinstance(found, str):
            return None
        directory = Path(found).parent
    try:
        with os.scandir(directory) as entries:
            files = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file())
    except OSError:
        return None
    return [str(directory.resolve()), *files]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _sources_digest() -> str:
    """Of our own code that a step runs: a working copy changes without a new version."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _directory() -> Path | None:
    return disk_cache.writable_directory("profiles")


def _read(path: Path) -> MemoryProfile | None:
    try:
        values = json.loads(path.read_bytes())
        profile = MemoryProfile(int(values["step_peak_bytes"]), float(values["step_s_per_token"]))
    except FileNotFoundError:
        return None
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("the memory profile %s cannot be read (%s): measuring anew", path.name, type(error).__name__)
        return None
    if profile.step_peak_bytes < 0 or not (0 < profile.step_s_per_token < math.inf):
        logger.warning("the memory profile %s makes no sense: measuring anew", path.name)
        return None
    with contextlib.suppress(OSError):
        path.touch()  # it is in use
    return profile


def _write(path: Path, profile: MemoryProfile) -> None:
    """Whoever looks sees all of it or nothing."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            try:
                json.dump(asdict(profile), file)
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink()
                raise
        _forget_oldest(path.parent)
    except OSError as error:
        logger.warning("the memory profile could not be kept (%s)", type(error).__name__)


def _forget_oldest(directory: Path) -> None:
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in paths[FILES_MAX:]:
        path.unlink(missing_ok=True)
