"""Tiny models, written once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.model import memory_profile
from tests.model import tiny


@pytest.fixture(autouse=True)
def profiles_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test measures for itself, and leaves nothing in the user's cache."""
    directory = tmp_path_factory.mktemp("profiles")
    monkeypatch.setattr(memory_profile, "_directory", lambda: directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a tiny model of a supported family."""
    made: dict[str, str] = {}

    def directory_of(family: str) -> str:
        if family not in made:
            made[family] = tiny.save_model(tiny.SUPPORTED[family], tmp_path_factory.mktemp(family))
        return made[family]

    return directory_of
