"""Whatever a message holds, conversion accepts it or says what is wrong with it, without repeating it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from hypothesis import given

from emberline.v1 import admin_pb2, inference_pb2, tokenizer_pb2
from scheduler.codec import FrameDecoder, encode
from service import convert
from service.errors import CallError
from service.request import GenerateRequest, Limits, SamplingDefaults
from service.status import STATUS_BYTES_MAX, to_status
from tests.service.generated_messages import CANARY, messages, num_examples

LIMITS = Limits(
    vocab_size=1000,
    max_model_len=64,
    max_prompt_tokens=32,
    max_output_tokens=16,
    max_request_bytes=2**22,
    max_text_bytes=64,
    max_stop_strings=2,
    max_stop_token_ids=2,
    max_chat_messages=2,
)


def converted(convert_it: Callable[[], Any]) -> Any:
    """What comes of it; None where it is refused, with a status that fits and tells nothing of the message."""
    try:
        return convert_it()
    except CallError as error:
        status, metadata = to_status(error)
        assert status.ByteSize() <= STATUS_BYTES_MAX
        told = f"{error!r} {status!r} {metadata!r} {vars(error)!r}"
        assert CANARY not in told
        return None


@num_examples(300)
@given(message=messages(inference_pb2.GenerateRequest.DESCRIPTOR))
def test_generate_requests(message: Message) -> None:
    """A request that is accepted is within its bounds, whatever it held, and can be sent to an engine."""
    request = converted(
        lambda: convert.generate_request(
            message, served_model_name="tiny", limits=LIMITS, defaults=SamplingDefaults(), draw_seed=lambda: 7
        )
    )
    if request is None:
        return
    assert isinstance(request, GenerateRequest)
    sampling = request.sampling
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    numbers += (sampling.presence_penalty, sampling.frequency_penalty, *(value for _, value in sampling.logit_bias))
    assert all(math.isfinite(number) for number in numbers)
    assert 0 < sampling.top_p <= 1
    for num_tokens in (0, 1, LIMITS.max_prompt_tokens, LIMITS.max_model_len):
        submit = converted(
            lambda num_tokens=num_tokens: convert.to_submit(  # type: ignore[misc]
                request,
                engine_request_id=1,
                prompt_token_ids=[1] * num_tokens,
                eos_token_ids=(2, 5000),
                limits=LIMITS,
            )
        )
        if submit is not None:
            assert list(FrameDecoder().feed(encode(submit))) == [submit]


@num_examples(100)
@given(message=messages(tokenizer_pb2.TokenizeRequest.DESCRIPTOR))
def test_tokenize_requests(message: Message) -> None:
    """The same of Tokenize."""
    converted(lambda: convert.tokenize_request(message, served_model_name="tiny", limits=LIMITS))


@num_examples(100)
@given(message=messages(tokenizer_pb2.DetokenizeRequest.DESCRIPTOR))
def test_detokenize_requests(message: Message) -> None:
    """The same of Detokenize."""
    converted(lambda: convert.detokenize_request(message, served_model_name="tiny", limits=LIMITS))


@num_examples(100)
@given(abort=messages(admin_pb2.AbortRequest.DESCRIPTOR), drain=messages(admin_pb2.DrainRequest.DESCRIPTOR))
def test_requests_of_administrators(abort: Message, drain: Message) -> None:
    """The same of Abort and Drain; a grace is a number of seconds within its bounds."""
    converted(lambda: convert.abort_labels(abort))
    grace_s = converted(lambda: convert.drain_grace_s(drain))
    assert grace_s is None or 0 <= grace_s <= convert.DRAIN_GRACE_S_MAX + 1
