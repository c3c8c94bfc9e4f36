from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from emberline.v1 import inference_pb2, tokenizer_pb2
from scheduler.guide_messages import GuideKind, GuideSource
from scheduler.messages import FinishReason, PromptLogprobs, SequenceStart, Submit, TokenLogprobs
from service import convert
from service.errors import FieldViolation, InvalidRequestError, UnknownModelError
from service.request import (
    ChatInput,
    ChatTurn,
    GenerateRequest,
    Limits,
    OutputOptions,
    SamplingDefaults,
    TextInput,
    TokenInput,
)

GENERATE = inference_pb2.GenerateRequest
LIMITS = Limits(vocab_size=100, max_model_len=64, max_prompt_tokens=48, max_output_tokens=32, max_request_bytes=1 << 20)


def no_seed() -> int:
    pytest.fail("a seed was drawn for a request that has one, or is not valid")


def valid(fields: dict[str, Any], **options: Any) -> GenerateRequest:
    message = ParseDict({"text": "hi", **fields}, inference_pb2.GenerateRequest())
    return convert_message(message, **options)


def convert_message(
    message: inference_pb2.GenerateRequest,
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
    draw_seed: Callable[[], int] = lambda: 7,
    limits: Limits = LIMITS,
) -> GenerateRequest:
    return convert.generate_request(
        message, served_model_name="tiny", limits=limits, defaults=defaults, draw_seed=draw_seed
    )


def violations(fields: dict[str, Any]) -> dict[str, str]:
    message = ParseDict(fields, inference_pb2.GenerateRequest())
    with pytest.raises(InvalidRequestError) as caught:
        convert_message(message, draw_seed=no_seed)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_a_bare_request_gets_every_default() -> None:
    """Text alone is enough; what is absent means what the protocol's comments say."""
    request = valid({})
    assert request.request_id is None
    assert request.prompt == TextInput("hi", add_special_tokens=True, parse_special=False)
    assert request.output == OutputOptions(text=True, token_ids=False, skip_special_tokens=True)
    assert request.max_tokens is None
    assert request.sampling.temperature == 1.0
    assert request.sampling.seed == 7
    assert request.sampling.num_logprobs is None


def test_absent_sampling_values_come_from_the_models_generation_config() -> None:
    """A value given, zero included, goes before them."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)
    sampling = valid({}, defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    given = {"temperature": 0, "topP": 1, "topK": 0, "minP": 0, "repetitionPenalty": 1}
    sampling = valid({"sampling": given}, defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0, 1)


def test_every_field_arrives() -> None:
    """Nothing that a caller sends is dropped on the way to the engine."""
    request = valid(
        {
            "requestId": "job 7",
            "model": "tiny",
            "encode": {"addSpecialTokens": False, "parseSpecial": True},
            "sampling": {
                "temperature": 0.5,
                "topP": 0.25,
                "topK": 3,
                "minP": 0.125,
                "presencePenalty": -2,
                "frequencyPenalty": 2,
                "repetitionPenalty": 100,
                "seed": 2**64 - 1,
                "n": 1,
                "logitBias": {"99": -100, "0": 100},
                "allowedTokenIds": [5, 4],
            },
            "stopping": {
                "maxTokens": 32,
                "minTokens": 2,
                "stopStrings": ["a", "é" * 512],
                "stopTokenIds": [3, 3, 9],
                "ignoreEos": True,
                "includeStop": True,
            },
            "output": {
                "text": False,
                "tokenIds": True,
                "logprobs": 20,
                "skipSpecialTokens": False,
                "streamInterval": 1,
            },
            "cache": {"bypass": True, "salt": "s" * 128},
            "priority": -100,
            "resumeTokenIds": [1, 2],
            "resumeOnEngineDeath": False,
        },
        draw_seed=no_seed,
    )
    assert request.request_id == "job 7"
    assert request.prompt == TextInput("hi", add_special_tokens=False, parse_special=True)
    assert request.output == OutputOptions(text=False, token_ids=True, skip_special_tokens=False)
    assert request.stop_strings == ("a", "é" * 512)
    assert request.include_stop
    submit = convert.to_submit(request, engine_request_id=5, prompt_token_ids=[8, 9], eos_token_ids=[2], limits=LIMITS)
    assert submit.request_id == 5
    assert submit.prompt_token_ids == (8, 9)
    assert submit.sequences == (SequenceStart(0, (1, 2)),)
    assert (submit.priority, submit.cache_salt, submit.cache_bypass) == (-100, "s" * 128, True)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 100)
    assert sampling.seed == 2**64 - 1
    assert sampling.logit_bias == ((0, 100), (99, -100))
    assert sampling.allowed_token_ids == (5, 4)
    assert sampling.num_logprobs == 20
    assert (submit.stopping.max_tokens, submit.stopping.min_tokens) == (32, 2)
    assert submit.stopping.stop_token_ids == (3, 9)
    assert submit.stopping.eos_token_ids == ()  # ignored, as asked


def test_the_other_inputs() -> None:
    """Token ids pass as they are; a conversation keeps its flags."""
    message = ParseDict({"tokenIds": {"ids": [0, 99]}}, inference_pb2.GenerateRequest())
    assert convert_message(message).prompt == TokenInput((0, 99))
    chat = {"messages": [{"role": "user", "content": ""}, {"role": "tool", "content": "x", "parseSpecial": True}]}
    message = ParseDict({"chat": {**chat, "addGenerationPrompt": False}}, inference_pb2.GenerateRequest())
    turns = (ChatTurn("user", ""), ChatTurn("tool", "x", parse_special=True))
    assert convert_message(message).prompt == ChatInput(turns, add_generation_prompt=False)


BAD_FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308)


@pytest.mark.parametrize("value", BAD_FLOATS)
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_a_float_that_is_no_sane_number_is_refused(name: str, value: float) -> None:
    """NaN, infinities and giants in any float field: a violation that names the field and its bounds."""
    message = inference_pb2.GenerateRequest(text="hi")
    setattr(message.sampling, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        convert_message(message)
    (violation,) = caught.value.violations
    assert violation.field == f"sampling.{name}"
    assert "must be in [" in violation.description


@pytest.mark.parametrize("value", BAD_FLOATS)
def test_a_bias_that_is_no_sane_number_is_refused(value: float) -> None:
    """The map's values are held to their bounds like any other float."""
    message = inference_pb2.GenerateRequest(text="hi")
    message.sampling.logit_bias[3] = value
    with pytest.raises(InvalidRequestError) as caught:
        convert_message(message)
    assert caught.value.violations[0].field == "sampling.logit_bias[3]"


def test_the_smallest_floats_do_no_harm() -> None:
    """−0.0 is 0; a temperature below 1e-5 is greedy; a top_p below single precision still keeps one token."""
    tiny = 5e-324
    options = {"temperature": -0.0, "presencePenalty": -0.0, "minP": tiny, "topP": tiny}
    sampling = valid({"sampling": options}).sampling
    assert math.copysign(1, sampling.temperature) == math.copysign(1, sampling.presence_penalty) == 1
    assert sampling.top_p == convert.TOP_P_MIN
    assert valid({"sampling": {"temperature": 9.9e-6}}).sampling.temperature == 0
    assert valid({"sampling": {"temperature": 1e-5}}).sampling.temperature == 1e-5
    assert valid({"sampling": {"temperature": tiny}}).sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"requestId": ""}, "request_id"),
        ({"requestId": "x" * 129}, "request_id"),
        ({"requestId": "a\nb"}, "request_id"),
        ({"requestId": "é"}, "request_id"),
        ({"text": None}, "input"),
        ({"tokenIds": {}}, "token_ids.ids"),
        ({"tokenIds": {"ids": [1, 100]}}, "token_ids.ids[1]"),
        ({"tokenIds": {"ids": [2**32 - 1]}}, "token_ids.ids[0]"),
        ({"tokenIds": {"ids": [1]}, "encode": {}}, "encode"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "", "content": "x"}]}}, "chat.messages[0].role"),
        ({"chat": {"messages": [{"role": "user|>\n<|system", "content": "x"}]}}, "chat.messages[0].role"),
        ({"sampling": {"temperature": -1e-9}}, "sampling.temperature"),
        ({"sampling": {"temperature": 100.1}}, "sampling.temperature"),
        ({"sampling": {"topP": 0}}, "sampling.top_p"),
        ({"sampling": {"topK": -1}}, "sampling.top_k"),
        ({"sampling": {"repetitionPenalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"sampling": {"n": -1}}, "sampling.n"),
        ({"sampling": {"n": 17}}, "sampling.n"),
        ({"sampling": {"n": 2}, "resumeTokenIds": [1]}, "resume_token_ids"),
        ({"sampling": {"logitBias": {"100": 1}}}, "sampling.logit_bias[100]"),
        ({"sampling": {"logitBias": {"1": 100.5}}}, "sampling.logit_bias[1]"),
        ({"sampling": {"allowedTokenIds": [1, 1]}}, "sampling.allowed_token_ids"),
        ({"sampling": {"allowedTokenIds": [100]}}, "sampling.allowed_token_ids[0]"),
        ({"stopping": {"maxTokens": 0}}, "stopping.max_tokens"),
        ({"stopping": {"maxTokens": -1}}, "stopping.max_tokens"),
        ({"stopping": {"maxTokens": 33}}, "stopping.max_tokens"),
        ({"stopping": {"maxTokens": 2**31 - 1}}, "stopping.max_tokens"),
        ({"stopping": {"maxTokens": 3, "minTokens": 4}}, "stopping.min_tokens"),
        ({"stopping": {"minTokens": -1}}, "stopping.min_tokens"),
        ({"stopping": {"minTokens": 33}}, "stopping.min_tokens"),
        ({"stopping": {"stopStrings": [""]}}, "stopping.stop_strings[0]"),
        ({"stopping": {"stopStrings": ["x", "é" * 513]}}, "stopping.stop_strings[1]"),
        ({"stopping": {"stopStrings": ["x"] * 17}}, "stopping.stop_strings"),
        ({"stopping": {"stopTokenIds": [100]}}, "stopping.stop_token_ids[0]"),
        ({"stopping": {"stopTokenIds": [1] * 65}}, "stopping.stop_token_ids"),
        ({"output": {"logprobs": -1}}, "output.logprobs"),
        ({"output": {"logprobs": 10**6}}, "output.logprobs"),
        ({"output": {"promptLogprobs": 21}}, "output.prompt_logprobs"),
        ({"output": {"streamInterval": 0}}, "output.stream_interval"),
        ({"output": {"streamInterval": 1025}}, "output.stream_interval"),
        ({"guided": {}}, "guided"),
        ({"guided": {"choice": {}}}, "guided.choice.options"),
        ({"guided": {"choice": {"options": ["a", ""]}}}, "guided.choice.options[1]"),
        ({"guided": {"choice": {"options": [str(number) for number in range(1025)]}}}, "guided.choice.options"),
        ({"guided": {"choice": {"options": ["é" * 20_000, "x" * 30_000]}}}, "guided.choice.options"),
        ({"guided": {"jsonObject": False}}, "guided.json_object"),
        ({"guided": {"jsonSchema": ""}}, "guided.json_schema"),
        ({"guided": {"regex": "x" * 65_537}}, "guided.regex"),
        ({"guided": {"grammar": "é" * 32_769}}, "guided.grammar"),
        ({"guided": {"regex": "a"}, "stopping": {"ignoreEos": True}}, "stopping.ignore_eos"),
        ({"cache": {"salt": "é" * 65}}, "cache.salt"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"maxQueueTime": "0s"}, "max_queue_time"),
        ({"maxTime": "-1s"}, "max_time"),
        ({"resumeTokenIds": [1, 100]}, "resume_token_ids[1]"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    """One violation, of the field at fault."""
    if not {"tokenIds", "chat"} & fields.keys():
        fields = {"text": "hi", **fields}
    fields = {name: value for name, value in fields.items() if value is not None}
    assert list(violations(fields)) == [field]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokenIds": {"ids": [100] * 65}}, "token_ids.ids"),
        ({"text": "hi", "resumeTokenIds": [100] * 65}, "resume_token_ids"),
        ({"text": "hi", "sampling": {"allowedTokenIds": [100] * 101}}, "sampling.allowed_token_ids"),
        ({"text": "hi", "stopping": {"stopTokenIds": [100] * 65}}, "stopping.stop_token_ids"),
        ({"chat": {"messages": [{"role": ""}] * 1025}}, "chat.messages"),
    ],
)
def test_what_is_too_long_is_refused_without_a_look_inside(fields: dict[str, Any], field: str) -> None:
    """A list beyond any legal length is refused by its length alone: its entries, all wrong here, are not looked at,
    for a message can hold millions of them and the loop does the looking.
    """
    assert list(violations(fields)) == [field]


def test_all_violations_come_in_one_answer() -> None:
    """A caller need not find them one by one, and valid options do not hide them."""
    found = violations(
        {
            "sampling": {"temperature": -1, "topP": 2, "n": 2},
            "stopping": {"maxTokens": 0},
            "guided": {"jsonObject": True},
            "priority": 500,
        }
    )
    assert set(found) == {"input", "sampling.temperature", "sampling.top_p", "stopping.max_tokens", "priority"}
    assert found["priority"] == "must be in [-100, 100]"


def test_a_list_full_of_bad_ids_makes_a_short_answer() -> None:
    """Violations of one list are counted, not listed one by one."""
    found = violations({"tokenIds": {"ids": [100] * 60}})
    assert len(found) == convert.NUM_VIOLATIONS_PER_LIST_MAX + 1
    assert found["token_ids.ids"] == "60 ids are not in [0, 100)"


def to_submit(request: GenerateRequest, prompt: list[int], limits: Limits = LIMITS) -> Submit:
    return convert.to_submit(request, engine_request_id=1, prompt_token_ids=prompt, eos_token_ids=(), limits=limits)


def test_logprobs_of_the_prompt_reach_the_submit_and_may_be_all_that_is_asked() -> None:
    """Absent is not 0; with them max_tokens may be 0, and min_tokens can then be nothing else."""
    assert valid({}).sampling.num_prompt_logprobs is None
    request = valid({"output": {"promptLogprobs": 0}, "stopping": {"maxTokens": 0}})
    assert (request.sampling.num_prompt_logprobs, request.max_tokens) == (0, 0)
    submit = to_submit(request, [1, 2, 3])
    assert (submit.sampling.num_prompt_logprobs, submit.stopping.max_tokens) == (0, 0)
    impossible = {"text": "hi", "output": {"promptLogprobs": 3}, "stopping": {"maxTokens": 0, "minTokens": 1}}
    assert list(violations(impossible)) == ["stopping.min_tokens"]


def test_logprobs_of_the_prompt_are_bounded_by_what_one_message_may_hold() -> None:
    """Prompt tokens times one more than the value; one entry more than the bound is refused with both numbers."""
    limits = dataclasses.replace(LIMITS, max_prompt_logprob_entries=20 * 3)
    request = valid({"output": {"promptLogprobs": 2}}, limits=limits)
    assert to_submit(request, [1] * 20, limits).sampling.num_prompt_logprobs == 2
    with pytest.raises(InvalidRequestError) as caught:
        to_submit(request, [1] * 21, limits)
    (violation,) = caught.value.violations
    assert violation.field == "output.prompt_logprobs"
    assert "63" in violation.description
    assert "60" in violation.description
    assert to_submit(valid({}), [1] * 48, dataclasses.replace(limits, max_prompt_logprob_entries=1))


def test_the_largest_answer_of_prompt_logprobs_is_within_what_libraries_take() -> None:
    """At the bound, with ids and ranks of three bytes, the message is below gRPC's 4 MiB, however the entries are
    shared out.
    """
    most = Limits(1, 1, 1, 1, 1).max_prompt_logprob_entries
    for num_top in (0, 1, 20):
        num = most // (1 + num_top) - 1
        scores = PromptLogprobs(
            num_top,
            array("f", [-12.5]).tobytes() * num,
            array("i", [262_143]).tobytes() * num,
            array("i", [262_143]).tobytes() * num * num_top,
            array("f", [-0.5]).tobytes() * num * num_top,
        )
        response = inference_pb2.GenerateResponse()
        for part in convert.prompt_tokens([262_143] * (num + 1), scores):
            assert sum(1 + len(token.top) for token in part) <= convert.PROMPT_ENTRIES_PER_PART
            response.prompt.tokens.extend(part)
        assert len(response.prompt.tokens) == num + 1
        assert response.ByteSize() < 4 * 1024 * 1024 - 64 * 1024


def test_another_model_is_not_found_and_none_is_any() -> None:
    """Empty and absent mean whichever is served."""
    assert valid({"model": ""}).prompt == valid({"model": "tiny"}).prompt
    with pytest.raises(UnknownModelError):
        valid({"model": "other", "sampling": {"temperature": -1}})


def submit_of(fields: dict[str, Any], prompt: list[int], eos: tuple[int, ...] = (2,)) -> Any:
    return convert.to_submit(
        valid(fields), engine_request_id=1, prompt_token_ids=prompt, eos_token_ids=eos, limits=LIMITS
    )


def test_an_absent_max_tokens_is_the_limit_of_outputs() -> None:
    """The engine ends what fills the context before; its reason is then the true one."""
    assert submit_of({}, [1]).stopping.max_tokens == 32
    assert submit_of({}, [1]).stopping.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("num_prompt", "num_resumed", "field"),
    [
        (0, 0, "text"),
        (48, 0, None),
        (49, 0, "text"),
        (48, 16, None),
        (48, 17, "resume_token_ids"),
        (1, 63, None),
        (1, 64, "resume_token_ids"),
        (0, 3, "text"),
    ],
)
def test_a_prompt_is_held_to_its_limit(num_prompt: int, num_resumed: int, field: str | None) -> None:
    """Empty, and one over: refused, with the number and the bound. Resumed tokens are output: a prompt at its limit may
    have as many as the context has room for."""
    fields = {"resumeTokenIds": [1] * num_resumed}
    if field is None:
        assert len(submit_of(fields, [1] * num_prompt).prompt_token_ids) == num_prompt
        return
    with pytest.raises(InvalidRequestError) as caught:
        submit_of(fields, [1] * num_prompt)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("fields", [{}, {"text": None, "chat": {"messages": [{"role": "user"}]}}])
def test_a_prompt_is_held_to_the_models_vocabulary(fields: dict[str, Any]) -> None:
    """A tokenizer may know tokens that its model has no row for: such an id never reaches an engine."""
    request = valid({}) if not fields else convert_message(ParseDict({"chat": fields["chat"]}, GENERATE()))
    options = {"engine_request_id": 1, "eos_token_ids": (), "limits": LIMITS}
    assert convert.to_submit(request, prompt_token_ids=[0, 99], **options).prompt_token_ids == (0, 99)
    with pytest.raises(InvalidRequestError) as caught:
        convert.to_submit(request, prompt_token_ids=[0, 100, 1], **options)
    (violation,) = caught.value.violations
    assert violation.field == ("chat" if fields else "text")
    assert "[0, 100)" in violation.description


def test_an_end_of_sequence_that_the_model_lacks_is_left_out() -> None:
    """No engine could mask or sample it."""
    assert submit_of({"stopping": {"minTokens": 1}}, [1], eos=(2, 100, 5000)).stopping.eos_token_ids == (2,)


def test_a_text_too_long_for_any_tokenization_is_refused_before_it_is_encoded() -> None:
    """Held to its bytes where a bound is known, to nothing where none is."""
    limits = dataclasses.replace(LIMITS, max_text_bytes=10)
    for text, is_over in (("é" * 5, False), ("é" * 5 + "x", True)):
        message = inference_pb2.GenerateRequest(text=text)
        if is_over:
            with pytest.raises(InvalidRequestError) as caught:
                convert_message(message, limits=limits)
            assert [violation.field for violation in caught.value.violations] == ["text"]
        else:
            assert convert_message(message, limits=limits).prompt == TextInput(text)
    assert valid({"text": "x" * 10_000})


def test_what_is_to_be_encoded_has_one_bound_however_it_comes() -> None:
    """Text and the sum of a conversation's contents, for Generate and for Tokenize; none where none is known."""
    limits = dataclasses.replace(LIMITS, max_text_bytes=10)

    def generate(fields: dict[str, Any], limits: Limits) -> Any:
        return convert_message(ParseDict(fields, GENERATE()), limits=limits)

    def chat(*contents: str) -> dict[str, Any]:
        return {"chat": {"messages": [{"role": "user", "content": content} for content in contents]}}

    for read in (generate, tokenize):
        for inside in ({"text": "é" * 5}, chat("é" * 2, "x" * 6), chat("", "x" * 10)):
            assert read(inside, limits)
        for over, field in (({"text": "é" * 5 + "x"}, "text"), (chat("é" * 2, "x" * 7), "chat.messages")):
            with pytest.raises(InvalidRequestError) as caught:
                read(over, limits)
            assert caught.value.violations == (FieldViolation(field, "11 bytes; 48 tokens are at most 10"),)
            assert read(over, LIMITS)


def test_long_options_are_counted_without_a_look_inside() -> None:
    """Both that may be as long as the vocabulary."""
    sampling = {"logitBias": {"1": 1, "2": 1}, "allowedTokenIds": [1, 2, 3]}
    assert convert.num_option_entries(ParseDict({"sampling": sampling}, GENERATE())) == 5


def test_min_tokens_must_leave_something_to_sample() -> None:
    """Allowing nothing but stop tokens while these are masked would leave no token at all."""
    fields = {"sampling": {"allowedTokenIds": [2, 3]}, "stopping": {"minTokens": 1, "stopTokenIds": [3]}}
    with pytest.raises(InvalidRequestError) as caught:
        submit_of(fields, [1])
    assert caught.value.violations[0].field == "sampling.allowed_token_ids"
    fields["stopping"]["ignoreEos"] = True
    assert submit_of(fields, [1]).sampling.allowed_token_ids == (2, 3)


def test_tokens_are_sent_as_asked_for() -> None:
    """Nothing unless ids or logprobs are wanted; ids alone; logprobs with the best of the position."""
    entry = TokenLogprobs(-0.5, 2, (9, 4), (-0.25, -0.5))
    assert convert.tokens(valid({}), [4], None) == []
    (token,) = convert.tokens(valid({"output": {"tokenIds": True}}), [4], None)
    assert token == inference_pb2.Token(id=4)
    (token,) = convert.tokens(valid({"output": {"logprobs": 2}}), [4], [entry])
    assert (token.id, token.logprob, token.rank) == (4, -0.5, 2)
    assert [(top.id, top.logprob) for top in token.top] == [(9, -0.25), (4, -0.5)]


def test_finish_reasons_have_the_protocols_numbers() -> None:
    """Each of the engine's reasons has its name in the protocol, and only UNSPECIFIED is beside them."""
    names = {f"FINISH_REASON_{reason.name}": int(reason) for reason in FinishReason}
    assert {"FINISH_REASON_UNSPECIFIED": 0, **names} == dict(inference_pb2.FinishReason.items())
    finish = convert.finish(FinishReason.STOP_STRING, matched="x")
    assert (finish.reason, finish.matched, finish.HasField("matched_token_id")) == (2, "x", False)
    assert convert.finish(FinishReason.EOS, matched_token_id=0).HasField("matched_token_id")


def tokenize(fields: dict[str, Any], limits: Limits = LIMITS) -> Any:
    message = ParseDict(fields, tokenizer_pb2.TokenizeRequest())
    return convert.tokenize_request(message, served_model_name="tiny", limits=limits)


def test_tokenize_requests() -> None:
    """Text may be empty; a conversation takes no encode options; one of the two is required."""
    assert tokenize({"text": "", "withPieces": True}).prompt == TextInput("")
    assert tokenize({"text": "", "withPieces": True}).with_pieces
    assert tokenize({"chat": {"messages": [{"role": "user"}]}}).prompt == ChatInput((ChatTurn("user", ""),))
    for fields in ({}, {"chat": {"messages": [{"role": "user"}]}, "encode": {}}, {"chat": {}}):
        with pytest.raises(InvalidRequestError):
            tokenize(fields)


def test_detokenize_requests() -> None:
    """Ids are held to the vocabulary and the context; special tokens are left out unless asked for."""

    def detokenize(fields: dict[str, Any]) -> Any:
        message = ParseDict(fields, tokenizer_pb2.DetokenizeRequest())
        return convert.detokenize_request(message, served_model_name="tiny", limits=LIMITS)

    assert detokenize({"ids": [0, 99]}).skip_special_tokens
    assert not detokenize({"skipSpecialTokens": False}).skip_special_tokens
    with pytest.raises(InvalidRequestError):
        detokenize({"ids": [100]})
    assert len(detokenize({"ids": [1] * 64}).token_ids) == 64
    with pytest.raises(InvalidRequestError) as caught:
        detokenize({"ids": [1] * 65})
    assert caught.value.violations == (FieldViolation("ids", "65 ids; at most 64"),)


def test_no_violation_repeats_what_the_caller_sent() -> None:
    """A canary in every string of a request turns up in no violation."""
    canary = "canary\n" * 200
    found = violations(
        {
            "requestId": canary,
            "chat": {"messages": [{"role": canary, "content": canary}] * 3},
            "stopping": {"stopStrings": [canary] * 20},
            "cache": {"salt": canary},
            "guided": {"choice": {}},
        }
    )
    assert len(found) >= 5
    assert "canary" not in repr(found)


@pytest.mark.parametrize(
    ("guided", "source"),
    [
        ({"jsonSchema": "{}"}, GuideSource(GuideKind.JSON_SCHEMA, "{}")),
        ({"jsonObject": True}, GuideSource(GuideKind.JSON_OBJECT)),
        ({"regex": "a+"}, GuideSource(GuideKind.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, GuideSource(GuideKind.GRAMMAR, 'root ::= "a"')),
        ({"choice": {"options": ["b", "a", "b"]}}, GuideSource(GuideKind.CHOICE, options=("b", "a"))),
    ],
)
def test_guides_are_taken_as_they_are(guided: dict[str, Any], source: GuideSource) -> None:
    """What they say is the compiler's business; an option given twice counts once."""
    assert valid({"guided": guided}).guide == source
    assert valid({}).guide is None
