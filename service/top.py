"""`emberline top`: what servers are doing, live in the terminal, over the public rpcs alone.

What must live here: polling, rates, the frame. What must not: anything that only this machine could know, so that it
shows the same from anywhere. `look` asks, `Sample` keeps what was said, `frame` draws two of them; a server that goes
away is shown as such, and found again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from emberline.client import AsyncClient, EmberlineError
from emberline.client.connection import Connection
from emberline.commands import connect
from emberline.commands import exit as status
from emberline.v1 import info_pb2

TIMEOUT_S = 3.0
"""Of one question; a server that takes longer is shown as silent."""
INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 3600.0
BAR_CELLS = 24
_NOTHING = "–"
_STATE_STYLES = {
    "READY": "green",
    "STARTING": "yellow",
    "SUSPECT": "bold yellow",
    "DEAD": "bold red",
    "BACKOFF": "red",
    "FAILED": "bold red",
    "STOPPING": "cyan",
}
_HEALTH_STYLES = {"SERVING": "green", "NOT_SERVING": "red"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one server said at one moment."""

    at_s: float
    """Monotonic."""
    server: info_pb2.GetServerInfoResponse
    load: info_pb2.GetLoadResponse
    health: str


@dataclass(frozen=True, slots=True)
class Silence:
    """That one server said nothing, and why."""

    reason: str


@dataclass(slots=True)
class Server:
    """One server and the last two things it said."""

    address: str
    client: AsyncClient
    now: Sample | Silence | None = None
    before: Sample | None = None

    async def look(self) -> None:
        """Ask it once. Never raises for what a server may do."""
        last = self.now if isinstance(self.now, Sample) else None
        try:
            server, load, health = await asyncio.gather(
                self.client.server_info(timeout_s=TIMEOUT_S),
                self.client.load(timeout_s=TIMEOUT_S),
                self.client.health(timeout_s=TIMEOUT_S),
            )
        except (EmberlineError, OSError, ValueError) as error:  # the last two: its token's file
            self.now, self.before = Silence(str(error)), None
            return
        self.now, self.before = Sample(time.monotonic(), server, load, health), last


def run(arguments: Sequence[str]) -> int:
    """Watch engines, streams, tokens/s, KV, queue and deaths, live."""
    options = _parser().parse_args(arguments)
    try:
        settings = connect.settings(options)
        addresses = Connection(**settings).addresses()
        settings.pop("target")
        servers = [Server(address, AsyncClient(address, attempts_max=1, **settings)) for address in addresses]
    except (OSError, ValueError) as error:
        connect.complain(str(error))
        return status.USAGE
    try:
        return asyncio.run(_watch(servers, options.interval, once=options.once))
    except KeyboardInterrupt:
        return status.DONE


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """As with the other commands, not by an exit status of its own."""
        raise BrokenPipeError


async def _watch(servers: Sequence[Server], interval_s: float, *, once: bool) -> int:
    console = _Console()
    try:
        await _look(servers)
        if once:
            await asyncio.sleep(interval_s)  # a rate takes two looks
            await _look(servers)
            console.print(frame(servers))
            return status.DONE if any(isinstance(one.now, Sample) for one in servers) else status.UNREACHABLE
        while not console.is_terminal:  # one frame after another: what is drawn over would come at the end alone
            console.print(frame(servers))
            await asyncio.sleep(interval_s)
            await _look(servers)
        with Live(frame(servers), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                await _look(servers)
                live.update(frame(servers), refresh=True)
    finally:
        for server in servers:
            await server.client.close()


async def _look(servers: Sequence[Server]) -> None:
    await asyncio.gather(*(server.look() for server in servers))


def frame(servers: Sequence[Server]) -> RenderableType:
    """All servers, one below the other."""
    return Group(*(_panel(server) for server in servers))


def _panel(server: Server) -> Panel:
    now = server.now
    if not isinstance(now, Sample):
        reason = "asking …" if now is None else now.reason
        return Panel(Text(reason, style="red"), title=escape(server.address), title_align="left", border_style="red")
    style = _HEALTH_STYLES.get(now.health, "yellow")
    uptime = duration(now.server.uptime.seconds)
    title = f"{escape(server.address)}  [{style}]{now.health}[/]  {escape(now.server.version)}  up {uptime}"
    return Panel(Group(_summary(now, server.before), _engines(now, server.before)), title=title, title_align="left")


def _summary(now: Sample, before: Sample | None) -> Table:
    load = now.load
    table = Table.grid(padding=(0, 2))
    deaths = sum(engine.deaths for engine in now.server.engines)
    rate = tokens_per_s(
        None if before is None else (before.at_s, before.load.generated_tokens_total),
        (now.at_s, load.generated_tokens_total),
    )
    table.add_row(
        f"calls [bold]{load.live_calls}[/]",
        f"running [bold]{load.running}[/]",
        f"waiting [bold]{load.waiting}[/] ({load.waiting_tokens} tokens)",
        f"tokens/s [bold]{rate}[/]",
        f"deaths [{'bold red' if deaths else 'bold'}]{deaths}[/]",
    )
    used, total = load.kv_blocks_used, load.kv_blocks_total
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(f"KV {bar(used, total)} {used}/{total} blocks  preemptions {load.preemptions_total}")
    return grid


def _engines(now: Sample, before: Sample | None) -> RenderableType:
    """A row for each engine, within 80 columns; deaths have lines of their own, for their ids are long."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("engine", "state", "pid", "on"):
        table.add_column(name, no_wrap=True)
    for name in ("open", "run", "wait", "KV", "tokens/s", "step", "deaths"):
        table.add_column(name, justify="right", no_wrap=True)
    deaths = []
    earlier = {} if before is None else {engine.index: engine for engine in before.server.engines}
    for engine in now.server.engines:
        state = info_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_")
        load, last = engine.load, earlier.get(engine.index)
        serves = engine.HasField("load")
        same = last is not None and last.pid == engine.pid and last.HasField("load")
        rate = tokens_per_s(
            (before.at_s, last.load.generated_tokens_total)
            if same and before is not None and last is not None
            else None,
            (now.at_s, load.generated_tokens_total),
        )
        cells = [
            str(load.streams),
            str(load.running),
            str(load.waiting),
            f"{load.kv_blocks_used / max(engine.num_kv_blocks, 1):.0%}",
            rate,
            f"{load.step.ToNanoseconds() / 1e6:.0f} ms",
        ]
        table.add_row(
            str(engine.index),
            Text(state, style=_STATE_STYLES.get(state, "")),
            str(engine.pid) if engine.pid else _NOTHING,
            Text(engine.device or _NOTHING),
            *(cells if serves else [_NOTHING] * len(cells)),
            Text(str(engine.deaths), style="red" if engine.deaths else ""),
        )
        if engine.last_death_id:
            deaths.append(Text(f"engine {engine.index} last died as {engine.last_death_id}", style="red"))
    return Group(table, *deaths)


def tokens_per_s(before: tuple[float, int] | None, now: tuple[float, int]) -> str:
    """From two readings (moment, total); a dash where there is no earlier one, or a counter has begun anew."""
    if before is None or now[0] <= before[0] or now[1] < before[1]:
        return _NOTHING
    return f"{(now[1] - before[1]) / (now[0] - before[0]):.1f}"


def bar(used: int, total: int) -> str:
    """A share, as a line of cells."""
    full = round(BAR_CELLS * used / total) if total else 0
    return "█" * full + "░" * (BAR_CELLS - full)


def duration(seconds: int) -> str:
    """In its two largest units."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _interval(text: str) -> float:
    value = float(text)
    if not INTERVAL_S_MIN <= value <= INTERVAL_S_MAX:
        raise argparse.ArgumentTypeError(f"must be in [{INTERVAL_S_MIN:g}, {INTERVAL_S_MAX:g}]")
    return value


def _parser() -> connect.Parser:
    parser = connect.Parser(
        prog="emberline top",
        description="Engines and their states, streams, tokens per second, KV, queue and deaths; Ctrl-C ends it.",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end; status 2 if no server answers")
    parser.add_argument(
        "--interval",
        type=_interval,
        default=INTERVAL_S,
        metavar="S",
        help="seconds between two looks (default: %(default)g)",
    )
    connect.add_flags(parser)
    return parser
