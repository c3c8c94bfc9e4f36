"""Which part of the machine each replica gets: a GPU where there are GPUs, else a share of the cores.

What must not be here: torch, which the front end does without. GPUs are counted as the driver shows them, cut by
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from scheduler.errors import ConfigurationError

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def num_gpus(environ: Mapping[str, str] = os.environ, driver_gpus: Path = _DRIVER_GPUS) -> int:
    """How many GPUs our engines can see."""
    try:
        count = sum(1 for _ in driver_gpus.iterdir())
    except OSError:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, sum(1 for part in visible.split(",") if part.strip() not in ("", "-1")))


def device_indices(device: str, num_replicas: int, gpus: int) -> tuple[int | None, ...]:
    """One per replica: its GPU, or None where there is nothing to choose.

    Raises:
        ConfigurationError: more replicas than GPUs, on a machine that serves from GPUs.
    """
    if device == "cpu" or gpus == 0 or num_replicas == 1:
        return (None,) * num_replicas
    if num_replicas > gpus:
        raise ConfigurationError(f"--replicas={num_replicas} needs as many GPUs; there are {gpus}")
    return tuple(range(num_replicas))


def threads_per_engine(num_threads: int | None, device: str, num_replicas: int, gpus: int) -> int | None:
    """The compute threads of one engine: what was asked for, else its share of the cores (None: all)."""
    if num_threads is not None or num_replicas == 1 or (device != "cpu" and gpus > 0):
        return num_threads
    return max(1, len(os.sched_getaffinity(0)) // num_replicas)
