"""scripts/audit tells a clean bill, a finding and a failure to ask apart: with a stand-in for pip-audit, since what the
real one says depends on the day.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import audit_dependencies as audit

CLEAN = {"name": "clean", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1", "3"]}]}
HOPELESS = {"name": "hopeless", "version": "3", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script with a pip-audit that says this and ends so; its exit status."""

    def run_with(stdout: str, stderr: str = "", status: int = 0) -> int:
        environment = tmp_path / "environment"
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "stdout").write_text(stdout)
        (tmp_path / "stderr").write_text(stderr)
        command = environment / "bin" / "pip-audit"
        command.write_text(f"#!/bin/sh\ncat {tmp_path}/stdout\ncat {tmp_path}/stderr >&2\nexit {status}\n")
        command.chmod(0o755)
        monkeypatch.setattr(audit, "TOOL_ENVIRONMENT", environment)
        status = audit.main([])
        assert isinstance(status, int)
        return status

    return run_with


def report(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(dependencies), "fixes": []})


def test_nothing_known_is_a_clean_bill(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, and how many were asked about."""
    assert run(report(CLEAN, CLEAN | {"name": "other"})) == 0
    assert capsys.readouterr().out == "audit: 0 advisories about 2 pinned dependencies\n"


def test_findings_are_told_with_what_helps(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, and a line for each with the versions that are free of it."""
    assert run(report(CLEAN, BAD, HOPELESS), "Found 2 known vulnerabilities", 1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["bad", "2", "PYSEC-1", "2.1,", "3"],
        ["hopeless", "3", "PYSEC-2", "none"],
    ]


UNKNOWN = {
    "no answer": ("", "some\nConnectionError: no such host", 1, "did not answer (ConnectionError: no such host)"),
    "no answer and no reason": ("", "", 1, "did not answer (no reason given)"),
    "some were skipped": (report(CLEAN, {"name": "odd", "skip_reason": "not on the index"}), "", 0, "not checked: odd"),
    "nothing was checked": (report(), "", 0, "not checked: anything at all"),
    "no report": ("a word of warning", "", 0, "cannot be read"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_could_not_be_found_out_is_no_clean_bill(run: Any, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """Exit 3 and one line that says why; it is neither of the other two."""
    stdout, stderr, status, said = UNKNOWN[what]
    assert run(stdout, stderr, status) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("audit: nothing is known: ")
    assert said in told.err
    assert told.err.count("\n") == 1


def test_every_dependency_is_pinned_exactly() -> None:
    """What is asked about is what is installed."""
    lines = [line for line in audit.CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 and not set(line) & set(" ;<>~!*") for line in lines)
