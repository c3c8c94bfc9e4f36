"""A folder for a server's PYTHONPATH: `FaultFile` here arms it, `sitecustomize.py` commits the fault over there."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent
MARK = "# the test looks for this line in the traceback"


class FaultFile:
    """One server's trigger: nothing happens before `commit`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fault"

    @property
    def env(self) -> dict[str, str]:
        """For the server's environment."""
        search = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": search, "FAULT_FILE": str(self._path)}

    def commit(self, fault: str) -> None:
        """From the next step on: one of `sitecustomize.FAULTS`."""
        scratch = self._path.with_suffix(".new")
        scratch.write_text(fault)
        scratch.rename(self._path)


def line_of_injected_error() -> str:
    """As a traceback writes it: `sitecustomize.py", line N`."""
    lines = (FOLDER / "sitecustomize.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(MARK)]
    return f'sitecustomize.py", line {number}'
