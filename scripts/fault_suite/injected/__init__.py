"""A folder for the PYTHONPATH of a server: `Triggers` here arms it, `sitecustomize.py` commits the fault over there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Triggers:
    """One server's files. Nothing happens before one is written."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For the server."""
        return {"PYTHONPATH": str(FOLDER), "CHAOS_FOLDER": str(self.folder)}

    def commit(self, place: str, action: str) -> None:
        """Once, by whichever process of the server comes to that place first."""
        (self.folder / f"done-{place}").unlink(missing_ok=True)
        self._write(f"once-{place}", action)

    def is_done(self, place: str) -> bool:
        """Whether some process has come to it."""
        return (self.folder / f"done-{place}").exists()

    def disarm(self, place: str) -> None:
        """Whatever was not committed is not committed any more."""
        (self.folder / f"once-{place}").unlink(missing_ok=True)

    def poison(self, token_id: int, action: str) -> None:
        """From now on each step does this that computes a sequence with this token in its prompt."""
        self._write("poison", json.dumps({"token_id": token_id, "action": action}))

    def cure(self) -> None:
        """The end of `poison`."""
        (self.folder / "poison").unlink(missing_ok=True)

    def step_clock(self, seconds: float) -> None:
        """From now on the wall clock of the server's processes is off by so much; 0 is the end of it."""
        if seconds:
            self._write("clock", str(seconds))
        else:
            (self.folder / "clock").unlink(missing_ok=True)

    def missing(self) -> list[str]:
        """Places that the server's code does not have: the fault would never come, and nothing would be proved."""
        return sorted(path.name.removeprefix("missing-") for path in self.folder.glob("missing-*"))

    def _write(self, name: str, text: str) -> None:
        scratch = self.folder / f".{name}.new"
        scratch.write_text(text, encoding="utf-8")
        scratch.rename(self.folder / name)
