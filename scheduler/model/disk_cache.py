"""Where results that later starts may use are kept on disk: $EMBERLINE_CACHE, by default ~/.cache/emberline."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def writable_directory(*names: str) -> Path | None:
    """The folder of these names in the cache, made if need be; None where nothing can be written."""
    try:
        root = Path(os.environ.get("EMBERLINE_CACHE") or "~/.cache/emberline").expanduser()
        directory = root.joinpath(*names)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # the latter: no home
        return None
