"""How the process ends: its exit codes, and the root cause where an orchestrator looks for it."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from scheduler import logs


class ExitCode(IntEnum):
    """What the process's end means. A second stop signal that cuts streams short is still a clean stop: its owner
    asked for it, twice.
    """

    CLEAN = 0
    BUG = 1
    CONFIGURATION = 2
    COULD_NOT_START = 3
    GAVE_UP = 4


def write_termination_log(path: Path | None, root_cause: str) -> None:
    """Leave the root cause behind; a failure to do so is no reason to fail again."""
    if path is None:
        return
    try:
        path.write_text(root_cause + "\n")
    except OSError as error:
        logs.get_logger().warning("termination log not written", path=str(path), reason=error.strerror)
