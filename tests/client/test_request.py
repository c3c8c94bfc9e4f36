"""Keywords become the fields they name, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from emberline.client import ChatMessage
from emberline.client.request import FIELDS, Options, duration, generate_request
from emberline.v1 import inference_pb2

VALUES: dict[str, Any] = {
    "request_id": "r",
    "model": "m",
    "priority": -3,
    "max_queue_time_s": 1.5,
    "max_time_s": 2,
    "resume_token_ids": [1, 2],
    "resume_on_engine_death": False,
    "add_special_tokens": False,
    "parse_special": True,
    "add_generation_prompt": False,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 0,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "seed": 2**64 - 1,
    "n": 2,
    "logit_bias": {3: -1.0},
    "allowed_token_ids": (4, 5),
    "max_tokens": 0,
    "min_tokens": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [6],
    "ignore_eos": True,
    "include_stop": True,
    "with_text": False,
    "with_token_ids": True,
    "logprobs": 0,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "stream_interval": 4,
    "json_schema": {"type": "object"},
    "json_object": True,
    "regex": "a+",
    "grammar": "root ::= x",
    "choice": ["x", "y"],
    "cache_bypass": True,
    "cache_salt": "s",
}
GUIDES = {"json_schema", "json_object", "regex", "grammar", "choice"}
WRAPPERS = {"TokenIds", "ChatMessage", "Duration", "LogitBiasEntry"}


def leaves(message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.name in WRAPPERS:
            yield (*path, field.name)
        else:
            yield from leaves(inner, (*path, field.name))


def test_every_field_has_a_keyword_and_every_keyword_a_type() -> None:
    """All of GenerateRequest but its inputs can be said in keywords, and the typed options are exactly those."""
    inputs = {("text",), ("token_ids",), ("chat", "messages")}
    assert set(FIELDS.values()) == set(leaves(inference_pb2.GenerateRequest.DESCRIPTOR)) - inputs
    assert set(FIELDS) == set(Options.__annotations__) == set(VALUES)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_keyword_sets_its_field_alone(name: str) -> None:
    """Zeros and empty values included: what is given is present, what is not is absent."""
    chat = [("user", "u")] if name == "add_generation_prompt" else None
    request = generate_request(None if chat else "x", chat, {name: VALUES[name]})
    owner: Any = request
    *parents, field = FIELDS[name]
    for parent in parents:
        assert owner.HasField(parent)
        owner = getattr(owner, parent)
    value = getattr(owner, field)
    expected = {"max_queue_time_s": duration(1.5), "max_time_s": duration(2), "json_schema": '{"type": "object"}'}
    told = VALUES[name]
    assert value == expected.get(name, list(told) if isinstance(told, tuple | list) else told)
    if owner.DESCRIPTOR.fields_by_name[field].has_presence:
        assert owner.HasField(field)
    owner.ClearField(field)
    for parent in parents[:1]:
        if parent != "chat":
            request.ClearField(parent)
    bare = inference_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "u"}]}) if chat else None
    assert request == (bare or inference_pb2.GenerateRequest(text="x"))


def test_all_of_them_together() -> None:
    """Options do not disturb each other."""
    options = {name: value for name, value in VALUES.items() if name not in GUIDES | {"add_generation_prompt"}}
    request = generate_request([1, 2, 3], None, options)
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert request.sampling.temperature == 0
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert dict(request.sampling.logit_bias) == {3: -1.0}


def test_an_absent_option_is_absent() -> None:
    """None is never 0: the message is that of no option at all."""
    assert generate_request("x", None, dict.fromkeys(FIELDS)) == inference_pb2.GenerateRequest(text="x")


def test_empty_inputs_are_sent_for_the_server_to_judge() -> None:
    """An empty text, no tokens, no turns: which input it was is told, so that the server's answer names it."""
    assert generate_request("", None, {}).WhichOneof("input") == "text"
    assert generate_request([], None, {}).WhichOneof("input") == "token_ids"
    assert generate_request(None, [], {}).WhichOneof("input") == "chat"
    assert generate_request("x", None, {"choice": []}).guided.WhichOneof("guide") == "choice"


@pytest.mark.parametrize(
    "turn",
    [("user", "hi"), {"role": "user", "content": "hi"}, ChatMessage("user", "hi")],
    ids=["pair", "dict", "typed"],
)
def test_turns(turn: Any) -> None:
    """Three ways to say one thing."""
    (made,) = generate_request(None, [turn], {}).chat.messages
    assert (made.role, made.content) == ("user", "hi")
    assert not made.HasField("parse_special")


def test_a_turn_may_say_more() -> None:
    """The typed one has the message's third field."""
    (made,) = generate_request(None, [ChatMessage("user", "hi", parse_special=False)], {}).chat.messages
    assert made.HasField("parse_special")


@pytest.mark.parametrize(
    "turn", ["hi", ("user",), {"role": "user"}, {"role": "u", "content": "c", "name": "n"}, ("u", 1)]
)
def test_what_is_no_turn(turn: Any) -> None:
    """Nothing of a turn is dropped in silence."""
    with pytest.raises(TypeError, match="turn"):
        generate_request(None, [turn], {})


def test_what_is_no_request() -> None:
    """Contradictions and unknown words raise before anything is sent."""
    ready = inference_pb2.GenerateRequest(text="x")
    for prompt, chat, options in (
        (None, None, {}),
        ("x", [("user", "u")], {}),
        (ready, None, {"max_tokens": 1}),
        (ready, [("user", "u")], {}),
        ("x", None, {"regex": "a", "grammar": "b"}),
        ("x", None, {"max_token": 1}),
    ):
        with pytest.raises(TypeError):
            generate_request(prompt, chat, options)
    with pytest.raises(ValueError, match="range"):
        generate_request("x", None, {"seed": 2**64})


def test_a_ready_request_is_copied() -> None:
    """It is sent as it is, and stays the caller's."""
    ready = inference_pb2.GenerateRequest(text="x", sampling={"seed": 4})
    made = generate_request(ready, None, {"seed": None})
    assert made == ready
    assert made is not ready


@pytest.mark.parametrize(
    ("seconds", "parts"), [(0.25, (0, 250_000_000)), (3, (3, 0)), (-1.5, (-1, -500_000_000)), (1e-9, (0, 1))]
)
def test_durations(seconds: float, parts: tuple[int, int]) -> None:
    """Both parts have one sign, as the message wants it."""
    made = duration(seconds)
    assert (made.seconds, made.nanos) == parts
