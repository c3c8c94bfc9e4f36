"""protobuf ↔ our own requests and messages. Pure: no I/O, no clock, no randomness (the seed's source is handed in).

What lives here: the meaning of each field, every check that needs no tokenizer, and the building of responses. All
violations of a request are collected into one answer. Precedence: unknown model (NOT_FOUND), then anything invalid
(INVALID_ARGUMENT), then options that this build does not support (UNIMPLEMENTED).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emberline.v1 import inference_pb2, info_pb2, tokenizer_pb2
from scheduler.messages import FinishReason, SequenceOutput, StoppingParams, Submit, TokenLogprobs
from service.request import DetokenizeRequest, GenerateRequest, Limits, SamplingDefaults, TokenizeRequest


def generate_request(
    message: inference_pb2.GenerateRequest,
    *,
    served_model_name: str,
    limits: Limits,
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
) -> GenerateRequest:
    """Raises UnknownModelError, InvalidRequestError, UnsupportedOptionError."""
    raise NotImplementedError


def to_submit(
    request: GenerateRequest,
    *,
    engine_request_id: int,
    prompt_token_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    limits: Limits,
) -> Submit:
    """Settles what only the tokenized prompt can tell. Raises InvalidRequestError if it is empty, or too long."""
    raise NotImplementedError


def finish_of_resumed(submit: Submit) -> tuple[FinishReason, int | None] | None:
    """How the sequence had already ended with its resumed tokens: EOS or STOP_TOKEN with that token; MAX_TOKENS.
    None: it goes on.
    """
    raise NotImplementedError


def tokenize_request(
    message: tokenizer_pb2.TokenizeRequest, *, served_model_name: str, limits: Limits
) -> TokenizeRequest:
    """Raises UnknownModelError, InvalidRequestError."""
    raise NotImplementedError


def detokenize_request(
    message: tokenizer_pb2.DetokenizeRequest, *, served_model_name: str, limits: Limits
) -> DetokenizeRequest:
    """Raises UnknownModelError, InvalidRequestError."""
    raise NotImplementedError


def check_model(model: str, served_model_name: str) -> None:
    """For GetModelInfo and its like. Raises UnknownModelError."""
    raise NotImplementedError


def tokens(
    request: GenerateRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
) -> list[inference_pb2.Token]:
    """The `tokens` of a delta: empty unless token_ids or logprobs were asked for."""
    raise NotImplementedError


def finish(
    reason: FinishReason, *, matched: str | None = None, matched_token_id: int | None = None
) -> inference_pb2.Finish:
    raise NotImplementedError
