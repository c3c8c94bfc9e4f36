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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_starts_of_a_fresh_clone(tmp_path: Path) -> None:
    """With Python and pip alone, an empty cache and no compiler, scripts/serve installs, fetches and serves, and two
    foreign clients get " Paris" in one line each; the second start finds all of it there and installs nothing.
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
        print(f"second start: serving after {time.monotonic() - began_s:.1f} s")  # the figure is in docs/benchmarks.md
    assert "installing" not in server.raw_stderr
    assert "fetching" not in server.raw_stderr
