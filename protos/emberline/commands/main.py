"""The script `emberline`: finds the command that is meant and hands the rest of the line to it.

What must live here: the dispatch. What must not: any command, any import that takes time; a command is loaded when it
is asked for. A command is a callable of an entry point in the group `emberline.commands`: it takes the arguments after
its name and returns the exit status; the first line of its docstring is its help.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version

from emberline.commands.exit import USAGE

GROUP = "emberline.commands"
USAGE_LINE = "usage: emberline COMMAND [ARGUMENTS]   (emberline COMMAND --help tells of each)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    # gRPC's core writes to stderr by itself, such as a line for each connection that a stopping server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    commands = {entry_point.name: entry_point for entry_point in entry_points(group=GROUP)}
    match name:
        case "-h" | "--help":
            print(_help(commands))
            return 0
        case "--version":
            print(f"emberline {version('emberline')}")
            return 0
        case "":
            print(_help(commands), file=sys.stderr)
            return USAGE
    if name not in commands:
        known = ", ".join(sorted(commands))
        print(f"emberline: error: no such command: {name!r} (there are: {known})", file=sys.stderr)
        return USAGE
    return int(commands[name].load()(rest))


def _help(commands: dict[str, EntryPoint]) -> str:
    lines = [USAGE_LINE, ""]
    lines += [f"  {name:<10} {_summary(commands[name])}" for name in sorted(commands)]
    return "\n".join(lines)


def _summary(command: EntryPoint) -> str:
    return (inspect.getdoc(command.load()) or "").partition("\n")[0].rstrip(".")
