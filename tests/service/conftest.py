"""Fixtures of the tests of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import tiny_tokenizers
from tests.service.support import CapturedLogs, captured_logs


@pytest.fixture
def log() -> Iterator[CapturedLogs]:
    with captured_logs() as log:
        yield log


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model(
        tmp_path_factory.mktemp("model"),
        tiny_tokenizers.byte_level(),
        config={"max_position_embeddings": 4096, "eos_token_id": 150},
        chat_template=tiny_tokenizers.CHATML,
    )
