"""A folder for a server's PYTHONPATH: `Clock` here sets the wall clock that `sitecustomize.py` shows over there."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


class Clock:
    """The wall clock of one server's processes, as their Python code reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "step"

    @property
    def env(self) -> dict[str, str]:
        """For the server's environment."""
        search = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": search, "CLOCK_FOLDER": str(self._folder)}

    def step(self, seconds: float) -> None:
        """From now on the clock is off by so much."""
        scratch = self._path.with_suffix(".new")
        scratch.write_text(str(seconds))
        scratch.rename(self._path)

    def pids(self) -> set[int]:
        """The processes whose clock this is."""
        return {int(path.name.removeprefix("pid-")) for path in self._folder.glob("pid-*")}
