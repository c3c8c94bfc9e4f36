"""Tiny models, written once per run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model import tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a tiny model of a supported family."""
    made: dict[str, str] = {}

    def directory_of(family: str) -> str:
        if family not in made:
            made[family] = tiny.save_model(tiny.SUPPORTED[family], tmp_path_factory.mktemp(family))
        return made[family]

    return directory_of
