"""Checks every pinned dependency (constraints.txt) against the advisory database OSV, by way of pip-audit.

Not part of scripts/check: what it says depends on the day, not on the code. pip-audit is no dependency of the project;
it is installed into an environment of its own in the cache the first time. Exit status: 0 nothing is known against any
of them · 1 something is, the table tells what and which version is free of it · 3 it could not be found out, which says
nothing about the dependencies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CACHE = Path(os.environ.get("EMBERLINE_CACHE", "~/.cache/emberline")).expanduser()
TOOL = "pip-audit==2.10.1"
TOOL_ENVIRONMENT = CACHE / "tools" / TOOL.replace("==", "-")
REQUEST_TIMEOUT_S = 15
AUDIT_TIMEOUT_S = 900

EXIT_CLEAN = 0
EXIT_VULNERABLE = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One advisory about one pinned version."""

    package: str
    version: str
    advisory: str
    fixed_in: str


class UnknownError(Exception):
    """It could not be found out; the text says why in one line."""


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: scripts/audit (it takes no arguments)", file=sys.stderr)
        return EXIT_USAGE
    try:
        report = audit(tool(), CONSTRAINTS)
        found, num_checked = findings(report)
    except UnknownError as error:
        print(f"audit: nothing is known: {error}", file=sys.stderr)
        return EXIT_UNKNOWN
    for line in table(found):
        print(line)
    print(f"audit: {len(found)} advisories about {num_checked} pinned dependencies")
    return EXIT_VULNERABLE if found else EXIT_CLEAN


def tool() -> Path:
    """The installed pip-audit. Raises UnknownError."""
    command = TOOL_ENVIRONMENT / "bin" / "pip-audit"
    if command.exists():
        return command
    print(f"audit: installing {TOOL} into {TOOL_ENVIRONMENT}", file=sys.stderr)
    venv.create(TOOL_ENVIRONMENT, with_pip=True, clear=True)
    pip = [str(TOOL_ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if subprocess.run([*pip, "--only-binary", ":all:", TOOL], stdout=sys.stderr, check=False).returncode:
        raise UnknownError(f"{TOOL} could not be installed")
    return command


def audit(command: Path, constraints: Path) -> str:
    """pip-audit's report, as JSON. Raises UnknownError."""
    arguments = ["--requirement", str(constraints), "--no-deps", "--disable-pip", "--vulnerability-service", "osv"]
    arguments += ["--format", "json", "--progress-spinner", "off", "--timeout", str(REQUEST_TIMEOUT_S)]
    try:
        ended = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=AUDIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnknownError(f"pip-audit did not end within {AUDIT_TIMEOUT_S} s") from None
    # It ends with 1 both when something is found and when it cannot ask: only a report tells the two apart.
    if not ended.stdout.strip():
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        raise UnknownError(f"the advisory service did not answer ({lines[-1].strip() if lines else 'no reason given'})")
    return ended.stdout


def findings(report: str) -> tuple[list[Finding], int]:
    """What a report tells, and about how many dependencies. Raises UnknownError if some of them were not checked."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        raise UnknownError("pip-audit's report cannot be read") from None
    skipped = [dependency["name"] for dependency in dependencies if "skip_reason" in dependency]
    if skipped or not dependencies:
        raise UnknownError(f"not checked: {', '.join(skipped) or 'anything at all'}")
    found = [
        Finding(
            dependency["name"], dependency["version"], advisory["id"], ", ".join(advisory["fix_versions"]) or "none"
        )
        for dependency in dependencies
        for advisory in dependency["vulns"]
    ]
    return found, len(dependencies)


def table(found: Sequence[Finding]) -> list[str]:
    rows = [("package", "version", "advisory", "fixed in")]
    rows += [(one.package, one.version, one.advisory, one.fixed_in) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    if not found:
        return []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
