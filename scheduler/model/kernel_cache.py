"""Functions that numba compiles, kept on disk from one start to the next.

What must live here: the folder and what happens when it is damaged. What must not: what is compiled.

Compiled code is kept under $EMBERLINE_CACHE/numba (default ~/.cache/emberline/numba), in a folder named after the
sources it comes from; inside, numba keys it by its own version and by the processor. A damaged cache is thrown away.
Where nothing can be written, each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

from scheduler.model import disk_cache

logger = logging.getLogger(__name__)

Build = Callable[[bool], tuple[Any, ...]]
"""Makes numba's functions; told whether they may be cached."""


def compiled(build: Build, directory: Path | None) -> tuple[Any, ...]:
    """What `build` makes, compiled, or loaded from `directory`."""
    if directory is None:
        return build(False)
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(directory)
        return build(True)
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything; our own bugs raise again below
        logger.warning("compiled kernels could not be cached in %s (%s)", directory, type(error).__name__)
        shutil.rmtree(directory, ignore_errors=True)
        return build(False)
    finally:
        numba.config.CACHE_DIR = before


def directory_of(sources: Sequence[ModuleType]) -> Path | None:
    """A writable folder for code made from these modules, or None."""
    text = b"".join(Path(module.__file__).read_bytes() for module in sources if module.__file__)
    return disk_cache.writable_directory("numba", hashlib.sha256(text).hexdigest()[:16])
