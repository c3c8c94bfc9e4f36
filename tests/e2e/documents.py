"""Runs a guide of `docs/` as a reader would: block by block, in one shell, in an empty folder.

In a guide, each fenced block marked `sh` is run, in order, by one bash (so that variables and background jobs live on);
a block of any other language is a file if a comment `<!-- file: NAME -->` stands before it, and otherwise only read.
`<!-- shows: REGEX -->` before an `sh` block says what its output must hold, `<!-- fails: STATUS -->` how its last
command must end; any other command that fails ends the guide. Ports that the guide names are exchanged for free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import ROOT, buf_path, grpcurl_path

GUIDE_TIMEOUT_S = 280.0
_PART = re.compile(r"^<!--\s*(?P<name>[a-z]+):\s*(?P<value>.*?)\s*-->$|^```(?P<language>\w*)$", re.MULTILINE)
_MARK = "======== block"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a guide, and what the comments before it say."""

    line: int
    language: str
    text: str
    notes: Mapping[str, str]


def blocks(document: str) -> Iterator[Block]:
    """All fenced blocks of a Markdown text, in order."""
    notes: dict[str, str] = {}
    position = 0
    while match := _PART.search(document, position):
        position = match.end()
        if match["name"]:
            notes[match["name"]] = match["value"]
            continue
        end = document.index("\n```", position)
        line = document.count("\n", 0, match.start()) + 1
        yield Block(line, match["language"], document[position + 1 : end + 1], notes)
        notes, position = {}, end + 4


def run_guide(guide: Path, folder: Path, ports: Mapping[int, int], env: Mapping[str, str] | None = None) -> None:
    """Raises AssertionError with the block and its output where the guide does not hold."""
    text = guide.read_text()
    for written, real in ports.items():
        text = re.sub(rf"\b{written}\b", str(real), text)
    shell = []
    for block in blocks(text):
        if block.language == "sh":
            shell.append(block)
        elif name := block.notes.get("file"):
            (folder / name).write_text(block.text)
    output = _run(shell, folder, dict(env or {}))
    for block in shell:
        if wanted := block.notes.get("shows"):
            shown = output[block.line]
            assert re.search(wanted, shown, re.DOTALL), f"{guide.name}:{block.line} does not show {wanted!r}:\n{shown}"


def _run(shell: Sequence[Block], folder: Path, env: Mapping[str, str]) -> dict[int, str]:
    """What each block printed, by its line."""
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for block in shell:
        script.append(f"printf '\\n%s\\n' {shlex.quote(f'{_MARK} {block.line}')}")  # an output may end within a line
        if status := block.notes.get("fails"):
            *before, last = re.split(r"(?<!\\)\n", block.text.rstrip("\n"))  # a backslash joins lines
            script += [*before, "status=0", f"{last} || status=$?", f"[[ $status == {status} ]]"]
        else:
            script.append(block.text)
    paths = [str(ROOT / ".venv" / "bin"), str(grpcurl_path().parent), str(buf_path().parent), os.environ["PATH"]]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EMBERLINE_")},
        **{name: value for name, value in os.environ.items() if name == "EMBERLINE_CACHE"},
        "PATH": os.pathsep.join(paths),
        **env,
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GUIDE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode} in the block of the last mark:\n{done.stdout[-6000:]}"
    parts = re.split(rf"^{_MARK} (\d+)\n", done.stdout, flags=re.MULTILINE)
    return {int(line): shown for line, shown in zip(parts[1::2], parts[2::2], strict=True)}


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
