"""The limits of a call, through the whole front end, with made-up tokens."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2
from scheduler.messages import Submit
from service.errors import TimeLimitError
from service.time_limits import TimeLimits
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.front_end import details, error_of, request, rest_of, running, text_of
from tests.service.rig import Rig, collect, rig
from tests.service.rig import error_of as stream_error_of
from tests.service.support import HANG_S, CapturedLogs, fake_engine, submit, until

TIME_LIMIT = inference_pb2.FINISH_REASON_TIME_LIMIT
NARROW = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
"""Of a client that takes as little as gRPC can be made to take without reading."""


async def gone(call: Any) -> None:
    """Cancel a call and wait for its end: what gRPC still has to tell of it must not reach the next test's loop."""
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


def seconds(value: float) -> Duration:
    return Duration(seconds=int(value), nanos=int(value % 1 * 1e9))


# Time


@pytest.mark.parametrize("limit", ["max_queue_time", "max_time"])
async def test_what_expires_in_an_engine_without_a_step_is_told_which_limit(
    model: Path, log: CapturedLogs, limit: str
) -> None:
    """DEADLINE_EXCEEDED, with the limit and the place, and no pushback: whoever waits less may try at once."""
    async with running(model) as run:
        fields: dict[str, Any] = {limit: seconds(0.1)}
        error = await error_of(run.generate(Trigger.SILENT.value, **fields))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details(error) == ("TIME_LIMIT", {"limit": limit, "place": "queue"}, None)
        await run.wait_idle()


async def test_a_wait_for_a_thread_is_a_wait(model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose tokenization does not begin in time never reaches an engine, and holds nothing any more."""
    go_on = threading.Event()
    async with running(model) as run:
        tokenizer = run.server._backend.tokenizer
        assert tokenizer is not None
        monkeypatch.setattr(tokenizer, "encode", lambda _: go_on.wait(HANG_S))
        error = await error_of(run.generate(1, max_queue_time=seconds(0.05)))
        assert details(error)[:2] == ("TIME_LIMIT", {"limit": "max_queue_time", "place": "queue"})
        assert run.server._admission.num_live == 0
        go_on.set()
        assert run.server._journal.next_request_id() == 2, "its id was drawn, and no other"


async def test_max_time_ends_a_stream_with_what_it_has(model: Path, log: CapturedLogs) -> None:
    """The last message has the finish and the usage; the tokens before it are those of the request, all of them told;
    the engine has forgotten it."""
    async with running(model, engine=fake_engine(step_s=0.01)) as run:
        output = inference_pb2.OutputOptions(token_ids=True)
        deltas = await rest_of(run.generate(1, 2, max_tokens=4000, max_time=seconds(0.5), output=output))
        await run.wait_idle()
    token_ids = [token.id for delta in deltas for token in delta.tokens]
    assert 0 < len(token_ids) < 4000
    assert token_ids == tokens_of((1, 2), len(token_ids))
    assert "".join(delta.text for delta in deltas) == text_of(model, token_ids)
    assert [delta.finish.reason for delta in deltas if delta.HasField("finish")] == [TIME_LIMIT]
    assert (deltas[-1].usage.prompt, deltas[-1].usage.completion) == (2, len(token_ids))


async def test_an_answer_in_time_is_not_touched(model: Path, log: CapturedLogs) -> None:
    """Limits that are not reached change nothing, and leave nothing behind."""
    async with running(model) as run:
        limits = {"max_time": seconds(HANG_S), "max_queue_time": seconds(HANG_S)}
        deltas = await rest_of(run.generate(1, 2, max_tokens=9, **limits))
        assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
        assert deltas[-1].usage.completion == 9
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        assert info.capabilities.time_limits
        assert info.capabilities.stream_interval


async def test_the_deadline_of_the_call_itself_goes_to_the_engine(model: Path, log: CapturedLogs) -> None:
    """An engine is told less than the time that the caller's library waits (and rounds up on its way), so that the
    caller is told why."""
    async with running(model) as run:
        call = run.inference.Generate(request(Trigger.SILENT.value), timeout=20)
        await until(lambda: len(run.server._journal))
        (entry,) = run.server._journal
        await until(lambda: entry.sent is not None)
        assert entry.sent is not None
        assert entry.sent.queue_timeout_s is not None
        assert 10 < entry.sent.queue_timeout_s < 20
        await gone(call)


async def test_what_expires_while_no_engine_serves() -> None:
    """A stream that goes on after its engine's death and has had nothing yet ends when its wait is over, not when the
    next engine is ready; the next one never hears of it."""
    async with rig(flags={"load_s": 1}, max_restarts=3) as made:
        stream = open_limited(made, submit(1, Trigger.SILENT.value), max_queue_time_s=0.5)
        await until(lambda: stream.entry.sent)
        made.replica.engine.process.kill()  # type: ignore[union-attr]
        error = await stream_error_of(stream)
        assert isinstance(error, TimeLimitError)
        assert (error.limit, error.place) == ("max_queue_time", "queue")
        assert not made.replica.is_serving
        await made.all_serving()
        assert stream.entry.num_sent == 1


def open_limited(made: Rig, one: Submit, **limits: float) -> Any:
    time_limits = TimeLimits.from_arrival(asyncio.get_running_loop().time(), **limits)
    return made.dispatcher.open(one, label="limited", is_replayed=True, time_limits=time_limits)


# Slow readers


async def test_a_paused_stream_stays_paused_on_its_next_engine() -> None:
    """It is replayed behind its last token, gets no step there while its reader is behind, and then goes on exactly."""
    async with rig(max_restarts=3) as made:
        stream = made.generate(submit(1, 1, 2, max_tokens=400), replay=True)
        await until(lambda: stream.is_paused)
        num_tokens = await count_when_still(stream)
        first_pid = made.replica.pid
        made.replica.engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: made.replica.is_serving and made.replica.pid != first_pid)
        await until(lambda: stream.entry.num_sent == 2)
        assert await count_when_still(stream) - num_tokens <= 2, "a step or two may come before the pause does"
        assert await collect(stream) == tokens_of((1, 2), 400)


async def count_when_still(stream: Any) -> int:
    """Output tokens once there have been no more of them for a hundred steps' time."""
    count = -1
    while count != stream.entry.num_output_tokens:
        count = stream.entry.num_output_tokens
        await asyncio.sleep(0.2)
    return count


async def test_a_reader_that_is_behind_costs_no_steps_and_loses_nothing(model: Path, log: CapturedLogs) -> None:
    """While nothing is read the engine stops; when its reader comes back, every token is there, in order."""
    async with running(model) as run, grpc.aio.insecure_channel(run.server.address, NARROW) as channel:
        output = inference_pb2.OutputOptions(token_ids=True)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(1, 2, max_tokens=4000, request_id="l" * 128, output=output), timeout=HANG_S)
        first = await call.read()
        (stream,) = run.server._dispatcher._streams.values()
        await until(lambda: stream.is_paused)
        assert await count_when_still(stream) < 4000
        deltas = [first, *await rest_of(call)]
    assert [token.id for delta in deltas for token in delta.tokens] == tokens_of((1, 2), 4000)
    assert {delta.request_id for delta in deltas} == {"l" * 128}, "the longest label is the caller's own, too"


# Caps


async def test_prompts_in_tokenization_are_counted(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is full of what texts are about to be before a single one is encoded; when it has room, all is as
    before."""
    go_on = threading.Event()
    async with running(model, "--max-queue-tokens", "100") as run:
        tokenizer = run.server._backend.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode

        def slow(prompt: Any) -> Any:
            go_on.wait(HANG_S)
            return encode(prompt)

        monkeypatch.setattr(tokenizer, "encode", slow)
        first = run.generate(text="a" * 300)
        await until(lambda: run.server._admission.num_waiting_tokens == 75)
        error = await error_of(run.generate(text="b" * 200))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)[0] == "QUEUE_FULL"
        go_on.set()
        assert (await rest_of(first))[-1].usage.prompt == 300
        assert await rest_of(run.generate(text="b" * 200))


async def test_a_full_queue_answers_before_it_reads(model: Path, log: CapturedLogs) -> None:
    """A call is refused though its message has not come, and counted."""
    async with running(model, "--max-queue-requests", "1") as run:
        first = run.generate(Trigger.SILENT.value)
        await until(lambda: run.server._admission.num_waiting == 1)
        method = run.channel.stream_stream("/emberline.v1.InferenceService/Generate")
        error = await error_of(method(timeout=HANG_S))
        assert (error.code(), details(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert run.server._observation.metrics.rejections.values() == [((), 1)]
        await gone(first)


# Messages


@pytest.mark.parametrize("interval", [1, 7, 20, 1024])
async def test_a_stream_interval_makes_fewer_messages_of_the_same_tokens(
    model: Path, log: CapturedLogs, interval: int
) -> None:
    """Each message but the last has at least so many tokens; text, tokens and usage are those without it."""
    output = inference_pb2.OutputOptions(token_ids=True, stream_interval=interval)
    async with running(model) as run:
        deltas = await rest_of(run.generate(1, 2, max_tokens=50, output=output))
    assert [token.id for delta in deltas for token in delta.tokens] == tokens_of((1, 2), 50)
    assert "".join(delta.text for delta in deltas) == text_of(model, tokens_of((1, 2), 50))
    assert all(len(delta.tokens) >= interval for delta in deltas[:-1])
    assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert deltas[-1].usage.completion == 50
    assert deltas[0].prompt.count == 2


async def test_a_stop_string_does_not_wait_for_the_interval(model: Path, log: CapturedLogs) -> None:
    """The one message of a short answer has what came before the stop string, and the finish."""
    whole = text_of(model, tokens_of((1, 2), 60))
    stopping = inference_pb2.StoppingOptions(max_tokens=4000, stop_strings=[whole[20:23]])
    async with running(model) as run:
        (only,) = await rest_of(
            run.generate(1, 2, stopping=stopping, output=inference_pb2.OutputOptions(stream_interval=1000))
        )
    assert (only.text, only.finish.reason) == (whole[:20], inference_pb2.FINISH_REASON_STOP_STRING)
    assert only.usage.completion == 23


async def test_a_reader_that_never_comes_back_is_told_and_holds_nothing(model: Path, log: CapturedLogs) -> None:
    """After the time for readers the engine has forgotten the request; when its caller reads at last it finds
    SLOW_READER behind what was on its way."""
    async with (
        running(model, "--reader-timeout", "0.3") as run,
        grpc.aio.insecure_channel(run.server.address, NARROW) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(1, 2, max_tokens=4000, request_id="l" * 128), timeout=HANG_S)
        await until(lambda: run.server._journal)
        await until(lambda: not run.server._journal)
        await run.wait_idle()
        error = await error_of(call)
        assert (error.code(), details(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    (line,) = log.of("request finished")
    assert (line["error"], line["status"]) == ("SlowReader", "RESOURCE_EXHAUSTED")
