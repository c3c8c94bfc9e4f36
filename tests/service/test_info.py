"""InfoService tells what Generate accepts, how busy the server is, and what became of its engines."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from emberline.v1 import inference_pb2, info_pb2, tokenizer_pb2
from service.servicer import InferenceServicer
from tests.service.fake_engine import Trigger
from tests.service.front_end import Running, details, error_of, rest_of, running
from tests.service.support import CapturedLogs, fake_engine, until


async def load_of(run: Running) -> info_pb2.GetLoadResponse:
    load: info_pb2.GetLoadResponse = await run.info.GetLoad(info_pb2.GetLoadRequest())
    return load


async def engines_of(run: Running) -> list[info_pb2.EngineInfo]:
    return list((await run.info.GetServerInfo(info_pb2.GetServerInfoRequest())).engines)


async def load_when(run: Running, condition: Any) -> info_pb2.GetLoadResponse:
    """The first answer that meets the condition; that of an engine comes with its next step."""
    async with asyncio.timeout(30):
        while not condition(load := await load_of(run)):  # noqa: ASYNC110 - it is told to those who ask
            await asyncio.sleep(0.01)
        return load


async def test_every_limit_is_told(model: Path, log: CapturedLogs) -> None:
    """Each field of Limits has the value that requests are held to; a new one cannot be forgotten."""
    async with running(model) as run:
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        limits = run.server._backend.limits
        assert limits is not None
        for field in info_pb2.Limits.DESCRIPTOR.fields:
            assert getattr(info.limits, field.name) == getattr(limits, field.name) > 0, field.name


async def test_every_capability_is_told(model: Path, log: CapturedLogs) -> None:
    """All options work, but a chat needs a template and a guide needs an end, which this model has not."""
    async with running(model) as run:
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        has_end = bool(run.server._backend.eos_token_ids)
    told = {field.name: getattr(info.capabilities, field.name) for field in info_pb2.Capabilities.DESCRIPTOR.fields}
    assert told.pop("guided") is has_end
    told.pop("chat")
    assert all(told.values()), told


async def test_the_bound_of_prompt_logprobs_is_the_one_told(model: Path, log: CapturedLogs) -> None:
    """A value at `max_logprobs` is served, and one above it is refused."""
    async with running(model) as run:
        most = (await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())).limits.max_logprobs
        output = inference_pb2.OutputOptions(prompt_logprobs=most)
        (first, *_) = [delta async for delta in run.generate(1, 2, output=output)]
        assert len(first.prompt.tokens[1].top) == most
        error = await error_of(run.generate(1, 2, output=inference_pb2.OutputOptions(prompt_logprobs=most + 1)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_load_counts_what_runs_and_what_was_generated(model: Path, log: CapturedLogs) -> None:
    """Live calls and running requests while they last; the tokens of all calls for good, over all engines."""
    async with running(model) as run:
        before = await load_of(run)
        assert (before.running, before.waiting, before.live_calls, before.generated_tokens_total) == (0, 0, 0, 0)
        assert before.kv_blocks_total > 0
        calls = [run.generate(1, n, max_tokens=4000) for n in (1, 2)]
        for call in calls:
            await call.read()
        busy = await load_when(run, lambda load: load.running == 2)
        assert (busy.waiting, busy.live_calls, busy.kv_blocks_used) == (0, 2, 2)
        (engine,) = await engines_of(run)
        assert engine.HasField("load")
        assert (engine.load.running, engine.load.streams, engine.load.kv_blocks_used) == (2, 2, 2)
        for call in calls:
            call.cancel()
        await run.wait_idle()
        assert (await run.inference.Complete(_request(7))).usage.completion == 7
        after = await load_when(run, lambda load: load.live_calls == 0)
        (engine,) = await engines_of(run)
        assert engine.load.generated_tokens_total >= after.generated_tokens_total >= 2 + 7
        assert (engine.load.streams, engine.deaths, engine.last_death_id) == (0, 0, "")


async def test_what_waits_for_an_engine_waits(model: Path, log: CapturedLogs) -> None:
    """A call that no engine has been given counts as waiting; one whose answer is merely still being read does not."""
    flags = ["--on-engine-death", "replay", "--max-engine-restarts", "3"]
    async with running(model, *flags, engine=fake_engine(load_s=0.5)) as run:
        call = run.generate(1, 2, max_tokens=300)
        await call.read()
        await error_of(run.generate(Trigger.SIGKILL, resume_on_engine_death=False))
        orphan = await load_when(run, lambda load: load.waiting == 1)
        assert (orphan.running, orphan.live_calls, orphan.kv_blocks_total) == (0, 1, 0)
        await rest_of(call)
        context = mock.Mock(grpc.aio.ServicerContext)
        context.time_remaining.return_value = None
        context.invocation_metadata.return_value = ()
        deltas = InferenceServicer(run.server._backend).Generate(_request(1), context)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                assert delta.HasField("finish")
                await load_when(run, lambda load: load.running == 0 and load.generated_tokens_total == 301)
                assert not len(run.server._journal)
                read = await load_of(run)
                assert (read.live_calls, read.waiting) == (1, 0)


async def test_services_that_need_no_engine_are_healthy_without_one(model: Path, log: CapturedLogs) -> None:
    """While an engine loads, InfoService and TokenizerService are SERVING and answer, and readiness is not; a service
    that is not offered has no name.
    """
    async with running(model, engine=fake_engine(load_s=600), wait=False) as run:
        await until(lambda: run.server._backend.tokenizer is not None)
        assert await run.readiness("emberline.v1.InfoService") == "SERVING"
        assert await run.readiness("emberline.v1.TokenizerService") == "SERVING"
        assert await run.readiness("emberline.v1.InferenceService") == "NOT_SERVING"
        await load_of(run)
        await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run.readiness("emberline.v1.AdminService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    async with running(model, "--enable-admin") as run:
        assert await run.readiness("emberline.v1.AdminService") == "SERVING"


@pytest.mark.parametrize("trigger", [Trigger.SIGKILL, Trigger.RAISE])
async def test_deaths_are_told_with_the_id_that_the_log_has(model: Path, log: CapturedLogs, trigger: Trigger) -> None:
    """Per place: how many, and the last one's id; without an engine there is no load, and afterwards a fresh one's."""
    async with running(model, "--max-engine-restarts", "3", engine=fake_engine(load_s=0.3)) as run:
        error = await error_of(run.generate(trigger))
        (dead,) = await engines_of(run)
        death_id = details(error)[1]["death_id"]
        assert (dead.deaths, dead.last_death_id) == (1, death_id)
        assert not dead.HasField("load")
        await run.wait_serving()
        assert [record["death_id"] for record in log.of("fatal error")] == [death_id]
        (engine,) = await engines_of(run)
        assert (engine.deaths, engine.last_death_id) == (1, death_id)
        assert engine.load.generated_tokens_total == 0


def _request(max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=(1, 2)), stopping=inference_pb2.StoppingOptions(max_tokens=max_tokens)
    )
