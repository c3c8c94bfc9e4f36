"""The guides of `docs/`, followed word for word."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.documents import free_port, run_guide
from tests.e2e.harness import ROOT, Server

DOCS = ROOT / "docs"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="the guide's other language is Node.js, which is not here")
def test_the_guide_for_callers(server: Server, tmp_path: Path) -> None:
    """Each command of docs/api.md does what it says, from an environment that has nothing of the server's."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "emberline")], check=True)
    run_guide(DOCS / "api.md", tmp_path, {50051: int(server.address.rpartition(":")[2])})


@pytest.mark.slow
def test_the_guide_to_running_it(tmp_path: Path) -> None:
    """Each command of docs/operations.md does what it says."""
    run_guide(DOCS / "operations.md", tmp_path, {port: free_port() for port in range(50051, 50058)})


@pytest.mark.slow
def test_the_guide_to_its_failures(tmp_path: Path) -> None:
    """Each command of docs/failures.md does what it says."""
    run_guide(DOCS / "failures.md", tmp_path, {50051: free_port()})
