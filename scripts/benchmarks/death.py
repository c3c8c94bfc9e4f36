"""`scripts/bench death`: how long streams outlive their engine.

Each round has a fresh server and N streams with more tokens to come than the round lasts. When each has had a token,
the engine gets SIGKILL; a stream's latency is from just before the signal to when the client has its status in hand.
Streams beyond `--max-num-seqs` wait in a queue and have no token: the death finds them waiting, and the column `begun`
tells how many are not among them. Nothing is asserted of the latency. A stream that has not ended after HANG_LIMIT_S
does fail the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from emberline.v1 import info_pb2
from scripts.benchmarks import report, workload
from scripts.benchmarks.emberline_client import EmberlineClient, connect
from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Distribution, distribution
from scripts.benchmarks.server import Server, own_server
from scripts.benchmarks.workload import Request, Workload

PROMPT_TOKENS = 16
BEGIN_LIMIT_S = 60.0
"""For streams to have their first tokens."""
QUIET_S = 3.0
"""After so long without another stream's first token, the rest is taken to wait in the queue."""
HANG_LIMIT_S = 60.0
EXIT_LIMIT_S = 10.0
POLL_S = 0.02


@dataclass(slots=True)
class Victim:
    """One stream, as far as it got."""

    num_tokens: int = 0
    ended_s: float = 0.0
    ending: str = ""
    """Its status, with the reason and the death it names."""
    death_id: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """One engine's death."""

    num_streams: int
    num_begun: int
    """Streams that had had a token when the engine died."""
    latencies_s: list[float]
    """Of every stream, in the order they were opened."""
    endings: dict[str, int]
    num_death_ids: int
    num_fatal_errors: int
    """Records `fatal error` in the server's log."""
    exit_status: int | None
    """The server's; None if it went on."""
    exit_after_s: float | None
    """From the signal to the server's end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all rounds with the same number of streams."""

    num_streams: int
    num_rounds: int
    last_stream: Distribution
    """The latency of each round's last stream."""
    every_stream: Distribution
    server_exit: Distribution | None
    endings: dict[str, int]


async def run(options: argparse.Namespace, server_flags: Sequence[str]) -> None:
    # The end of a server that gives up is a figure, too; a flag of the caller's own comes later and counts.
    server_flags = ["--max-engine-restarts=0", *server_flags]
    rounds: list[Round] = []
    for num_streams in options.streams:
        for number in range(options.repeat):
            print(f"{num_streams} streams, round {number + 1} of {options.repeat} …", flush=True)
            label = f"death {num_streams} {number}"
            async with own_server(server_flags, options.start_limit_s) as server, connect(server.address) as client:
                rounds.append(await _round(server, client, num_streams, options.seed, label))
    print(_table(rounds))
    if options.output is not None:
        body = {
            "workload": {"seed": options.seed, "prompt_tokens": PROMPT_TOKENS, "rounds_each": options.repeat},
            "server": {"kind": "emberline", "flags": list(server_flags)},
            "figures": [asdict(_figures(some)) for some in _by_streams(rounds)],
            "rounds": [asdict(one) for one in rounds],
        }
        report.write_json(options.output, report.document("death", body))
        print(f"written: {options.output}")


async def _round(server: Server, client: EmberlineClient, num_streams: int, seed: int, label: str) -> Round:
    requests = _requests(await client.model(), num_streams, seed, label)
    victims = [Victim() for _ in requests]
    tasks = [asyncio.ensure_future(_stream(client, *pair)) for pair in zip(requests, victims, strict=True)]
    try:
        await _begin(victims)
        pids = [engine.pid for engine in (await client.server()).engines if engine.pid]
        if not pids:
            raise BenchmarkError("the server names no engine process")
        num_begun = sum(victim.num_tokens > 0 for victim in victims)
        killed_s = server.kill_engines(pids)
        _, hanging = await asyncio.wait(tasks, timeout=HANG_LIMIT_S)
        if hanging:
            raise BenchmarkError(
                f"{len(hanging)} of {num_streams} streams still open {HANG_LIMIT_S:g} s after the death"
            )
        for task in tasks:
            task.result()
        exit_status = await server.wait(EXIT_LIMIT_S)
        exit_after_s = None if exit_status is None else time.perf_counter() - killed_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    # Streams that ended before the signal have no latency; they show among the endings.
    latencies_s = [victim.ended_s - killed_s for victim in victims if victim.ended_s > killed_s]
    if not latencies_s:
        raise BenchmarkError("all streams had ended before the engine died")
    return Round(
        num_streams=num_streams,
        num_begun=num_begun,
        latencies_s=latencies_s,
        endings=dict(Counter(victim.ending for victim in victims)),
        num_death_ids=len({victim.death_id for victim in victims}),
        num_fatal_errors=server.events["fatal error"],
        exit_status=exit_status,
        exit_after_s=exit_after_s,
    )


def _requests(model: info_pb2.GetModelInfoResponse, num_streams: int, seed: int, label: str) -> list[Request]:
    """Short prompts, so that all begin soon, and the longest outputs the server allows."""
    num_output_tokens = min(model.limits.max_output_tokens, model.limits.max_model_len - PROMPT_TOKENS)
    load = Workload(seed, num_streams, PROMPT_TOKENS, PROMPT_TOKENS, num_output_tokens, num_output_tokens)
    return workload.requests(load, label, workload.plain_ids(model.vocab_size), avoid=model.eos_token_ids)


async def _stream(client: EmberlineClient, request: Request, victim: Victim) -> None:
    try:
        async for response in client.generate(request):
            victim.num_tokens += len(response.tokens)
    except grpc.aio.AioRpcError as error:
        victim.ended_s = time.perf_counter()
        victim.ending, victim.death_id = ending(error)
    else:
        victim.ended_s = time.perf_counter()
        victim.ending = "OK"


def ending(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """The status and its ErrorInfo's reason, and the `death_id`; empty where there is none."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return f"{error.code().name} {info.reason}".rstrip(), info.metadata["death_id"] if info.metadata else ""


async def _begin(victims: Sequence[Victim]) -> None:
    """Until all have had a token, or no other one has for QUIET_S. Raises BenchmarkError if none has in time."""
    num_begun, since_s = 0, time.perf_counter()
    for _ in range(int(BEGIN_LIMIT_S / POLL_S)):
        now = sum(victim.num_tokens > 0 for victim in victims)
        if now > num_begun:
            num_begun, since_s = now, time.perf_counter()
        if num_begun == len(victims) or (num_begun and time.perf_counter() - since_s > QUIET_S):
            return
        ended = Counter(victim.ending for victim in victims if victim.ending)
        if ended:
            raise BenchmarkError(f"streams ended before their engine did: {dict(ended)}")
        await asyncio.sleep(POLL_S)
    if not num_begun:
        raise BenchmarkError(f"no stream had a token within {BEGIN_LIMIT_S:g} s")


def _by_streams(rounds: Sequence[Round]) -> list[list[Round]]:
    counts = dict.fromkeys(one.num_streams for one in rounds)
    return [[one for one in rounds if one.num_streams == count] for count in counts]


def _figures(rounds: Sequence[Round]) -> Figures:
    endings: Counter[str] = Counter()
    for one in rounds:
        endings.update(one.endings)
    exits = [one.exit_after_s for one in rounds if one.exit_after_s is not None]
    return Figures(
        num_streams=rounds[0].num_streams,
        num_rounds=len(rounds),
        last_stream=distribution([max(one.latencies_s) for one in rounds]),
        every_stream=distribution([latency for one in rounds for latency in one.latencies_s]),
        server_exit=distribution(exits) if exits else None,
        endings=dict(endings.most_common()),
    )


def _table(rounds: Sequence[Round]) -> str:
    header = [
        "streams",
        "begun",
        "rounds",
        "last stream p50 ms",
        "p99 ms",
        "max ms",
        "every stream p50 ms",
        "p99 ms",
        "server's exit max ms",
        "its status",
        "fatal errors a round",
        "endings",
    ]
    rows = []
    for some in _by_streams(rounds):
        figures = _figures(some)
        last, every = figures.last_stream, figures.every_stream
        rows.append(
            [
                str(figures.num_streams),
                _span([one.num_begun for one in some]),
                str(figures.num_rounds),
                *(report.milliseconds(value) for value in (last.p50_s, last.p99_s, last.max_s)),
                *(report.milliseconds(value) for value in (every.p50_s, every.p99_s)),
                report.milliseconds(figures.server_exit.max_s) if figures.server_exit else "-",
                _span([one.exit_status for one in some]),
                _span([one.num_fatal_errors for one in some]),
                ", ".join(f"{count} {name}" for name, count in figures.endings.items()),
            ]
        )
    return report.table(header, rows)


def _span(values: Sequence[int | None]) -> str:
    """`4`, or `4 0` where rounds differ."""
    return " ".join(str(value) for value in dict.fromkeys(values))
