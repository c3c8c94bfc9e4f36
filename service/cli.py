"""The server's own commands, `emberline serve` and `emberline autopsy`: parse, run, exit code.

What lives here: the command line and what becomes of a process that does not get as far as its logs. What must not:
anything that costs time before the arguments are known to be good, so grpc is imported only then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from scheduler import logs
from scheduler.errors import ConfigurationError, StartupError
from service import autopsy, crash_report
from service import config as server_config
from service.exit import ExitCode, write_termination_log

if TYPE_CHECKING:
    from service.server import Server

LOG_FLUSH_TIMEOUT_S = 0.5
REPORT_BYTES_MAX = 4 * 1024 * 1024
"""Far above the largest crash report."""
CALLERS_FAULTS = {
    "grpc._cython.cygrpc": (
        "Invalid encoding on ",  # a path or metadata that are no UTF-8
        "builtins.UnicodeDecodeError",  # such a path on grpcio 1.84 and 1.85; the server tells `listener lost`
        "Unexpected [UnicodeDecodeError] raised ",  # the same; of our own methods none ends in an exception
        "ExecuteBatchError raised in core ",  # the caller left, or broke off
        "Failed sending error status from server",
    )
}
"""How messages begin that gRPC logs as errors and any caller can cause as often as it likes; by logger."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage: there are many flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.CONFIGURATION, f"{self.prog}: error: {message} (see --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Once a server has run, does not return: the process ends here."""
    arguments = build_parser().parse_args(argv)
    if arguments.command == "autopsy":
        return _autopsy(arguments.path, as_json=arguments.json)
    return _serve(arguments, os.environ)


def serve(arguments: Sequence[str]) -> int:
    """Run the server."""
    return main(["serve", *arguments])


def examine(arguments: Sequence[str]) -> int:
    """Tell what an engine died of, and what to do."""
    return main(["autopsy", *arguments])


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="emberline", description="Serves a language model over gRPC.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the server",
        description="Runs the server. Each flag can also be set as EMBERLINE_<NAME> in the environment.",
        allow_abbrev=False,
    )
    server_config.add_flags(serve)
    examine = commands.add_parser(
        "autopsy",
        help="tell what an engine died of, and what to do",
        description="Shows a crash report (`--crash-dir` has one for each engine death) on one screen.",
        allow_abbrev=False,
    )
    examine.add_argument("path", type=Path, metavar="PATH", help="the report, or a directory of them: its newest one")
    examine.add_argument("--json", action="store_true", help="the whole report instead, checked and indented")
    return parser


def _autopsy(path: Path, *, as_json: bool) -> int:
    older: list[Path] = []
    try:
        if path.is_dir():
            reports = crash_report.reports_in(path)
            if not reports:
                return _refuse(ExitCode.CONFIGURATION, f"{path}: there is no crash report in this directory")
            path, *older = reports
        with path.open("rb") as file:
            report = autopsy.parse(file.read(REPORT_BYTES_MAX).decode())
    except OSError as error:
        return _refuse(ExitCode.CONFIGURATION, f"{path}: {error.strerror}")
    except UnicodeDecodeError:
        return _refuse(ExitCode.CONFIGURATION, f"{path}: it is no crash report: it is no text")
    except autopsy.NoReportError as error:
        return _refuse(ExitCode.CONFIGURATION, f"{path}: {error}")
    if as_json:
        text = json.dumps(report, indent=2)
    else:
        text = autopsy.render(report, shutil.get_terminal_size((autopsy.COLUMNS_MAX, autopsy.LINES_MAX)).columns)
        if older:
            text += "\n".join(["\nOLDER REPORTS", *(f"  {report}" for report in older)])
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    return ExitCode.CLEAN


def _serve(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    try:
        config = server_config.parse(arguments, environ)
    except ConfigurationError as error:
        return _refuse(ExitCode.CONFIGURATION, error)
    except StartupError as error:
        write_termination_log(server_config.termination_log(arguments, environ), str(error))
        return _refuse(ExitCode.COULD_NOT_START, error)
    # Until the loop's own handlers are there, stopping is simply ending: there is nothing to drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    # The C core writes to stderr by itself, from threads that a blocked stderr would stall.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    writer = logs.configure(config.log_format, config.log_level, process="service", quiet=CALLERS_FAULTS)
    try:
        from service import server  # noqa: PLC0415 - grpc takes long to import

        asyncio.run(_live(server.Server(config), writer))
    except Exception as error:  # noqa: BLE001 - the last boundary of the process
        _report_bug(error)
    return _leave(ExitCode.BUG, writer)  # only an exception comes here


async def _live(server: Server, writer: logs.StderrWriter) -> NoReturn:
    """The server's whole life. The process ends inside the loop: closing the loop would cancel the last calls."""
    try:
        code = await server.run()
    except Exception as error:  # noqa: BLE001 - the last boundary of the process
        _report_bug(error)
        code = ExitCode.BUG
    _leave(code, writer)


def _report_bug(error: Exception) -> None:
    logs.get_logger().critical("internal error", **logs.describe(error))


def _leave(code: ExitCode, writer: logs.StderrWriter) -> NoReturn:
    # A signal in the last moment must not replace the exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    writer.close(LOG_FLUSH_TIMEOUT_S)
    # Leaving through the interpreter would wait for worker threads, which nothing bounds.
    os._exit(code)


def _refuse(code: ExitCode, error: Exception | str) -> int:
    print(f"emberline: error: {error}", file=sys.stderr)  # noqa: T201 - there are no logs yet
    return code
