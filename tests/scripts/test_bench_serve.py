"""`scripts/bench serve` against a server made here: everything but the product."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2, info_pb2_grpc
from scripts.benchmarks import serve
from scripts.benchmarks.__main__ import parser
from scripts.benchmarks.errors import BenchmarkError


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Two tokens a message; `shortfall` tokens fewer than asked for."""

    def __init__(self, shortfall: int) -> None:
        self._shortfall = shortfall
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def Generate(  # noqa: N802 named by the protocol
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        count, wanted = len(request.token_ids.ids), request.stopping.max_tokens - self._shortfall
        for had in range(0, wanted, 2):
            response = inference_pb2.GenerateResponse(tokens=[inference_pb2.Token(id=1)] * min(2, wanted - had))
            if had == 0:
                response.prompt.count = count
            if had + 2 >= wanted:
                response.finish.reason = inference_pb2.FINISH_REASON_MAX_TOKENS
                response.usage.prompt, response.usage.completion = count, wanted
            yield response
            await asyncio.sleep(0)


class FakeInfo(info_pb2_grpc.InfoServiceServicer):
    async def GetModelInfo(  # noqa: N802
        self, request: object, context: object
    ) -> info_pb2.GetModelInfoResponse:
        limits = info_pb2.Limits(max_model_len=64, max_prompt_tokens=32, max_output_tokens=32)
        return info_pb2.GetModelInfoResponse(
            model="fake", vocab_size=1000, eos_token_ids=[500], limits=limits, dtype="none"
        )

    async def GetServerInfo(  # noqa: N802
        self, request: object, context: object
    ) -> info_pb2.GetServerInfoResponse:
        return info_pb2.GetServerInfoResponse(version="0")


@asynccontextmanager
async def fake_server(shortfall: int = 0) -> AsyncIterator[tuple[str, FakeInference]]:
    server = grpc.aio.server()
    inference = FakeInference(shortfall)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    info_pb2_grpc.add_InfoServiceServicer_to_server(FakeInfo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", inference
    finally:
        await server.stop(0)


async def bench(address: str, *flags: str) -> None:
    lengths = ["--prompt-tokens", "4", "32", "--output-tokens", "4", "32"]
    load = ["--requests", "9", "--concurrency", "1", "3", *lengths]
    options = parser().parse_args(["serve", "--address", address, *load, *flags])
    await options.run(options, [])


async def test_a_run_leaves_figures_of_every_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON with all figures and streams, and a table with a line for each concurrency."""
    output = tmp_path / "run.json"
    async with fake_server() as (address, inference):
        options = parser().parse_args(["serve", "--address", address])
        assert options.run is serve.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("scripts.benchmarks.report.plot_serve", lambda *arguments: None)  # matplotlib takes a second
            await bench(address, "--output", str(output))
    content = json.loads(output.read_text())
    assert [level["concurrency"] for level in content["levels"]] == [1, 3]
    one, three = (level["figures"] for level in content["levels"])
    assert (
        one["num_output_tokens"]
        == three["num_output_tokens"]
        == sum(stream["output_tokens"] for stream in content["levels"][0]["streams"])
    )
    assert one["num_messages"] < one["num_output_tokens"] == one["inter_token"]["count"] + 2 * one["num_requests"]
    assert content["levels"][0]["peak_rss_bytes"] > 0
    assert content["server"]["model"] == "fake"
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == 4
    prompts = [tuple(request.token_ids.ids) for request in inference.requests]
    assert len(set(prompts)) == len(prompts), "a prompt sent twice would come from the prefix cache"
    assert not any(500 in prompt for prompt in prompts)


async def test_a_stream_that_is_one_token_short_leaves_no_figures(tmp_path: Path) -> None:
    """The run fails, and nothing is written that could be taken for a result."""
    output = tmp_path / "run.json"
    async with fake_server(shortfall=1) as (address, _):
        with pytest.raises(BenchmarkError, match="output tokens"):
            await bench(address, "--output", str(output))
    assert not output.exists()
