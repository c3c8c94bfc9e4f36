"""The guide compiler's process, for real: its limits, and its end.

Bounds of time are against hanging; that a limit works is seen from the outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.codec import FrameDecoder, encode
from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideKind,
    GuideOutcome,
    GuideSource,
)
from tests.service import tiny_tokenizers

WAIT_S = 120.0
VOCAB_SIZE = 300
EXPLOSIVE = GuideSource(
    GuideKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}),
)
"""Any subset of these, in order: half a minute of compilation."""
GREEDY = GuideSource(
    GuideKind.GRAMMAR,
    "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(60)) + 'r60 ::= "a" | ""',
)
GOOD = GuideSource(GuideKind.REGEX, "[a-c]{2,3}")


class Process:
    """One of them, and the front end's end of its socket."""

    def __init__(self, model: Path, *, timeout_s: float, elapsed_timeout_s: float = WAIT_S) -> None:
        self.socket, child_end = socket.socketpair()
        self.socket.settimeout(WAIT_S)
        with child_end:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "scheduler.engine.guide_process", "--socket-fd", str(child_end.fileno())],
                pass_fds=(child_end.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                process_group=0,
            )
        self._decoder = FrameDecoder()
        self._messages: list[Any] = []
        self._num_jobs = 0
        config = GuideCompilerConfig(str(model), None, VOCAB_SIZE, (257,), timeout_s, elapsed_timeout_s)
        self.socket.sendall(encode(config))

    def next(self) -> Any:
        while not self._messages:
            data = self.socket.recv(65536)
            assert data, "the process is gone"
            self._messages += self._decoder.feed(data)
        return self._messages.pop(0)

    def begin(self, source: GuideSource) -> int:
        self._num_jobs += 1
        self.socket.sendall(encode(CompileGuide(self._num_jobs, source)))
        return self._num_jobs

    def compile(self, source: GuideSource) -> GuideCompiled:
        job_id = self.begin(source)
        answer = self.next()
        assert answer.job_id == job_id
        return answer

    def jobs(self) -> list[int]:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        with contextlib.suppress(OSError):
            return [int(pid) for pid in children.read_text().split()]
        return []

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Process]:
    process = Process(model, timeout_s=1.0)
    assert isinstance(process.next(), GuideCompilerReady)
    yield process
    process.close()


@pytest.mark.slow
def test_each_outcome(process: Process) -> None:
    """A guide, a refusal, and each limit; after each of them the process goes on as if nothing had been."""
    schema = GuideKind.JSON_SCHEMA
    nested: Any = {"type": "string"}
    for _ in range(13):
        nested = {"anyOf": [nested, nested]}
    expected = [
        (GOOD, GuideOutcome.COMPILED),
        (GuideSource(GuideKind.REGEX, "(a"), GuideOutcome.MALFORMED),
        (GuideSource(schema, '{"not": {}}'), GuideOutcome.UNSUPPORTED),
        (GuideSource(schema, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), GuideOutcome.UNSUPPORTED),
        (EXPLOSIVE, GuideOutcome.TIME),
        (GREEDY, GuideOutcome.TIME),
        (GuideSource(schema, json.dumps(nested)), GuideOutcome.MEMORY),
        (GOOD, GuideOutcome.COMPILED),
    ]
    answers = [process.compile(source) for source, _ in expected]
    assert [answer.outcome for answer in answers] == [outcome for _, outcome in expected]
    assert answers[0].guide == answers[-1].guide != b""
    assert process.jobs() == []


@pytest.mark.slow
def test_an_explosive_guide_keeps_nobody_waiting(process: Process) -> None:
    """Guides begun after it are answered before it."""
    explosive = process.begin(EXPLOSIVE)
    good = process.begin(GOOD)
    assert [process.next().job_id for _ in range(2)] == [good, explosive]


@pytest.mark.slow
def test_a_job_killed_from_outside(process: Process) -> None:
    """Such as by the kernel, short of memory: it is answered, and the process goes on."""
    process.begin(EXPLOSIVE)
    (job,) = until(process.jobs)
    os.kill(job, signal.SIGKILL)
    assert process.next().outcome is GuideOutcome.MEMORY
    assert process.compile(GOOD).outcome is GuideOutcome.COMPILED


@pytest.mark.slow
def test_signals_to_stop_are_the_front_ends_business(process: Process) -> None:
    """Ctrl-C and a service manager's SIGTERM reach whole groups."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.popen.pid, number)
    assert process.compile(GOOD).outcome is GuideOutcome.COMPILED


@pytest.mark.slow
def test_what_it_takes_and_when_it_ends(model: Path) -> None:
    """A job that waits is ended by the clock, though it uses no CPU. No guide is in a command line or on stderr. With
    the front end's end of the socket closed, process and jobs are gone.
    """
    process = Process(model, timeout_s=60.0, elapsed_timeout_s=0.5)
    try:
        assert isinstance(process.next(), GuideCompilerReady)
        process.begin(EXPLOSIVE)
        (stopped,) = until(process.jobs)
        os.kill(stopped, signal.SIGSTOP)
        assert process.next().outcome is GuideOutcome.TIME
        # A warning of the library quotes the schema.
        process.compile(GuideSource(GuideKind.JSON_SCHEMA, '{"$ref": "#/canary"}'))
        process.begin(GuideSource(GuideKind.JSON_SCHEMA, EXPLOSIVE.text.replace("p1999", "canary")))
        (job,) = until(process.jobs)
        for pid in (process.popen.pid, job):
            assert b"canary" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        process.socket.close()
        until(lambda: not is_alive(job))
        assert process.popen.wait(WAIT_S) == 0
        assert process.popen.stderr is not None
        assert process.popen.stderr.read() == b""
    finally:
        process.close()


@pytest.mark.slow
def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """It says why, once, and ends."""
    process = Process(tmp_path, timeout_s=1.0)
    try:
        failure = process.next()
        assert isinstance(failure, GuideCompilerFailed)
        assert failure.exception_type
        assert not failure.is_unsupported
        assert process.popen.wait(WAIT_S) == 1
    finally:
        process.close()
