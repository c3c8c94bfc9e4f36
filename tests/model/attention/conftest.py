"""The backends under test: what of them is real, and what stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from scheduler.model.attention import cpu, flash
from scheduler.model.attention.base import AttentionBackend
from scheduler.model.attention.cpu import CpuBackend
from scheduler.model.attention.flash import FlashBackend
from tests.model.attention.flash_stand_in import FlashAttnStandIn, TorchVarlenStandIn

MakeBackend = Callable[..., AttentionBackend]


@pytest.fixture(scope="module", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are not taken from what an earlier session left. For these modules alone: other tests' servers find
    their model by the same variable.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBERLINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def _make(backend: type[AttentionBackend], device: str) -> MakeBackend:
    return lambda **options: backend(device=torch.device(device), **options)


@pytest.fixture
def make_flash(monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    """FlashBackend with its tensors on the CPU; its limits on shapes stay."""

    def unsupported_reason(
        *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
    ) -> str | None:
        return FlashBackend._unsupported_shape(dtype, head_dim, block_size)

    monkeypatch.setattr(FlashBackend, "unsupported_reason", staticmethod(unsupported_reason))
    return _make(FlashBackend, "cpu")


@pytest.fixture
def flash_attn_stand_in(monkeypatch: pytest.MonkeyPatch) -> FlashAttnStandIn:
    stand_in = FlashAttnStandIn()
    monkeypatch.setattr(flash, "flash_attn_varlen_func", stand_in)
    return stand_in


@pytest.fixture
def torch_varlen_stand_in(monkeypatch: pytest.MonkeyPatch) -> TorchVarlenStandIn:
    stand_in = TorchVarlenStandIn()
    monkeypatch.setattr(flash, "flash_attn_varlen_func", None)
    monkeypatch.setattr(flash, "varlen", SimpleNamespace(varlen_attn=stand_in))
    return stand_in


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to hold to the contract, with a dtype and a block size it supports."""

    make: MakeBackend
    dtype: torch.dtype
    block_size: int


def _params() -> Iterator[ParameterSet]:
    for dtype, block_size in ((torch.float32, 16), (torch.float32, 48), (torch.bfloat16, 32), (torch.float16, 16)):
        yield pytest.param(("cpu", dtype, block_size), id=f"cpu-{dtype}-{block_size}")
    for dtype, block_size in ((torch.bfloat16, 256), (torch.float16, 512)):
        yield pytest.param(("flash_attn_stand_in", dtype, block_size), id=f"flash_attn-{dtype}-{block_size}")
        yield pytest.param(("torch_varlen_stand_in", dtype, block_size), id=f"torch_varlen-{dtype}-{block_size}")
        yield pytest.param(("gpu", dtype, block_size), id=f"gpu-{dtype}-{block_size}", marks=pytest.mark.gpu)


@pytest.fixture(params=_params())
def candidate(request: pytest.FixtureRequest) -> Candidate:
    kind, dtype, block_size = request.param
    if kind == "cpu":
        return Candidate(_make(CpuBackend, "cpu"), dtype, block_size)
    if kind == "gpu":
        return Candidate(_make(FlashBackend, "cuda"), dtype, block_size)
    request.getfixturevalue(kind)
    return Candidate(request.getfixturevalue("make_flash"), dtype, block_size)


@pytest.fixture
def empty_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this test's own, and no kernels in memory."""
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    cpu.compiled_kernels.cache_clear()
    yield tmp_path
    cpu.compiled_kernels.cache_clear()
