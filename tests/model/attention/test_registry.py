"""The choice of a backend: by name, by hardware, and refused with reasons."""

from __future__ import annotations

import pytest
import torch

from scheduler.errors import ConfigurationError
from scheduler.model.attention.registry import choose_backend

CPU = torch.device("cpu")


def test_auto_is_cpu_without_a_gpu() -> None:
    assert choose_backend("auto", device=CPU, dtype=torch.float32, head_dim=64).name == "cpu"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_name_gives_the_backend_of_that_name(name: str) -> None:
    assert choose_backend(name, device=CPU, dtype=torch.bfloat16, head_dim=64).name == name


@pytest.mark.gpu
def test_auto_is_flash_on_a_gpu() -> None:
    assert choose_backend("auto", device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64).name == "flash"


def test_a_refusal_says_why_and_what_could_be_used() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        choose_backend("flash", device=CPU, dtype=torch.float32, head_dim=64)
    assert str(refusal.value) == (
        "attention backend flash needs a CUDA device, not cpu; cpu is usable; reference is usable"
    )


def test_a_refusal_for_a_block_size_names_the_others_reasons() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cpu needs a block size that is a multiple of 16, not 24; flash needs"
    ):
        choose_backend("cpu", device=CPU, dtype=torch.float32, head_dim=64, block_size=24)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fast'; there are auto, flash, cpu, reference"):
        choose_backend("fast", device=CPU, dtype=torch.float32, head_dim=64)


def test_a_backend_that_cannot_be_imported_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.model.attention.registry.BACKENDS", {"cpu": "no_such_module:Backend"})
    with pytest.raises(ConfigurationError, match="cpu cannot be imported: No module named 'no_such_module'"):
        choose_backend("cpu", device=CPU, dtype=torch.float32, head_dim=64)
