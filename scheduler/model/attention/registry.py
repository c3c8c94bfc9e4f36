"""The one table of attention backends, and the choice among them.

A backend's module is imported only when it is asked for: numba and flash-attn each take their time, and either may be
missing where the other is in use.
"""

from __future__ import annotations

import contextlib
from importlib import import_module

import torch

from scheduler.errors import ConfigurationError
from scheduler.model.attention.base import AttentionBackend

BACKENDS = {
    "flash": "scheduler.model.attention.flash:FlashBackend",
    "cpu": "scheduler.model.attention.cpu:CpuBackend",
    "reference": "scheduler.model.attention.reference:ReferenceBackend",
}

AUTO = "auto"
AUTO_BACKENDS = {"cuda": "flash", "cpu": "cpu"}


def choose_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> type[AttentionBackend]:
    """The backend class of that name; `auto` is `flash` on a GPU and `cpu` elsewhere.

    Raises ConfigurationError if the name is unknown or its backend cannot run with these values; the message lists
    what can, and why the others cannot.
    """
    if name == AUTO:
        name = AUTO_BACKENDS[device.type]
    if name not in BACKENDS:
        known = ", ".join([AUTO, *BACKENDS])
        raise ConfigurationError(f"no attention backend is named {name!r}; there are {known}")
    backend, reason = _load(name, device, dtype, head_dim, block_size)
    if backend is not None:
        return backend
    others = []
    for other in BACKENDS:
        if other != name:
            _, why_not = _load(other, device, dtype, head_dim, block_size)
            others.append(f"{other} is usable" if why_not is None else f"{other} {why_not}")
    raise ConfigurationError(f"attention backend {name} {reason}; {'; '.join(others)}")


def preload_backend(device_type: str) -> None:
    """Imports and preloads what `auto` means on this type of device, if it can be."""
    module_name, class_name = BACKENDS[AUTO_BACKENDS[device_type]].split(":")
    with contextlib.suppress(ImportError):  # whoever chooses it will be told why
        getattr(import_module(module_name), class_name).preload()


def _load(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> tuple[type[AttentionBackend] | None, str | None]:
    """(class, None) if usable, else (None, the reason, a verb first)."""
    module_name, class_name = BACKENDS[name].split(":")
    try:
        backend = getattr(import_module(module_name), class_name)
    except ImportError as error:
        return None, f"cannot be imported: {error}"
    reason = backend.unsupported_reason(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size)
    return (backend, None) if reason is None else (None, reason)
