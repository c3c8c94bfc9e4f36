"""The script `emberline`: finds the command that is meant and hands the rest of the line to it.

What must live here: the dispatch. What must not: any command, any import that takes time; a command is loaded when it
is asked for. A command is a callable of an entry point in the group `emberline.commands`: it takes the arguments after
its name and returns the exit status; the first line of its docstring is its help.

What every command has to do with its three streams is done here, too: one that was closed at the start is the null
device (or the next socket would get its number, and what is written to it), an answer is in whatever characters there
are, and a stream that breaks later ends the command with a line, not with a traceback.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version

from emberline.commands.exit import FAILED, INTERRUPTED, PIPE_CLOSED, USAGE

GROUP = "emberline.commands"
USAGE_LINE = "usage: emberline COMMAND [ARGUMENTS]   (emberline COMMAND --help tells of each)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    _settle_streams()
    # gRPC's core writes to stderr by itself, such as a line for each connection that a stopping server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = _dispatch(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # what cannot be written is to be found out here, not at the interpreter's end
    except KeyboardInterrupt:  # while it was being loaded; after that a command has its own idea of it
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return PIPE_CLOSED
    except OSError as error:
        _give_up_stdout()
        print(f"emberline: error: {error.strerror or error}", file=sys.stderr)
        return FAILED
    return status


def _dispatch(arguments: Sequence[str]) -> int:
    name, *rest = arguments or [""]
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


def _settle_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _give_up_stdout() -> None:
    """What the interpreter still has to flush goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help(commands: dict[str, EntryPoint]) -> str:
    lines = [USAGE_LINE, ""]
    lines += [f"  {name:<10} {_summary(commands[name])}" for name in sorted(commands)]
    return "\n".join(lines)


def _summary(command: EntryPoint) -> str:
    return (inspect.getdoc(command.load()) or "").partition("\n")[0].rstrip(".")
