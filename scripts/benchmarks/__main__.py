"""The commands' flags. Exit status: 0 with figures, 1 without (a line on stderr says why), 2 for wrong flags."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks import death, limits, serve
from scripts.benchmarks.errors import BenchmarkError

CONCURRENCY_MAX = 4096
REQUESTS_MAX = 100_000


def main(arguments: list[str]) -> int:
    own, server_flags = split(arguments)
    options = parser().parse_args(own)
    if getattr(options, "address", None) is not None and server_flags:
        parser().error("flags after -- are for a server that is started here; --address names one that runs")
    try:
        asyncio.run(_until_terminated(options, server_flags))
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("bench: interrupted", file=sys.stderr)
        return 1
    return 0


async def _until_terminated(options: argparse.Namespace, server_flags: list[str]) -> None:
    """SIGTERM ends it as Ctrl-C does: with the server it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await options.run(options, server_flags)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what stands after `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures a server that it starts itself, or one that runs on this machine.",
        epilog="Flags after -- go to `scripts/serve`. docs/benchmarks.md defines every figure.",
    )
    commands = top.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("serve", help="throughput and latency of a seeded closed loop")
    command.set_defaults(run=serve.run)
    command.add_argument("--address", help="a running server, on loopback; without it, one is started")
    command.add_argument("--requests", type=count(REQUESTS_MAX), default=96, metavar="N", help="at each concurrency")
    command.add_argument("--concurrency", type=count(CONCURRENCY_MAX), nargs="+", default=[1, 8, 32], metavar="N")
    for flag, default in (("--prompt-tokens", (16, 512)), ("--output-tokens", (16, 256))):
        command.add_argument(
            flag,
            type=count(1 << 20),
            nargs=2,
            default=default,
            action=Bounds,
            metavar=("MIN", "MAX"),
            help="log-uniform",
        )
    command.add_argument("--time-limit-s", type=seconds, default=1800.0, metavar="S", help="of each concurrency")
    _add_common(command, "JSON; the plot goes beside it as .png")

    command = commands.add_parser("death", help="latency from an engine's SIGKILL to the end of its streams")
    command.set_defaults(run=death.run)
    command.add_argument("--streams", type=count(CONCURRENCY_MAX), nargs="+", default=[3, 93], metavar="N")
    command.add_argument("--repeat", type=count(1000), default=10, metavar="R", help="fresh servers for each N")
    _add_common(command, "JSON")

    command = commands.add_parser("limits", help="what a refusal costs, and a crowd, and readers that stall")
    command.set_defaults(run=limits.run)
    command.add_argument("--parts", nargs="+", choices=limits.PARTS, default=list(limits.PARTS))
    command.add_argument("--calls", type=count(REQUESTS_MAX), default=5000, metavar="N", help="at once, and refused")
    command.add_argument("--stalled", type=count(1024), default=50, metavar="N", help="readers that do not read")
    command.add_argument("--readers", type=count(1024), default=8, metavar="N", help="readers beside them")
    command.add_argument("--reader-tokens", type=count(1 << 20), default=192, metavar="N", help="of each reader")
    _add_common(command, "JSON")
    return top


def _add_common(command: argparse.ArgumentParser, output: str) -> None:
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--start-limit-s", type=seconds, default=600.0, metavar="S", help="for a server to serve")
    command.add_argument("--output", type=json_path, metavar="FILE.json", help=output)


class Bounds(argparse.Action):
    """Two numbers in order."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, list)
        if values[0] > values[1]:
            parser.error(f"{option_string}: {values[0]} is more than {values[1]}")
        setattr(namespace, self.dest, tuple(values))


def count(most: int) -> Callable[[str], int]:
    """A parser of integers in [1, most]."""

    def parse(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not in [1, {most}]")
        return value

    return parse


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not within a day")
    return value


def json_path(text: str) -> Path:
    """Checked before the run, not after it."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text} does not end in .json")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
