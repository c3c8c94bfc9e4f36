"""`scripts/bench serve`: a seeded closed loop against one server, at each concurrency in turn.

The server stays the same from level to level, as it would in service; what is sent differs in its ids, not in its
lengths (see `workload`). Around each level the process tree is watched.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks import report, workload
from scripts.benchmarks.emberline_client import EmberlineClient, check_limits, connect, loopback
from scripts.benchmarks.figures import Summary, summary
from scripts.benchmarks.load import Send, closed_loop
from scripts.benchmarks.processes import TreeSampler, listener
from scripts.benchmarks.server import own_server
from scripts.benchmarks.workload import Request, Workload

WARM_UP_OUTPUT_TOKENS = 16
WARM_UP_REQUESTS_MIN = 4


@dataclass(frozen=True, slots=True)
class Level:
    """One run: a concurrency and what came of it."""

    concurrency: int
    figures: Summary
    server_cpu_s: float | None
    """Processor time of the server's process tree during the run."""
    client_cpu_s: float
    """The load generator's own: it shares the machine."""
    peak_pss_bytes: int | None
    peak_rss_bytes: int | None
    streams: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Target:
    """A server, ours or not."""

    address: str
    tree: TreeSampler | None
    """None where its processes cannot be seen."""
    startup_s: float | None
    """From our starting it to its serving; None if it ran before."""


async def run(options: argparse.Namespace, server_flags: Sequence[str]) -> None:
    load = Workload(
        seed=options.seed,
        num_requests=options.requests,
        prompt_tokens_min=options.prompt_tokens[0],
        prompt_tokens_max=options.prompt_tokens[1],
        output_tokens_min=options.output_tokens[0],
        output_tokens_max=options.output_tokens[1],
    )
    async with _target(options, server_flags) as target, connect(target.address) as client:
        model = await client.model()
        check_limits(load, model.limits)
        levels = []
        for concurrency in options.concurrency:
            label = f"concurrency {concurrency}"
            print(f"{label}: {load.num_requests} requests …", flush=True)
            ids = workload.plain_ids(model.vocab_size)
            requests = workload.requests(load, label, ids, avoid=model.eos_token_ids)
            await _warm_up(client.send, load, label, concurrency, ids, options.time_limit_s)
            levels.append(await _measure(client.send, requests, concurrency, target.tree, options.time_limit_s))
            _warn_of_cache_hits(levels[-1].figures)
        body = {
            "workload": asdict(load),
            "server": {
                "kind": "emberline",
                "flags": list(server_flags),
                **await _about_server(client),
                "startup_s": target.startup_s,
                "peak_pss_bytes": _peak_pss(target.tree, 0.0),
                "peak_rss_bytes": _peak_rss(target.tree, 0.0),
            },
            "levels": [asdict(level) for level in levels],
        }
    print(_table(levels))
    if target.startup_s is not None:
        print(f"serving after {target.startup_s:.1f} s; peak memory from its start on: {_peak_text(target.tree)}")
    if options.output is not None:
        _write(options.output, report.document("serve", body))


@asynccontextmanager
async def _target(options: argparse.Namespace, server_flags: Sequence[str]) -> AsyncIterator[Target]:
    if options.address is not None:
        address = loopback(options.address)
        pid = listener(int(address.rpartition(":")[2]))
        if pid is None:
            print("the server's processes cannot be seen from here: no memory, no processor time")
        with nullcontext() if pid is None else TreeSampler(pid) as tree:
            yield Target(address, tree, None)
        return
    async with own_server(server_flags, options.start_limit_s) as server:
        with TreeSampler(server.pid) as tree:
            yield Target(server.address, tree, server.startup_s)


async def _warm_up(send: Send, load: Workload, label: str, concurrency: int, ids: range, time_limit_s: float) -> None:
    """As many streams at once as the level will have, with short outputs and ids of their own."""
    num_output_tokens = min(WARM_UP_OUTPUT_TOKENS, load.output_tokens_max)
    few = replace(
        load,
        num_requests=max(concurrency, WARM_UP_REQUESTS_MIN),
        output_tokens_min=num_output_tokens,
        output_tokens_max=num_output_tokens,
    )
    requests = workload.requests(few, f"warm-up {label}", ids)
    await closed_loop(requests, send, concurrency=concurrency, time_limit_s=time_limit_s)


async def _measure(
    send: Send, requests: Sequence[Request], concurrency: int, tree: TreeSampler | None, time_limit_s: float
) -> Level:
    before = tree.sample() if tree else None
    began_s, client_cpu_s = time.perf_counter(), time.process_time()
    streams = await closed_loop(requests, send, concurrency=concurrency, time_limit_s=time_limit_s)
    client_cpu_s = time.process_time() - client_cpu_s
    after = tree.sample() if tree else None
    return Level(
        concurrency=concurrency,
        figures=summary(streams),
        server_cpu_s=after.cpu_s - before.cpu_s if before and after else None,
        client_cpu_s=client_cpu_s,
        peak_pss_bytes=_peak_pss(tree, began_s),
        peak_rss_bytes=_peak_rss(tree, began_s),
        streams=[
            {
                "started_s": round(stream.started_s - began_s, 6),
                "prompt_tokens": stream.num_prompt_tokens,
                "output_tokens": stream.num_output_tokens,
                "messages": len(stream.messages),
                "first_token_s": round(stream.first_token_s, 6),
                "end_to_end_s": round(stream.end_to_end_s, 6),
            }
            for stream in streams
        ],
    )


def _peak_pss(tree: TreeSampler | None, since_s: float) -> int | None:
    known = [sample.pss_bytes for sample in tree.since(since_s) if sample.pss_bytes is not None] if tree else []
    return max(known, default=None)


def _peak_rss(tree: TreeSampler | None, since_s: float) -> int | None:
    return max((sample.rss_bytes for sample in tree.since(since_s)), default=None) if tree else None


def _peak_text(tree: TreeSampler | None) -> str:
    pss, rss = _peak_pss(tree, 0.0), _peak_rss(tree, 0.0)
    return f"{report.megabytes(pss)} MB PSS, {report.megabytes(rss)} MB RSS"


async def _about_server(client: EmberlineClient) -> dict[str, Any]:
    model, server = await client.model(), await client.server()
    return {
        "version": server.version,
        "model": model.model,
        "dtype": model.dtype,
        "engines": [
            {
                "device": engine.device,
                "attention_backend": engine.attention_backend,
                "block_size": engine.block_size,
                "num_kv_blocks": engine.num_kv_blocks,
            }
            for engine in server.engines
        ],
    }


def _warn_of_cache_hits(figures: Summary) -> None:
    if figures.num_cached_tokens:
        print(
            f"note: {figures.num_cached_tokens} of {figures.num_prompt_tokens} prompt tokens came from the prefix"
            " cache: this server has seen this seed before"
        )


def _table(levels: Sequence[Level]) -> str:
    header = [
        "streams",
        "tokens/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "inter-token p50 ms",
        "inter-token p99 ms",
        "end-to-end p50 s",
        "end-to-end p99 s",
        "wall s",
        "CPU s",
        "PSS MB",
    ]
    rows = []
    for level in levels:
        figures = level.figures
        rows.append(
            [
                str(level.concurrency),
                f"{figures.output_tokens_per_s:.1f}",
                report.milliseconds(figures.first_token.p50_s),
                report.milliseconds(figures.first_token.p99_s),
                report.milliseconds(figures.inter_token.p50_s),
                report.milliseconds(figures.inter_token.p99_s),
                f"{figures.end_to_end.p50_s:.2f}",
                f"{figures.end_to_end.p99_s:.2f}",
                f"{figures.wall_s:.1f}",
                "?" if level.server_cpu_s is None else f"{level.server_cpu_s:.1f}",
                report.megabytes(level.peak_pss_bytes),
            ]
        )
    return report.table(header, rows)


def _write(output: Path, content: dict[str, Any]) -> None:
    report.write_json(output, content)
    plot = output.with_suffix(".png")
    server, load = content["server"], content["workload"]
    report.plot_serve(plot, content["levels"], f"{server['model']} {server['dtype']}, {load['num_requests']} requests")
    print(f"written: {output}, {plot}")
