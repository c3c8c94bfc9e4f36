"""`emberline top`: what a frame shows, and that a server may come and go."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from emberline.client import AsyncClient
from emberline.v1 import info_pb2
from service import top
from tests.client.fake_server import LIMIT_S, FakeServer


def sample(at_s: float, generated: int, pid: int = 41, engine_generated: int | None = None) -> top.Sample:
    server = info_pb2.GetServerInfoResponse(version="1.2.3")
    server.uptime.seconds = 3 * 3600 + 7 * 60
    ready = server.engines.add(index=0, state=info_pb2.ENGINE_STATE_READY, pid=pid, device="cpu", num_kv_blocks=100)
    ready.load.streams, ready.load.running, ready.load.waiting, ready.load.kv_blocks_used = 9, 7, 2, 25
    ready.load.generated_tokens_total = generated if engine_generated is None else engine_generated
    ready.load.step.nanos = 31_000_000
    server.engines.add(index=1, state=info_pb2.ENGINE_STATE_BACKOFF, deaths=3, last_death_id="feedface")
    load = info_pb2.GetLoadResponse(
        live_calls=12, running=7, waiting=5, waiting_tokens=640, kv_blocks_used=25, kv_blocks_total=100
    )
    load.generated_tokens_total = generated
    return top.Sample(at_s, server, load, "SERVING")


def shown(*servers: top.Server) -> str:
    console = Console(width=80, color_system=None)  # what a terminal has at the least
    with console.capture() as captured:
        console.print(top.frame(servers))
    return captured.get()


def server_with(now: top.Sample | top.Silence | None, before: top.Sample | None = None) -> top.Server:
    return top.Server("10.0.0.1:50051", AsyncClient("10.0.0.1:50051"), now, before)


def test_a_frame_has_what_an_operator_looks_for() -> None:
    """Health, uptime, calls, queue, KV, tokens per second, each engine's state, its deaths and the last one's id."""
    text = shown(server_with(sample(12.0, 1500), sample(10.0, 1000)))
    for wanted in (
        "10.0.0.1:50051  SERVING  1.2.3  up 3 h 7 min",
        "calls 12",
        "running 7",
        "waiting 5 (640 tokens)",
        "tokens/s 250.0",
        "deaths 3",
        "25/100 blocks",
        "31 ms",
    ):
        assert wanted in text
    (ready,) = [line for line in text.splitlines() if "READY" in line]
    assert ready.split()[1:6] == ["0", "READY", "41", "cpu", "9"]
    assert "250.0" in ready
    (gone,) = [line for line in text.splitlines() if "BACKOFF" in line]
    assert gone.split()[-2] == "3"
    assert "engine 1 last died as feedface" in text
    assert "–" in gone


def test_rates_need_two_looks_at_the_same_counter() -> None:
    """No rate at first, none from a counter that has begun anew, none between two engines in one place."""
    assert "tokens/s –" in shown(server_with(sample(12.0, 1500)))
    assert "tokens/s –" in shown(server_with(sample(12.0, 10), sample(10.0, 1000)))
    text = shown(
        server_with(sample(12.0, 1500, pid=42, engine_generated=9000), sample(10.0, 1000, engine_generated=10))
    )
    (ready,) = [line for line in text.splitlines() if "READY" in line]
    assert "4495" not in ready


def test_a_server_that_is_silent_is_shown_as_such() -> None:
    """With the reason, beside those that are not; markup in it stays text."""
    text = shown(server_with(top.Silence("UNAVAILABLE: [red]gone")), server_with(sample(1.0, 1)))
    assert "UNAVAILABLE: [red]gone" in text
    assert "SERVING" in text


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (65, "1 min 5 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")])
def test_durations(seconds: int, text: str) -> None:
    """The two largest units."""
    assert top.duration(seconds) == text


@pytest.mark.parametrize(("used", "full"), [(0, 0), (50, 12), (100, 24)])
def test_bars(used: int, full: int) -> None:
    """A share of cells; of nothing it is empty."""
    assert top.bar(used, 100).count("█") == full
    assert top.bar(0, 0).count("█") == 0


def test_a_server_goes_and_comes_back() -> None:
    """Each look tells how it is now; after its return rates begin anew."""

    async def scenario() -> None:
        with FakeServer() as first:
            watched = top.Server(first.address, AsyncClient(first.address, attempts_max=1))
            await watched.look()
            assert isinstance(watched.now, top.Sample)
            await watched.look()
            assert watched.before is not None
        await watched.look()
        assert isinstance(watched.now, top.Silence)
        with FakeServer(serving=False, port=first.port):
            async with asyncio.timeout(LIMIT_S):
                while not isinstance(watched.now, top.Sample):
                    await watched.look()
                    await asyncio.sleep(0.05)
            assert watched.now.health == "NOT_SERVING"
            assert watched.before is None
        await watched.client.close()

    asyncio.run(scenario())


def test_one_frame_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """`--once` prints every server and ends: 0 if one of them answers, 2 if none does, 64 for wrong flags."""
    with FakeServer() as server, FakeServer() as gone:
        gone.stop()
        both = f"{server.address},{gone.address}"
        assert top.run(["--once", "--interval", "0.1", "--address", both]) == 0
        text = capsys.readouterr().out
        assert server.address in text
        assert gone.address in text
        assert top.run(["--once", "--interval", "0.1", "--address", gone.address]) == 2
    for wrong in (["--interval", "0"], ["--address", ":"]):
        try:
            code = top.run(wrong)
        except SystemExit as ended:
            code = ended.code
        assert code == 64
