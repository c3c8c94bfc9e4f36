"""Keywords → GenerateRequest.

What lives here: the names under which a caller reaches each field of the request, in one table. What must not: checks
of values. The server holds the rules and answers with all fields at fault at once; here only what no message can hold
(another type, an integer that is too large) raises, as protobuf does: TypeError or ValueError.

An absent keyword leaves its field absent, and the server's default holds: None is never the same as 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from emberline.v1 import inference_pb2, tokenizer_pb2


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """Usually `system`, `user` or `assistant`."""
    content: str
    parse_special: bool | None = None
    """Encode special-token strings inside the content as control tokens; by default they are plain text."""


Turn: TypeAlias = ChatMessage | Mapping[str, str] | tuple[str, str]
"""A turn; as a mapping it has `role` and `content`, as a pair it is (role, content)."""
Prompt: TypeAlias = str | Sequence[int] | inference_pb2.GenerateRequest
"""Text, token ids, or a whole request, ready made."""


class Options(TypedDict, total=False):
    """The keywords of `generate` and `complete`; what each means is told at its field in `inference.proto`."""

    request_id: str | None
    model: str | None
    priority: int | None
    max_queue_time_s: float | None
    max_time_s: float | None
    resume_token_ids: Sequence[int] | None
    resume_on_engine_death: bool | None
    # encode, for text; chat has the last one
    add_special_tokens: bool | None
    parse_special: bool | None
    add_generation_prompt: bool | None
    # sampling
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    n: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    # stopping
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    # output
    with_text: bool | None
    with_token_ids: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    stream_interval: int | None
    # guided, at most one of them
    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    # cache
    cache_bypass: bool | None
    cache_salt: str | None


FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("request_id", "model", "priority", "resume_token_ids", "resume_on_engine_death")},
    "max_queue_time_s": ("max_queue_time",),
    "max_time_s": ("max_time",),
    "add_special_tokens": ("encode", "add_special_tokens"),
    "parse_special": ("encode", "parse_special"),
    "add_generation_prompt": ("chat", "add_generation_prompt"),
    **{
        name: ("sampling", name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "n",
            "logit_bias",
            "allowed_token_ids",
        )
    },
    **{
        name: ("stopping", name)
        for name in ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop")
    },
    "stop": ("stopping", "stop_strings"),
    "with_text": ("output", "text"),
    "with_token_ids": ("output", "token_ids"),
    **{name: ("output", name) for name in ("logprobs", "prompt_logprobs", "skip_special_tokens", "stream_interval")},
    **{name: ("guided", name) for name in ("json_schema", "json_object", "regex", "grammar")},
    "choice": ("guided", "choice", "options"),
    "cache_bypass": ("cache", "bypass"),
    "cache_salt": ("cache", "salt"),
}
"""Keyword → its place in GenerateRequest. A test holds it to the protocol: every field but the input has a keyword."""
_GUIDES = ("json_schema", "json_object", "regex", "grammar", "choice")


def generate_request(
    prompt: Prompt | None, chat: Sequence[Turn] | None, options: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    """The message. Raises TypeError for what cannot be put into one."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(options.keys() - FIELDS.keys())
    if unknown:
        raise TypeError(f"unknown option: {', '.join(unknown)}")
    if isinstance(prompt, inference_pb2.GenerateRequest):
        if chat is not None or given:
            raise TypeError("a ready GenerateRequest says everything: no chat and no options beside it")
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(prompt)
        return request
    if (prompt is None) == (chat is None):
        raise TypeError("exactly one of prompt and chat is needed")
    guides = [name for name in _GUIDES if name in given]
    if len(guides) > 1:
        raise TypeError(f"only one form can be asked for, not {' and '.join(guides)}")
    request = inference_pb2.GenerateRequest()
    if chat is not None:
        request.chat.CopyFrom(_chat(chat))
    elif isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt or ())
        request.token_ids.SetInParent()
    for name, value in given.items():
        _set(request, FIELDS[name], _plain(name, value))
    return request


def tokenize_request(
    text: str | None,
    chat: Sequence[Turn] | None,
    *,
    model: str | None,
    add_special_tokens: bool | None,
    parse_special: bool | None,
    add_generation_prompt: bool | None,
    with_pieces: bool,
) -> tokenizer_pb2.TokenizeRequest:
    """The message. Raises TypeError for what cannot be put into one."""
    if (text is None) == (chat is None):
        raise TypeError("exactly one of text and chat is needed")
    request = tokenizer_pb2.TokenizeRequest(model=model, with_pieces=with_pieces)
    if chat is not None:
        request.chat.CopyFrom(_chat(chat))
    elif text is not None:
        request.text = text
    for name, value in (
        ("add_special_tokens", add_special_tokens),
        ("parse_special", parse_special),
        ("add_generation_prompt", add_generation_prompt),
    ):
        if value is not None:
            _set(request, FIELDS[name], value)
    return request


def _chat(turns: Sequence[Turn]) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[_turn(turn) for turn in turns])


def _turn(turn: Turn) -> inference_pb2.ChatMessage:
    match turn:
        case ChatMessage():
            message = inference_pb2.ChatMessage(role=turn.role, content=turn.content)
            if turn.parse_special is not None:
                message.parse_special = turn.parse_special
            return message
        case (str() as role, str() as content):
            return inference_pb2.ChatMessage(role=role, content=content)
        case {"role": str() as role, "content": str() as content} if len(turn) == 2:
            return inference_pb2.ChatMessage(role=role, content=content)
    raise TypeError("a turn is a ChatMessage, a pair (role, content) or a mapping of just role and content")


def _plain(name: str, value: Any) -> Any:
    """The value as its field holds it."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "json_schema" and not isinstance(value, str):
        return json.dumps(value)
    if name in ("max_queue_time_s", "max_time_s"):
        return duration(value)
    return value


def duration(seconds: float) -> Duration:
    """To the nanosecond."""
    nanos = round(seconds * 1e9)
    sign = -1 if nanos < 0 else 1
    return Duration(seconds=sign * (abs(nanos) // 10**9), nanos=sign * (abs(nanos) % 10**9))


def _set(message: Message, path: Sequence[str], value: Any) -> None:
    *parents, name = path
    owner: Any = message
    for parent in parents:
        owner = getattr(owner, parent)
    if isinstance(value, Message):
        getattr(owner, name).CopyFrom(value)
    elif isinstance(value, Mapping):
        getattr(owner, name).update(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        getattr(owner, name).extend(value)
        if parents:
            owner.SetInParent()  # an empty list of choices is still a choice, for the server to refuse
    else:
        setattr(owner, name, value)
