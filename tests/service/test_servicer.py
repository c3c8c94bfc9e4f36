"""The rpc bodies, over real gRPC and with made-up tokens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2, tokenizer_pb2
from service import convert
from service.servicer import InferenceServicer
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.front_end import CANARY, Running, details, error_of, request, running, text_of
from tests.service.support import HANG_S, CapturedLogs, fake_engine, until


async def test_generate_streams_the_tokens_of_its_request(model: Path, log: CapturedLogs) -> None:
    """The concatenated text is that of the engine's tokens; the first message has the prompt's facts, the last the
    finish and the usage; the request's one log line counts them."""
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(1, 2, 3, max_tokens=20, request_id="mine")]
    expected = tokens_of((1, 2, 3), 20)
    assert "".join(delta.text for delta in deltas) == text_of(model, expected)
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert deltas[0].prompt.count == 3
    assert not any(delta.HasField("prompt") for delta in deltas[1:])
    assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (deltas[-1].usage.prompt, deltas[-1].usage.completion) == (3, 20)
    assert not any(delta.HasField("finish") or delta.HasField("usage") for delta in deltas[:-1])
    (line,) = log.of("request finished")
    assert line["request_id"] == "mine"
    assert (line["finish"], line["num_prompt_tokens"], line["num_output_tokens"]) == ("MAX_TOKENS", 3, 20)


async def test_complete_is_the_fold_of_generate(model: Path, log: CapturedLogs) -> None:
    """The unary answer holds the same text, tokens, finish and usage as the stream."""
    output = inference_pb2.OutputOptions(token_ids=True)
    async with running(model) as run:
        answer = await run.inference.Complete(request(4, 5, max_tokens=9, output=output))
    (completion,) = answer.completions
    assert [token.id for token in completion.tokens] == tokens_of((4, 5), 9)
    assert completion.text == text_of(model, tokens_of((4, 5), 9))
    assert completion.finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (answer.usage.prompt, answer.usage.completion, answer.prompt.count) == (2, 9, 2)
    assert answer.request_id


async def test_a_stop_string_ends_the_request_in_the_engine(model: Path, log: CapturedLogs) -> None:
    """The text ends before the stop string, tokens past it are not counted, and the engine's blocks are freed."""
    whole = text_of(model, tokens_of((1, 2), 60))
    stop = whole[20:23]
    async with running(model) as run:
        stopping = inference_pb2.StoppingOptions(max_tokens=4000, stop_strings=[stop])
        deltas = [delta async for delta in run.generate(1, 2, stopping=stopping)]
        await run.wait_idle()
    assert "".join(delta.text for delta in deltas) == whole[:20]
    assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_STOP_STRING
    assert deltas[-1].finish.matched == stop
    assert deltas[-1].usage.completion == 23


async def test_a_stop_string_ends_one_sequence_and_not_its_siblings(model: Path, log: CapturedLogs) -> None:
    """The engine goes on with the others alone; usage counts what each was given, and comes with the last of them."""
    texts = [text_of(model, tokens_of((1, 2), 40, index)) for index in range(3)]
    stop = texts[1][5:9]
    expected = [text.split(stop)[0] for text in texts]
    assert [len(text) for text in expected] != [40] * 3
    async with running(model) as run:
        stopping = inference_pb2.StoppingOptions(max_tokens=40, stop_strings=[stop])
        sampling = inference_pb2.SamplingOptions(n=3)
        told = mock.Mock(wraps=run.server._backend.dispatcher.end_sequence)
        with mock.patch.object(run.server._backend.dispatcher, "end_sequence", told):
            deltas = [delta async for delta in run.generate(1, 2, stopping=stopping, sampling=sampling)]
        await run.wait_idle()
    given = ["".join(delta.text for delta in deltas if delta.index == index) for index in range(3)]
    assert given == expected
    assert sorted(delta.index for delta in deltas if delta.HasField("finish")) == [0, 1, 2]
    assert [delta.HasField("usage") for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    num_tokens = sum(len(text) + (4 if len(text) < 40 else 0) for text in expected)
    assert deltas[-1].usage.completion == num_tokens
    ended = {call.args[1] for call in told.call_args_list}
    assert 1 in ended


async def test_resumed_tokens_are_not_sent_again(model: Path, log: CapturedLogs) -> None:
    """A resumed stream sends what would have followed; one that had reached max_tokens ends at once."""
    tokens = tokens_of((1, 2), 10)
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(1, 2, max_tokens=10, resume_token_ids=tokens[:6])]
        over = [delta async for delta in run.generate(1, 2, max_tokens=10, resume_token_ids=tokens)]
    assert "".join(delta.text for delta in deltas) == text_of(model, tokens)[6:]
    assert deltas[-1].usage.completion == 4
    (only,) = over
    assert (only.text, only.finish.reason) == ("", inference_pb2.FINISH_REASON_MAX_TOKENS)
    assert (only.usage.prompt, only.usage.completion) == (2, 0)


@pytest.mark.parametrize(
    ("resumed", "reason", "token_id"),
    [([3, 150], "EOS", 150), ([3, 9], "STOP_TOKEN", 9), ([3, 4, 5], "MAX_TOKENS", None)],
)
async def test_resumed_tokens_that_had_reached_an_end_end_so_again(
    model: Path, log: CapturedLogs, resumed: list[int], reason: str, token_id: int | None
) -> None:
    """The engine tells how; the only message has no text and no tokens, and names the token that ended it."""
    stopping = inference_pb2.StoppingOptions(max_tokens=3, stop_token_ids=[9])
    async with running(model) as run:
        (only,) = [delta async for delta in run.generate(1, 2, stopping=stopping, resume_token_ids=resumed)]
    assert (only.text, len(only.tokens), only.usage.completion, only.prompt.count) == ("", 0, 0, 2)
    assert only.finish.reason == inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    assert only.finish.HasField("matched_token_id") == (token_id is not None)
    assert only.finish.matched_token_id == (token_id or 0)


async def test_a_stop_string_lets_go_of_the_engine_before_its_text_is_read(model: Path, log: CapturedLogs) -> None:
    """While the last delta waits for its reader, the journal has forgotten the request and the engine has been told."""
    whole = text_of(model, tokens_of((1, 2), 60))
    stopping = inference_pb2.StoppingOptions(max_tokens=4000, stop_strings=[whole[20:23]])
    async with running(model) as run:
        servicer = InferenceServicer(run.server._backend)
        context = mock.Mock(grpc.aio.ServicerContext)
        context.time_remaining.return_value = None
        context.invocation_metadata.return_value = ()
        deltas = servicer.Generate(request(1, 2, stopping=stopping), context)
        async with asyncio.timeout(HANG_S), contextlib.aclosing(deltas):
            async for delta in deltas:
                if delta.HasField("finish"):
                    assert len(run.server._journal) == 0
                    await until(lambda: run.server._supervisor.replicas[0].stats.num_running == 0)
                    break


async def test_tokenize_keeps_no_prompt_waiting(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many calls of Tokenize are at work, a prompt is encoded at once."""
    go_on = threading.Event()
    async with running(model) as run:
        tokenizer = run.server._backend.tokenizer
        assert tokenizer is not None
        monkeypatch.setattr(tokenizer, "pieces", lambda _: go_on.wait(HANG_S) and [])
        message = tokenizer_pb2.TokenizeRequest(text="the", with_pieces=True)
        calls = [asyncio.ensure_future(_tokenize(run, message)) for _ in range(8)]
        await until(lambda: run.server._backend.tool_workers.num_jobs == 8)
        assert [delta async for delta in run.generate(text="the")]
        go_on.set()
        await asyncio.wait_for(asyncio.gather(*calls), HANG_S)


async def _tokenize(run: Running, message: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
    return await run.tokenizer.Tokenize(message)


async def test_long_options_take_room_in_the_queue(model: Path, log: CapturedLogs) -> None:
    """Their entries count like tokens, from before the prompt is tokenized until the first output."""
    sampling = inference_pb2.SamplingOptions(allowed_token_ids=range(900), logit_bias=dict.fromkeys(range(5), 1.0))
    async with running(model, "--max-queue-tokens", "1000") as run:
        silent = run.generate(Trigger.SILENT.value, sampling=sampling)
        await until(lambda: run.server._admission.num_waiting_tokens == 906)
        error = await error_of(run.generate(1, sampling=sampling))
        assert details(error)[0] == "QUEUE_FULL"
        assert [delta async for delta in run.generate(1)]
        silent.cancel()


async def test_options_over_the_whole_vocabulary_are_read_off_the_loop(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked like any others, in a thread; what is wrong in them is told."""
    threads = []
    check = convert.generate_request

    def spying_check(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return check(*arguments, **options)

    monkeypatch.setattr("service.convert.generate_request", spying_check)
    monkeypatch.setattr("service.servicer.OPTIONS_ON_LOOP_MAX", 3)
    async with running(model) as run:
        for num_options in (3, 4):
            sampling = inference_pb2.SamplingOptions(allowed_token_ids=range(num_options))
            assert [delta async for delta in run.generate(1, sampling=sampling)]
        wrong = inference_pb2.SamplingOptions(allowed_token_ids=range(998, 1002))
        error = await error_of(run.generate(1, sampling=wrong))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    on_loop = [thread is threading.main_thread() for thread in threads]
    assert on_loop == [True, False, False]


async def test_a_prompt_at_its_limit_can_be_resumed(model: Path, log: CapturedLogs) -> None:
    """Resumed tokens are output: a bound of prompts below the context does not hold them back."""
    tokens = tokens_of((1, 2), 10)
    async with running(model, "--max-prompt-tokens", "2") as run:
        deltas = [delta async for delta in run.generate(1, 2, max_tokens=10, resume_token_ids=tokens[:6])]
        error = await error_of(run.generate(1, 2, 3))
    assert deltas[-1].usage.completion == 4
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_stream_is_aborted(model: Path, log: CapturedLogs) -> None:
    """A client that goes away between messages gives back its place and its blocks; the journal forgets it, and no
    error is logged."""
    async with running(model, engine=fake_engine(step_s=0)) as run:
        calls = [run.generate(1, n, max_tokens=4000) for n in range(20)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        await run.wait_idle()
        assert len(run.server._journal) == 0
        async with asyncio.timeout(HANG_S):
            await run.server._admission.idle.wait()
        finished = log.of("request finished")
        assert [line.get("error") for line in finished] == ["Cancelled"] * 20
    errors = [record for record in log.records if record["level"] in ("error", "critical")]
    assert not errors, errors


async def test_a_client_that_goes_away_while_it_stalls_its_stream_gives_back_its_place(
    model: Path, log: CapturedLogs
) -> None:
    """A call whose message waits for a reader that never reads is cleaned up as soon as its client is gone, not when a
    garbage collector finds it."""
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with running(model) as run, grpc.aio.insecure_channel(run.server.address, narrow) as channel:
        label = "l" * 128
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(1, max_tokens=4000, request_id=label), timeout=HANG_S)
        await call.read()
        (stream,) = run.server._dispatcher._streams.values()
        await until(lambda: stream.is_paused)  # as many steps as it may have without coming back for more
        gc.disable()
        try:
            call.cancel()
            async with asyncio.timeout(HANG_S):
                await run.server._admission.idle.wait()
        finally:
            gc.enable()


async def test_a_label_is_unique_among_live_calls(model: Path, log: CapturedLogs) -> None:
    """A second live call with the same request_id is told ALREADY_EXISTS; after the end the label is free."""
    async with running(model) as run:
        first = run.generate(1, max_tokens=4000, request_id="same")
        await first.read()
        error = await error_of(run.generate(1, request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        first.cancel()
        await run.wait_idle()
        assert [delta async for delta in run.generate(1, request_id="same")]


async def test_a_full_queue_is_told_with_pushback(model: Path, log: CapturedLogs) -> None:
    """Requests over the bound get RESOURCE_EXHAUSTED and a time to come back; those within it are served."""
    async with running(model, "--max-queue-requests", "2") as run:
        silent = [run.generate(Trigger.SILENT.value, n) for n in range(2)]
        await until(lambda: run.server._admission.num_waiting == 2)
        error = await error_of(run.generate(1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reason, _, pushback = details(error)
        assert reason == "QUEUE_FULL"
        assert int(pushback or 0) > 0
        silent[0].cancel()
        await run.wait_idle()
        await until(lambda: run.server._admission.num_waiting <= 1)
        assert [delta async for delta in run.generate(1)]


async def test_our_own_bug_leaks_nothing(model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception is INTERNAL with an incident id that one log line explains, without the exception's
    text, which may hold a caller's, and without a traceback."""

    def broken(*_: object, **__: object) -> None:
        raise KeyError(CANARY)

    async with running(model) as run:
        monkeypatch.setattr("service.convert.to_submit", broken)
        error = await error_of(run.generate(text=f"{CANARY} one"))
        assert error.code() is grpc.StatusCode.INTERNAL
        reason, metadata, _ = details(error)
        assert reason == "INTERNAL"
        assert run.server._admission.num_live == 0
    (record,) = log.of("internal error")
    assert record["incident_id"] == metadata["incident_id"]
    assert record["exception_type"] == "builtins.KeyError"
    assert CANARY not in log.text + str(error)
    assert "Traceback" not in log.text


async def test_text_and_chat_reach_the_engine_as_tokens(model: Path, log: CapturedLogs) -> None:
    """Text and conversations are encoded as Tokenize tells, and Detokenize turns ids back."""
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    async with running(model) as run:
        for fields in ({"text": "over there"}, {"chat": chat}):
            ids = tuple((await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(**fields))).ids)
            message = inference_pb2.GenerateRequest(stopping=inference_pb2.StoppingOptions(max_tokens=3), **fields)
            answer = await run.inference.Complete(message)
            assert answer.completions[0].text == text_of(model, tokens_of(ids, 3))
            assert answer.usage.prompt == len(ids)
        ids = (await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="over there"))).ids
        back = await run.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=ids))
        assert back.text == "over there"


async def test_info_tells_what_is_served(model: Path, log: CapturedLogs) -> None:
    """GetModelInfo and GetServerInfo tell the engine's own facts; another model's name is NOT_FOUND."""
    async with running(model, "--max-prompt-tokens", "100") as run:
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        assert (info.model, info.model_type, info.vocab_size) == ("tiny", "fake", 1000)
        assert (info.limits.max_model_len, info.limits.max_prompt_tokens) == (4096, 100)
        assert info.limits.max_chat_messages == 1024
        assert info.capabilities.chat
        (engine,) = (await run.info.GetServerInfo(info_pb2.GetServerInfoRequest())).engines
        assert engine.state == info_pb2.ENGINE_STATE_READY
        assert engine.pid > 0
        error = await error_of(run.info.GetModelInfo(info_pb2.GetModelInfoRequest(model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
