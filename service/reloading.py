"""Values made of files, made anew when the files change: certificates, tokens.

What lives here: finding out that files have changed, and that they have settled. What must not: what is in them; `load`
is handed in. A value is replaced whole, in one assignment, so whoever reads `value`, from any thread, has all of it.

Files are compared by what `stat` says at the end of their links, so that the swap of a link, as Kubernetes does it, is
a change like any other. A load counts only if the files are the same before and after it: a certificate read before the
swap and a key read after it are no pair. What does not load leaves the old value in force and is told once, not at each
look; the next change is a new chance. Only regular files are read: to open a pipe may block for ever, and with it the
looks at all the others.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from scheduler import logs
from scheduler.errors import ConfigurationError

POLL_INTERVAL_S = 1.0
FIRST_LOADS_MAX = 5
"""Files that change under each of so many loads are not waited for."""

_Value = TypeVar("_Value")
_Stamp = tuple[tuple[int, ...] | None, ...]
_UNSETTLED: _Stamp = ()
"""Unlike any: the next look loads again."""


class Polled(Protocol):
    """What `keep_fresh` looks after."""

    def poll(self) -> None: ...


class Reloading(Generic[_Value]):
    """The latest good value of some files.

    Args:
        what: What they are to people, in the plural.
        paths: All the files.
        load: Reads them; raises ConfigurationError if they are no good.
        describe: What the log tells of a new value.

    Raises:
        ConfigurationError: the files are no good to begin with.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], _Value],
        describe: Callable[[_Value], dict[str, Any]] = lambda _: {},
    ) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._describe = describe
        for _ in range(FIRST_LOADS_MAX):
            self._stamp = self._look()
            self.value = load()
            if self._look() == self._stamp:
                return
        raise ConfigurationError(f"the {what} are being changed all the time")

    def poll(self) -> None:
        """Load what has changed. May block on the files; not for the event loop's thread."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # first: what fails in an unforeseen way must not fail anew at each look
        value, reason = None, ""
        try:
            value = self._load()
        except ConfigurationError as error:
            reason = str(error)
        if self._look() != stamp:
            self._stamp = _UNSETTLED
        elif value is None:
            logs.get_logger().error(f"{self._what} not reloaded", reason=reason, in_force="the old ones")
        else:
            self.value = value
            logs.get_logger().info(f"{self._what} reloaded", **self._describe(value))

    def _look(self) -> _Stamp:
        return tuple(_stat(path) for path in self._paths)


def read_file(path: Path, bytes_max: int) -> bytes:
    """What `load` reads with: the file, or the first bytes beyond `bytes_max` of a larger one. Never waits for
    somebody else. Raises OSError, for whatever is no regular file, too.
    """

    def without_waiting(name: str, flags: int) -> int:
        """To open a pipe is to wait for its other end."""
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(bytes_max + 1)


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


async def keep_fresh(polled: Sequence[Polled], interval_s: float = POLL_INTERVAL_S) -> None:
    """Look at the files for ever, off the loop. A look that fails in a way nobody foresaw is told, and the next one
    comes all the same.
    """
    while polled:
        await asyncio.sleep(interval_s)
        for one in polled:
            try:
                await asyncio.to_thread(one.poll)
            except Exception as error:  # noqa: BLE001 - a renewal that stops in silence is an outage weeks later
                logs.get_logger().error("internal error", **logs.describe(error))
