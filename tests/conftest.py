"""What every test shares: what this machine can run, said in the header instead of skipped in silence."""

from __future__ import annotations

import ctypes
import functools
import signal

import pytest
from hypothesis import HealthCheck, settings

# The machine is shared: how long an example took says nothing of the code.
settings.register_profile("emberline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("emberline")

# A suite that a shell runs in its background is deaf to Ctrl-C, and so would the commands be that its tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def has_cuda() -> bool:
    """Whether a test marked `gpu` can run. torch is only imported where there is a driver to ask about."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return False
    import torch  # noqa: PLC0415 - seconds that most runs need not spend

    return torch.cuda.is_available()


def pytest_report_header() -> str:
    if has_cuda():
        return "CUDA: a device is there; tests marked gpu run"
    return "CUDA: none; tests marked gpu are deselected"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if has_cuda():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
