"""The way of a prompt's logprobs from the engine to the caller's first message."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import pytest

from emberline.v1 import inference_pb2
from scheduler.messages import FinishReason, SamplingParams, SequenceOutput, SequenceStart, StoppingParams, Submit
from service import convert
from service.account import Account
from service.answer import Answer, SequenceState
from service.journal import JournalEntry
from service.request import GenerateRequest, OutputOptions, TokenInput
from service.sequence_text import SequenceText
from tests.service import tiny_tokenizers
from tests.service.fake_engine import Trigger, prompt_logprobs_of, tokens_of
from tests.service.front_end import error_of, rest_of, running, text_of
from tests.service.support import CapturedLogs

OUTPUT = inference_pb2.OutputOptions(prompt_logprobs=2)
PROMPT = (1, 2, 3, 4)


def check_prompt(prompt: inference_pb2.PromptInfo, token_ids: tuple[int, ...] = PROMPT, num_top: int = 2) -> None:
    assert [token.id for token in prompt.tokens] == list(token_ids)
    first, *others = prompt.tokens
    assert not first.HasField("logprob")
    assert not first.HasField("rank")
    assert not first.top
    for position, token in enumerate(others, 1):
        assert token.logprob == pytest.approx(-position / 100)
        assert token.rank == position
        assert [(best.id, best.logprob) for best in token.top] == [(rank, -0.5) for rank in range(1, num_top + 1)]


async def test_the_first_message_has_every_prompt_token(model: Path, log: CapturedLogs) -> None:
    """All of them, the first one without a logprob; no other message has any; output logprobs are another wish."""
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(*PROMPT, max_tokens=20, output=OUTPUT)]
    check_prompt(deltas[0].prompt)
    assert deltas[0].prompt.count == 4
    assert not any(delta.HasField("prompt") for delta in deltas[1:])
    assert not any(delta.tokens for delta in deltas)
    assert "".join(delta.text for delta in deltas) == text_of(model, tokens_of(PROMPT, 20))


async def test_complete_has_them_too(model: Path, log: CapturedLogs) -> None:
    """In its prompt info."""
    async with running(model) as run:
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            stopping=inference_pb2.StoppingOptions(max_tokens=3),
            output=OUTPUT,
        )
        answer = await run.inference.Complete(message)
    check_prompt(answer.prompt)
    assert len(answer.completions) == 1


async def test_with_max_tokens_0_the_prompt_is_all_there_is(model: Path, log: CapturedLogs) -> None:
    """One message: the prompt, MAX_TOKENS, no token, and the usage says so."""
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(*PROMPT, max_tokens=0, output=OUTPUT)]
        refused = await error_of(run.generate(*PROMPT, max_tokens=0))
    (only,) = deltas
    check_prompt(only.prompt)
    assert only.text == ""
    assert only.finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (only.usage.prompt, only.usage.completion) == (4, 0)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_replayed_stream_tells_its_prompt_once(model: Path, log: CapturedLogs) -> None:
    """What the first engine told is not asked of the next one."""
    flags = ["--on-engine-death", "replay", "--max-engine-restarts", "3"]
    async with running(model, *flags) as run:
        call = run.generate(*PROMPT, max_tokens=300, output=OUTPUT)
        deltas = [await call.read()]
        await error_of(run.generate(Trigger.SIGKILL, resume_on_engine_death=False))
        deltas += await rest_of(call)
        assert log.of("fatal error")
    check_prompt(deltas[0].prompt)
    assert not any(delta.HasField("prompt") for delta in deltas[1:])
    assert sum(len(delta.text) for delta in deltas) == 300


async def test_a_stop_string_in_resumed_tokens_does_not_spare_the_prompt(model: Path, log: CapturedLogs) -> None:
    """The text was over before the call began; its prompt is scored all the same."""
    tokens = tokens_of(PROMPT, 6)
    stop = text_of(model, tokens)[3:5]
    stopping = inference_pb2.StoppingOptions(max_tokens=50, stop_strings=[stop])
    async with running(model) as run:
        call = run.generate(*PROMPT, stopping=stopping, resume_token_ids=tokens, output=OUTPUT)
        (only,) = [delta async for delta in call]
        await run.wait_idle()
    check_prompt(only.prompt)
    assert (only.text, only.finish.reason) == ("", inference_pb2.FINISH_REASON_STOP_STRING)
    assert only.usage.completion == 0


async def test_what_one_message_cannot_hold_is_refused(model: Path, log: CapturedLogs) -> None:
    """Before an engine hears of it, with the field's name."""
    async with running(model) as run:
        limits = run.server._backend.limits
        assert limits is not None
        run.server._backend.limits = dataclasses.replace(limits, max_prompt_logprob_entries=11)
        error = await error_of(run.generate(*PROMPT, output=OUTPUT))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output.prompt_logprobs" in str(error.details())


def test_a_journal_asks_for_the_prompt_until_it_has_been_told() -> None:
    """Before: the next attempt is to tell it. After, none is, and the rest of the sampling is as it was."""
    sampling = SamplingParams(seed=3, num_prompt_logprobs=1)
    submit = Submit(1, PROMPT, sampling, StoppingParams(9), (SequenceStart(0), SequenceStart(1)))
    entry = JournalEntry(submit)
    assert entry.next_attempt(0) == submit
    entry.record(SequenceOutput(1, 0, (5,), num_cached_tokens=0, prompt_logprobs=prompt_logprobs_of(submit)))
    told = entry.next_attempt(0)
    assert told.sampling == SamplingParams(seed=3)
    assert told.sequences == (SequenceStart(0, (5,)), SequenceStart(1))


def make_answer(directory: Path, *, stream_interval: int = 1) -> Answer:
    """Of two sequences, with the prompt scored."""
    tokenizer = tiny_tokenizers.load(directory, tiny_tokenizers.byte_level())
    request = GenerateRequest(
        request_id="mine",
        prompt=TokenInput(PROMPT),
        sampling=SamplingParams(num_prompt_logprobs=1),
        max_tokens=9,
        output=OutputOptions(stream_interval=stream_interval),
        num_sequences=2,
    )
    submit = Submit(1, PROMPT, request.sampling, StoppingParams(9), (SequenceStart(0), SequenceStart(1)))
    states = [SequenceState(SequenceText(tokenizer, PROMPT)) for _ in range(2)]
    return Answer(request, submit, states, Account(label="mine", num_prompt_tokens=4))


def test_the_prompt_goes_out_at_once_however_long_the_interval(tmp_path: Path) -> None:
    """Neither `stream_interval` nor a token without text holds it back: no other sequence's message may be first."""
    answer = make_answer(tmp_path, stream_interval=8)
    parts = list(convert.prompt_tokens(PROMPT, prompt_logprobs_of(answer.submit)))
    assert len(list(answer.take_prompt(prompt_logprobs_of(answer.submit)))) == len(parts)
    (first,) = answer.assemble([SequenceOutput(1, 0, (5,)), SequenceOutput(1, 1, (6,))])
    assert (first.index, first.prompt.count) == (0, 4)
    check_prompt(first.prompt, num_top=1)


def test_siblings_that_are_quicker_than_the_scored_sequence_wait_for_it(tmp_path: Path) -> None:
    """Whatever they have said, their end included, comes behind the message with the prompt, and whole."""
    answer = make_answer(tmp_path)
    assert list(answer.assemble([SequenceOutput(1, 1, (6,))])) == []
    end = SequenceOutput(1, 1, (7,), finish_reason=FinishReason.MAX_TOKENS)
    for _ in answer.take_prompt(prompt_logprobs_of(answer.submit)):
        pass
    first, second = answer.assemble([end, SequenceOutput(1, 0, (5,))])
    check_prompt(first.prompt, num_top=1)
    assert (first.index, second.index, len(second.text)) == (0, 1, 2)
    assert second.HasField("finish")
    assert not second.HasField("prompt")


def test_where_the_time_is_over_before_the_prompt_is_scored_the_rest_is_told(tmp_path: Path) -> None:
    """TIME_LIMIT for each sequence, the tokens that had come, and no prompt tokens."""
    answer = make_answer(tmp_path)
    assert list(answer.assemble([SequenceOutput(1, 1, (6,))])) == []
    messages = list(answer.cut())
    assert answer.is_finished
    assert sum(len(message.text) for message in messages) == 1
    assert not any(message.prompt.tokens for message in messages)
    assert messages[0].prompt.count == 4
