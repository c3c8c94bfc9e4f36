"""The commands' flags. Exit status: 0 all as it may be, 1 violations (or figures missed), 2 wrong flags."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks import report
from scripts.benchmarks.__main__ import count, json_path
from scripts.benchmarks.errors import BenchmarkError
from scripts.fault_suite import faults, figures, scenarios, soak
from scripts.fault_suite.arena import Outcome, as_json

FAULTS_MAX = 10_000
STREAMS_MAX = 1_000_000
MINUTES_MAX = 24 * 60
VIOLATIONS_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        return asyncio.run(_until_terminated(options))
    except KeyboardInterrupt:
        print("chaos: interrupted", file=sys.stderr)
        return 1


async def _until_terminated(options: argparse.Namespace) -> int:
    """SIGTERM ends it as Ctrl-C does: with the servers it has started."""
    task = asyncio.ensure_future(options.command(options))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancel("terminated"))
    try:
        status: int = await task
    except asyncio.CancelledError as error:
        if error.args != ("terminated",):
            raise
        print("chaos: terminated", file=sys.stderr)
        return 1
    return status


async def _run(options: argparse.Namespace) -> int:
    settings = scenarios.Options(
        seed=options.seed,
        num_faults=options.faults,
        num_streams=options.streams,
        num_asks=options.asks,
        num_clients=options.clients,
        only=tuple(options.fault or ()),
        standby=not options.cold,
        logs=options.logs,
    )
    outcomes = []
    for name in options.scenario or list(scenarios.SCENARIOS):
        print(f"{name} …", flush=True)
        outcomes.append(await scenarios.play(name, settings))
        show_violations(outcomes[-1])
    print(scenario_table(outcomes))
    _write(options.json, "chaos run", {"seed": options.seed, "scenarios": [as_json(one) for one in outcomes]})
    return 1 if any(one.violations for one in outcomes) else 0


async def _figures(options: argparse.Namespace) -> int:
    chosen = options.figure or list(figures.FIGURES)
    settings = scenarios.Options(
        seed=options.seed,
        num_faults=options.faults,
        num_streams=options.streams,
        logs=options.logs,
        soak_s=options.soak_minutes * 60.0,
    )
    rows: list[figures.Figure] = []
    for name in chosen:
        print(f"{name} …", flush=True)
        began_s, num_before = time.monotonic(), len(rows)
        try:
            rows += await figures.FIGURES[name](settings)
        except BenchmarkError as error:
            print(f"  {name}: {error}", flush=True)
            rows.append(figures.Figure(name, "", "broken off", is_reached=False, details={"why": str(error)}))
        for row in rows[num_before:]:
            print(f"  {row.name}: {row.measured}")
        print(f"  {time.monotonic() - began_s:.0f} s", flush=True)
    print(figures.table(rows))
    _write(options.json, "chaos figures", {"seed": options.seed, "figures": [figures.as_json(row) for row in rows]})
    return 0 if all(row.is_reached is not False for row in rows) else 1


async def _soak(options: argparse.Namespace) -> int:
    outcome = await soak.soak(options.seed, options.minutes * 60.0)
    show_violations(outcome)
    print(scenario_table([outcome]))
    for name, value in outcome.figures.items():
        print(f"{name}: {value}")
    _write(options.json, "chaos soak", {"seed": options.seed, "minutes": options.minutes, "soak": as_json(outcome)})
    return 1 if outcome.violations else 0


async def _list(_: argparse.Namespace) -> int:
    rows = [
        [fault.name, fault.kind, _span(fault.deaths_min, fault.deaths_max), str(fault.num_spoiled_max), fault.what]
        for fault in faults.CATALOGUE
    ]
    print(report.table(["fault", "kind", "deaths", "spoiled", "what is done"], rows))
    print("\nscenarios:")
    for name, scenario in scenarios.SCENARIOS.items():
        print(f"  {name}: {' '.join((scenario.__doc__ or '').split())}")
    return 0


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def show_violations(outcome: Outcome) -> None:
    """The first ones; the JSON has all."""
    for violation in outcome.violations[:VIOLATIONS_SHOWN]:
        print(f"  {outcome.scenario}: {violation.kind}: {violation.detail}", flush=True)
    if len(outcome.violations) > VIOLATIONS_SHOWN:
        print(f"  … and {len(outcome.violations) - VIOLATIONS_SHOWN} more", flush=True)


def scenario_table(outcomes: Sequence[Outcome]) -> str:
    """One line each."""
    header = [
        "scenario",
        "faults",
        "deaths",
        "streams",
        "exact",
        "near-tie",
        "cut",
        "refused",
        "hung",
        "violations",
        "seconds",
    ]
    rows = [
        [
            one.scenario,
            *(
                str(number)
                for number in (
                    one.faults.total(),
                    one.num_deaths,
                    one.num_streams,
                    one.num_exact,
                    one.num_near_ties,
                    one.num_cut,
                    one.num_refused,
                    one.num_hung,
                    len(one.violations),
                )
            ),
            f"{one.wall_s:.0f}",
        ]
        for one in outcomes
    ]
    return report.table(header, rows)


def _write(path: Path | None, name: str, body: dict[str, Any]) -> None:
    if path is not None:
        report.write_json(path, report.document(name, body))
        print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Faults against a real server under load, and a judge of what its clients saw.",
        epilog="docs/reliability.md tells what is allowed, and keeps the figures.",
    )
    commands = top.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("run", help="scenarios, each on servers of its own")
    command.set_defaults(command=_run)
    command.add_argument(
        "--scenario", nargs="+", choices=list(scenarios.SCENARIOS), metavar="NAME", help="default: all"
    )
    names = [one.name for one in faults.CATALOGUE]
    command.add_argument("--fault", nargs="+", choices=names, metavar="NAME", help="of storms: these only, in turn")
    command.add_argument("--asks", type=count(4096), default=96, metavar="N", help="different requests")
    command.add_argument("--clients", type=count(256), default=12, metavar="N", help="streams at a time")
    command.add_argument("--cold", action="store_true", help="the storm without a standby")
    _add_sizes(command)

    command = commands.add_parser("figures", help="the table of docs/reliability.md")
    command.set_defaults(command=_figures)
    command.add_argument("--figure", nargs="+", choices=list(figures.FIGURES), metavar="NAME", help="default: all")
    command.add_argument("--soak-minutes", type=int, choices=range(MINUTES_MAX + 1), default=0, metavar="M", help="of "
                         "the figure that takes an hour; 0 leaves it out")  # fmt: skip
    _add_sizes(command)

    command = commands.add_parser("soak", help="saturated, with other load on the cores: false deaths, transitions")
    command.set_defaults(command=_soak)
    command.add_argument("--minutes", type=count(MINUTES_MAX), default=60, metavar="M")
    _add_common(command)

    command = commands.add_parser("list", help="the catalogue of faults, and the scenarios")
    command.set_defaults(command=_list)
    return top


def _add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    command.add_argument("--faults", type=count(FAULTS_MAX), default=100, metavar="N", help="of a storm")
    command.add_argument("--streams", type=count(STREAMS_MAX), default=1000, metavar="N", help="of a storm, at least")
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", type=json_path, metavar="FILE.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
