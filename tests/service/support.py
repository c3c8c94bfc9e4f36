"""What the tests of the acting parts share: the fake engine's command, captured logs, requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scheduler import logs
from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams, SequenceStart, StoppingParams, Submit
from tests.service.fake_engine import Trigger

ENGINE_CONFIG = EngineConfig(model="fake", num_threads=1)
HANG_S = 30
"""A bound against hanging, not a promise about speed."""


def fake_engine(**flags: object) -> tuple[str, ...]:
    """The command of a fake engine; `load_s=1` is `--load-s 1`."""
    options = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return (sys.executable, "-m", "tests.service.fake_engine", *options)


def submit(request_id: int, *prompt: int, max_tokens: int = 4, resume: tuple[int, ...] = ()) -> Submit:
    sequences = (SequenceStart(0, resume),)
    return Submit(request_id, prompt or (1, 2), SamplingParams(), StoppingParams(max_tokens), sequences)


def poisoned(request_id: int, trigger: Trigger) -> Submit:
    return submit(request_id, trigger.value, 1)


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


class CapturedLogs:
    """Records in the order they were written."""

    def __init__(self, path: Path, writer: logs.StderrWriter) -> None:
        self._path = path
        self._writer = writer

    @property
    def text(self) -> str:
        assert self._writer.flush(HANG_S)
        return self._path.read_text()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]


@contextmanager
def captured_logs(level: str = "debug", **options: Any) -> Iterator[CapturedLogs]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        writer = logs.configure("json", level, process="test", fd=fd, **options)
        try:
            yield CapturedLogs(path, writer)
        finally:
            writer.close(HANG_S)
            logging.captureWarnings(False)
            os.close(fd)
