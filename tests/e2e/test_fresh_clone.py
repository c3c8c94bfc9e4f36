"""A stranger's first and second start."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Server, buf_curl, grpcurl, json_documents

PARIS = {"text": "The capital of France is", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 8}}
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ld", "make")


def path_without_compilers(directory: Path) -> str:
    """A PATH of what scripts/serve itself names, and this Python."""
    directory.mkdir()
    for name in ("bash", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        (directory / name).symlink_to(found)
    (directory / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    assert not any(shutil.which(compiler, path=str(directory)) for compiler in COMPILERS)
    return str(directory)


def waited_for_a_core_s(pid: int) -> float:
    """How long the process's main thread was ready to run and did not: what other work on this machine took from it."""
    _on_core_ns, waited_ns, _slices = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(waited_ns) / 1e9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_starts_of_a_fresh_clone(tmp_path: Path) -> None:
    """With Python and pip alone, an empty cache and no compiler, scripts/serve installs, fetches and serves, and two
    foreign clients get " Paris" in one line each; the second start serves in under 10 s.
    """
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {"EMBERLINE_CACHE": str(tmp_path / "cache"), "PATH": path_without_compilers(tmp_path / "bin")}

    def start() -> Server:
        return Server(command=[clone / "scripts" / "serve"], env=environment, start_timeout_s=600)

    with start() as server:
        answers = [
            grpcurl(server.address, "InferenceService/Generate", PARIS),
            buf_curl(server.address, "InferenceService/Generate", PARIS),
        ]
    for answer in answers:
        assert answer.returncode == 0, answer.stderr
        messages = json_documents(answer.stdout)
        assert len(messages) > 1, "a stream, not one answer"
        assert " Paris" in "".join(message.get("text", "") for message in messages)
    assert server.returncode == 0
    assert server.leftovers() == []

    began_s = time.monotonic()
    with start() as server:
        elapsed_s = time.monotonic() - began_s
        waited_s = waited_for_a_core_s(server.pid) + waited_for_a_core_s(server.engine_pid())
    print(f"second start: serving after {elapsed_s:.1f} s, {waited_s:.1f} s of them waiting for a core")
    # The promise is about a machine that has its two cores for this; on a crowded one only the figure above is of use.
    is_crowded = waited_s > elapsed_s / 4
    assert elapsed_s < (120 if is_crowded else 10)
