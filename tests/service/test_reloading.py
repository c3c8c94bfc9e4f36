"""Values made of files follow the files, and nothing half-written gets in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.errors import ConfigurationError
from service.reloading import Reloading, keep_fresh, read_file
from tests.service.support import CapturedLogs, until


def words(*paths: Path) -> Callable[[], list[str]]:
    """Loads a word of each file; an empty one is no good."""

    def load() -> list[str]:
        loaded = [path.read_text() for path in paths]
        if not all(loaded):
            raise ConfigurationError("one is empty")
        return loaded

    return load


def test_what_has_not_changed_is_not_loaded(tmp_path: Path) -> None:
    """A look at unchanged files costs a stat."""
    path = tmp_path / "a"
    path.write_text("one")
    loads = []

    def load() -> str:
        loads.append(path.read_text())
        return loads[-1]

    value = Reloading("words", [path], load)
    value.poll()
    value.poll()
    assert loads == ["one"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a device without an end: neither is waited for."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    assert read_file(path, 3) == b"1234", "one more, so that it is known to be larger"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for other in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_file(other, 5)


def test_a_change_is_taken_in_whole(tmp_path: Path, log: CapturedLogs) -> None:
    """A rewritten file, a replaced one and a swapped link are all changes; each is logged."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "word").write_text(folder.name)
    link = tmp_path / "data"
    link.symlink_to(folders[0])
    path = tmp_path / "word"
    path.symlink_to(link / "word")  # as Kubernetes mounts secrets: a link by way of a link
    value = Reloading("words", [path], words(path), lambda value: {"num_words": len(value)})
    assert value.value == ["first"]
    swapped = tmp_path / "data.new"
    swapped.symlink_to(folders[1])
    swapped.replace(link)
    value.poll()
    assert value.value == ["second"]
    (folders[1] / "word").write_text("again!")
    value.poll()
    assert value.value == ["again!"]
    replacement = tmp_path / "replacement"
    replacement.write_text("third")
    os.replace(replacement, folders[1] / "word")  # noqa: PTH105 - the act under test
    value.poll()
    assert value.value == ["third"]
    assert [record["num_words"] for record in log.of("words reloaded")] == [1, 1, 1]


def test_what_does_not_load_leaves_the_old_value_and_is_told_once(tmp_path: Path, log: CapturedLogs) -> None:
    """However often it is looked at; the next change is a new chance."""
    path = tmp_path / "a"
    path.write_text("one")
    value = Reloading("words", [path], words(path))
    path.write_text("")
    for _ in range(3):
        value.poll()
    assert value.value == ["one"]
    (told,) = log.of("words not reloaded")
    assert told["reason"] == "one is empty"
    path.unlink()
    path.write_text("two")
    value.poll()
    assert value.value == ["two"]


def test_files_that_change_during_a_load_are_loaded_again(tmp_path: Path, log: CapturedLogs) -> None:
    """One file of before a change and one of after it never make a value, whether the mixture loads or not; nothing is
    told of it, and the next look has both.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("old")
    b.write_text("old")
    in_between: list[Callable[[], object]] = []

    def load() -> list[str]:
        first = a.read_text()
        if in_between:
            in_between.pop()()
        loaded = [first, b.read_text()]
        if "" in loaded:
            raise ConfigurationError("half of it")
        return loaded

    value = Reloading("words", [a, b], load)
    for half in ("new", ""):
        before = value.value
        a.write_text(half or "newest")
        in_between.append(lambda half=half: b.write_text(half or "newest"))  # type: ignore[misc]
        if not half:
            a.write_text("")
            in_between[-1] = lambda: (a.write_text("newest"), b.write_text("newest"))
        value.poll()
        assert value.value == before
        assert not log.of("words not reloaded")
        value.poll()
        assert value.value == [half or "newest"] * 2


def test_files_are_checked_at_the_start(tmp_path: Path) -> None:
    """What is no good to begin with is the caller's to hear."""
    path = tmp_path / "a"
    path.write_text("")
    with pytest.raises(ConfigurationError, match="one is empty"):
        Reloading("words", [path], words(path))


async def test_an_unforeseen_failure_does_not_end_the_watch(tmp_path: Path, log: CapturedLogs) -> None:
    """A look that raises something unknown is logged, without its text, once per change, and the others go on."""
    path = tmp_path / "a"
    path.write_text("one")
    is_broken = False

    def load() -> str:
        if is_broken:
            raise RuntimeError("secret text")
        return path.read_text()

    broken = Reloading("words", [path], load)
    healthy = Reloading("letters", [path], path.read_text)
    is_broken = True
    watch = asyncio.create_task(keep_fresh([broken, healthy], 0.001))
    path.write_text("two!")
    await until(lambda: healthy.value == "two!")
    is_broken = False
    path.write_text("three")
    await until(lambda: broken.value == "three")
    watch.cancel()
    assert len(log.of("internal error")) == 1
    assert "secret text" not in log.text
