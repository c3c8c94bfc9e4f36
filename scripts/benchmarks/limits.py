"""`scripts/bench limits`: what the limits cost, and whom.

Three parts, each with a server of its own:

- `crowd`: N calls at once against the server's own limits. Each must be served or told QUEUE_FULL with a pushback, or
  there are no figures. Memory is the largest sum of resident sets meanwhile, over what it was before.
- `rejections`: a server whose one place in the queue is taken, and N calls that it refuses. The figure is the front end
  process's CPU time over them, less what it takes without them in as long a time: all that gRPC does for a call before
  and after its handler is in it.
- `stalled`: the time between tokens of some readers, first alone and then beside N streams whose readers give the
  server no window at all, once these are paused; and the memory that they take. Both from one run of one server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

import grpc
import grpc.aio
import psutil

from emberline.v1 import inference_pb2, inference_pb2_grpc
from scripts.benchmarks import report, workload
from scripts.benchmarks.death import ending
from scripts.benchmarks.emberline_client import EmberlineClient, connect
from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Distribution, distribution, inter_token_gaps
from scripts.benchmarks.server import Server, own_server
from scripts.benchmarks.workload import Request, Workload
from scripts.fault_suite.http2 import stalled_readers

PARTS = ("crowd", "rejections", "stalled")
GENERATE = "emberline.v1.InferenceService/Generate"
PROMPT_TOKENS = 16
CROWD_OUTPUT_TOKENS = 4
CONNECTIONS = 8
REJECTIONS_AT_ONCE = 64
CROWD_LIMIT_S = 600.0
SETTLE_LIMIT_S = 120.0
QUIET_S = 2.0
STILL_POLL_S = 0.5
STILL_SHARE = 0.1
"""Engines that take less than this of a core for QUIET_S have nothing to compute: the stalled streams are paused."""
BASELINE_S = 3.0
POLL_S = 0.05
REFUSED = "RESOURCE_EXHAUSTED QUEUE_FULL"


@dataclass(frozen=True, slots=True)
class Crowd:
    """N calls at once."""

    num_calls: int
    endings: dict[str, int]
    wall_s: float
    memory_before_bytes: int
    memory_peak_bytes: int
    front_end_before_bytes: int
    front_end_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Rejections:
    """N calls that are all refused."""

    num_calls: int
    cpu_s: float
    """Of the front end while they were refused."""
    idle_cpu_share: float
    """Of one core, without them."""
    wall_s: float

    @property
    def cpu_each_s(self) -> float:
        return max(self.cpu_s - self.idle_cpu_share * self.wall_s, 0.0) / self.num_calls


@dataclass(frozen=True, slots=True)
class Stalled:
    """Readers beside others that stall."""

    num_stalled: int
    num_readers: int
    alone: Distribution
    beside: Distribution
    settled_s: float
    """From the stalled streams' begin until they took no more steps."""
    front_end_bytes: int
    """What they added to the front end's resident set."""
    tree_bytes: int
    """To those of all processes."""

    @property
    def ratio(self) -> float:
        return self.beside.p99_s / self.alone.p99_s


async def run(options: argparse.Namespace, server_flags: Sequence[str]) -> None:
    body: dict[str, object] = {"server": {"kind": "emberline", "flags": list(server_flags)}, "seed": options.seed}
    for part in options.parts:
        print(f"{part} …", flush=True)
        match part:
            case "crowd":
                crowd = await _crowd(options, server_flags)
                body[part] = asdict(crowd)
                print(_crowd_table(crowd))
            case "rejections":
                rejections = await _rejections(options, server_flags)
                body[part] = {**asdict(rejections), "cpu_each_s": rejections.cpu_each_s}
                print(_rejections_table(rejections))
            case _:
                stalled = await _stalled(options, server_flags)
                body[part] = {**asdict(stalled), "p99_ratio": stalled.ratio}
                print(_stalled_table(stalled))
    if options.output is not None:
        report.write_json(options.output, report.document("limits", body))
        print(f"written: {options.output}")


# Crowd


async def _crowd(options: argparse.Namespace, server_flags: Sequence[str]) -> Crowd:
    async with own_server(server_flags, options.start_limit_s) as server, _stubs(server.address) as stubs:
        (request,) = await _requests(server, options.seed, 1, CROWD_OUTPUT_TOKENS)
        message = _message(request)
        await _outcome(stubs[0], message)  # the first call of all pays for what is made once
        before, front_end_before = _memory_bytes(server), _front_end(server).memory_info().rss
        peaks = [before, front_end_before]
        began_s = time.perf_counter()
        calls = [
            asyncio.ensure_future(_outcome(stubs[number % len(stubs)], message)) for number in range(options.calls)
        ]
        try:
            async with asyncio.timeout(CROWD_LIMIT_S):
                while not all(call.done() for call in calls):
                    peaks[0] = max(peaks[0], _memory_bytes(server))
                    peaks[1] = max(peaks[1], _front_end(server).memory_info().rss)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            num_open = sum(not call.done() for call in calls)
            raise BenchmarkError(f"{num_open} of {len(calls)} calls have no answer after {CROWD_LIMIT_S:g} s") from None
        finally:
            for call in calls:
                call.cancel()
        endings = Counter(call.result() for call in calls)
        wall_s = time.perf_counter() - began_s
    if set(endings) - {"OK", REFUSED}:
        raise BenchmarkError(f"calls were neither served nor refused with a pushback: {dict(endings)}")
    return Crowd(options.calls, dict(endings), wall_s, before, peaks[0], front_end_before, peaks[1])


# Rejections


async def _rejections(options: argparse.Namespace, server_flags: Sequence[str]) -> Rejections:
    flags = [*server_flags, "--max-num-seqs=1", "--max-queue-requests=1"]
    async with own_server(flags, options.start_limit_s) as server, _stubs(server.address) as stubs:
        running, waiting = await _requests(server, options.seed, 2, None)
        refused = _message(waiting)
        blockers = [await _begin(stubs[0], running)]
        blockers.append(asyncio.ensure_future(_outcome(stubs[0], refused)))
        try:
            await _until_refused(stubs[0], refused)
            idle_cpu_s, idle_wall_s = await _cpu_of(server, asyncio.sleep(BASELINE_S))
            cpu_s, wall_s = await _cpu_of(server, _refuse(stubs, refused, options.calls))
            if any(blocker.done() for blocker in blockers):
                raise BenchmarkError("the queue did not stay full: its calls ended before the others were refused")
        finally:
            for blocker in blockers:
                blocker.cancel()
            await asyncio.wait(blockers)
    return Rejections(options.calls, cpu_s, idle_cpu_s / idle_wall_s, wall_s)


async def _refuse(stubs: Sequence[inference_pb2_grpc.InferenceServiceStub], message: bytes, num_calls: int) -> None:
    numbers = iter(range(num_calls))
    endings: Counter[str] = Counter()

    async def caller() -> None:
        for number in numbers:  # one iterator for all: each takes the next
            endings[await _outcome(stubs[number % len(stubs)], message)] += 1

    async with asyncio.TaskGroup() as callers:
        for _ in range(REJECTIONS_AT_ONCE):
            callers.create_task(caller())
    if endings != {REFUSED: num_calls}:
        raise BenchmarkError(f"not all were refused: {dict(endings)}")


async def _until_refused(stub: inference_pb2_grpc.InferenceServiceStub, message: bytes) -> None:
    for _ in range(int(SETTLE_LIMIT_S / POLL_S)):
        call = asyncio.ensure_future(_outcome(stub, message))
        done, _ = await asyncio.wait([call], timeout=1.0)
        call.cancel()
        if done and call.result() == REFUSED:
            return
        await asyncio.sleep(POLL_S)
    raise BenchmarkError("the queue did not get full")


async def _cpu_of(server: Server, work: asyncio.Future[None] | object) -> tuple[float, float]:
    process = _front_end(server)
    before, began_s = process.cpu_times(), time.perf_counter()
    await work  # type: ignore[misc] # a coroutine
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system, time.perf_counter() - began_s


# Stalled readers


async def _stalled(options: argparse.Namespace, server_flags: Sequence[str]) -> Stalled:
    async with AsyncExitStack() as stack:
        flags = [*server_flags, "--reader-timeout=3600"]  # they are to stay
        server = await stack.enter_async_context(own_server(flags, options.start_limit_s))
        client = await stack.enter_async_context(connect(server.address))
        requests = await _requests(server, options.seed, options.readers, options.reader_tokens)
        endless = await _requests(server, options.seed + 1, options.stalled, None)
        # Once, for what a first reader and a first stalled one cost or free for good.
        await _read(client, requests)
        async with stalled_readers(server.address, GENERATE, _message(endless[0]), 1):
            await _until_still(server)
        alone = await _read(client, requests)
        front_end, tree = _front_end(server).memory_info().rss, _memory_bytes(server)
        began_s = time.perf_counter()
        for request in endless:
            await stack.enter_async_context(stalled_readers(server.address, GENERATE, _message(request), 1))
        settled_s = await _until_still(server) - began_s
        beside = await _read(client, requests)
        # Right after the readers, who leave what they added behind in both figures' other half.
        front_end_after, tree_after = _front_end(server).memory_info().rss, _memory_bytes(server)
    return Stalled(
        options.stalled,
        options.readers,
        distribution(alone),
        distribution(beside),
        settled_s,
        front_end_after - front_end,
        tree_after - tree,
    )


async def _read(client: EmberlineClient, requests: Sequence[Request]) -> list[float]:
    """All of them at once, to their ends; seconds between tokens."""
    streams = await asyncio.gather(*(client.send(request) for request in requests))
    return [gap for stream in streams for gap in inter_token_gaps(stream.messages)]


async def _until_still(server: Server) -> float:
    """When the engine had stopped computing; raises BenchmarkError if it goes on."""
    before_s, still_since_s = -1.0, None
    for _ in range(int(SETTLE_LIMIT_S / STILL_POLL_S)):
        now_s = time.perf_counter()
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in server.descendants())
        is_still = 0 <= cpu_s - before_s < STILL_SHARE * STILL_POLL_S
        before_s = cpu_s
        if not is_still:
            still_since_s = None
        elif still_since_s is None:
            still_since_s = now_s - STILL_POLL_S
        elif now_s - still_since_s > QUIET_S:
            return still_since_s
        await asyncio.sleep(STILL_POLL_S)
    raise BenchmarkError(f"the engine goes on computing for readers that have stalled for {SETTLE_LIMIT_S:g} s")


# What the parts share


async def _requests(server: Server, seed: int, number: int, num_output_tokens: int | None) -> list[Request]:
    """`num_output_tokens`: None is as many as the server allows."""
    async with connect(server.address) as client:
        model = await client.model()
    most = min(model.limits.max_output_tokens, model.limits.max_model_len - PROMPT_TOKENS)
    wanted = most if num_output_tokens is None else min(num_output_tokens, most)
    load = Workload(seed, number, PROMPT_TOKENS, PROMPT_TOKENS, wanted, wanted)
    return workload.requests(load, "limits", workload.plain_ids(model.vocab_size), avoid=model.eos_token_ids)


def _message(request: Request) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.prompt_ids),
        sampling=inference_pb2.SamplingOptions(temperature=0),
        stopping=inference_pb2.StoppingOptions(max_tokens=request.num_output_tokens, ignore_eos=True),
    ).SerializeToString()


@asynccontextmanager
async def _stubs(address: str) -> AsyncIterator[list[inference_pb2_grpc.InferenceServiceStub]]:
    """Several connections, as several callers would have."""
    async with AsyncExitStack() as stack:
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(CONNECTIONS)
        ]
        yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]


async def _outcome(stub: inference_pb2_grpc.InferenceServiceStub, message: bytes) -> str:
    """`OK`, or the status with its reason, and what is wrong with a refusal's pushback."""
    try:
        async for _ in stub.Generate(inference_pb2.GenerateRequest.FromString(message)):
            pass
    except grpc.aio.AioRpcError as error:
        what, _ = ending(error)
        pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "")
        return what if what != REFUSED or int(pushback or 0) > 0 else f"{what} without pushback"
    return "OK"


async def _begin(stub: inference_pb2_grpc.InferenceServiceStub, request: Request) -> asyncio.Future[str]:
    """A stream that has had its first token and goes on being read."""
    begun = asyncio.Event()

    async def read() -> str:
        async for _ in stub.Generate(inference_pb2.GenerateRequest.FromString(_message(request))):
            begun.set()
        return "OK"

    task = asyncio.ensure_future(read())
    waiting = asyncio.ensure_future(begun.wait())
    await asyncio.wait([task, waiting], timeout=SETTLE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not begun.is_set():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await task
        raise BenchmarkError("the stream that is to fill the engine has not begun")
    return task


def _front_end(server: Server) -> psutil.Process:
    return psutil.Process(server.pid)


def _memory_bytes(server: Server) -> int:
    total = 0
    for process in (_front_end(server), *server.descendants()):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


# Tables


def _crowd_table(crowd: Crowd) -> str:
    header = ["calls", "served", "refused", "s", "front end MB", "its peak", "all MB", "their peak"]
    row = [
        str(crowd.num_calls),
        str(crowd.endings.get("OK", 0)),
        str(crowd.endings.get(REFUSED, 0)),
        f"{crowd.wall_s:.1f}",
        report.megabytes(crowd.front_end_before_bytes),
        report.megabytes(crowd.front_end_peak_bytes),
        report.megabytes(crowd.memory_before_bytes),
        report.megabytes(crowd.memory_peak_bytes),
    ]
    return report.table(header, [row])


def _rejections_table(rejections: Rejections) -> str:
    header = ["refused", "CPU ms each", "CPU ms each, with all that ran beside", "refused/s"]
    row = [
        str(rejections.num_calls),
        report.milliseconds(rejections.cpu_each_s),
        report.milliseconds(rejections.cpu_s / rejections.num_calls),
        f"{rejections.num_calls / rejections.wall_s:.0f}",
    ]
    return report.table(header, [row])


def _stalled_table(stalled: Stalled) -> str:
    header = [
        "stalled",
        "readers",
        "alone p50 ms",
        "p99 ms",
        "beside p50 ms",
        "p99 ms",
        "ratio of p99",
        "paused after s",
        "front end MB",
        "all MB",
    ]
    row = [
        str(stalled.num_stalled),
        str(stalled.num_readers),
        *(report.milliseconds(value) for value in (stalled.alone.p50_s, stalled.alone.p99_s)),
        *(report.milliseconds(value) for value in (stalled.beside.p50_s, stalled.beside.p99_s)),
        f"{stalled.ratio:.2f}",
        f"{stalled.settled_s:.1f}",
        f"{stalled.front_end_bytes / 1e6:.1f}",
        f"{stalled.tree_bytes / 1e6:.1f}",
    ]
    return report.table(header, [row])
