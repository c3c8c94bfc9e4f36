"""Messages become values, and deltas a whole answer."""

from __future__ import annotations

import dataclasses

import pytest

from emberline.client import results
from emberline.v1 import inference_pb2


def test_what_is_absent_is_none() -> None:
    """An empty delta has no logprob of 0, no finish and no usage."""
    message = inference_pb2.GenerateResponse(request_id="r", index=2, tokens=[inference_pb2.Token(id=5)])
    assert results.delta(message) == results.Delta("r", 2, "", (results.Token(5),))
    token = inference_pb2.Token(id=5, logprob=0.0, rank=0, top=[inference_pb2.TokenLogprob(id=1, logprob=-1.0)])
    made = results.delta(inference_pb2.GenerateResponse(tokens=[token])).tokens[0]
    assert made == results.Token(5, 0.0, 0, (results.TokenLogprob(1, -1.0),))


def test_every_field_of_the_messages_has_its_place() -> None:
    """A field that the protocol gains must be shown, or left out on purpose."""
    for message, value in (
        (inference_pb2.GenerateResponse, results.Delta),
        (inference_pb2.Token, results.Token),
        (inference_pb2.PromptInfo, results.Prompt),
        (inference_pb2.Finish, results.Finish),
        (inference_pb2.Usage, results.Usage),
        (inference_pb2.Completion, results.Completion),
        (inference_pb2.CompleteResponse, results.Answer),
    ):
        names = {field.name for field in message.DESCRIPTOR.fields}
        assert {field.name for field in dataclasses.fields(value)} == names


@pytest.mark.parametrize(("number", "name"), [(1, "EOS"), (5, "CONTEXT_LIMIT"), (77, "77")])
def test_reasons(number: int, name: str) -> None:
    """By name; one that is newer than this client is its number, and no error."""
    finish = inference_pb2.Finish.FromString(bytes([8, number]))
    assert results.delta(inference_pb2.GenerateResponse(finish=finish)).finish == results.Finish(name)


def test_deltas_of_several_sequences_make_one_answer() -> None:
    """In whatever order they come: what Complete would have said."""
    usage = results.Usage(3, 4, 0)
    prompt = results.Prompt(3, 0, 9)
    eos, full = results.Finish("EOS", matched_token_id=2), results.Finish("MAX_TOKENS")
    fold = results.Fold()
    for delta in (
        results.Delta("r", 1, "b1", (results.Token(11),), prompt),
        results.Delta("r", 0, "a1", (results.Token(1),)),
        results.Delta("r", 0, "a2", (results.Token(2),), finish=eos),
        results.Delta("r", 1, "b2", (results.Token(12),), finish=full, usage=usage),
    ):
        fold.add(delta)
    answer = fold.answer()
    first = results.Completion(0, "a1a2", eos, (results.Token(1), results.Token(2)))
    second = results.Completion(1, "b1b2", full, (results.Token(11), results.Token(12)))
    assert answer == results.Answer("r", (first, second), prompt, usage)
    assert answer.text == "a1a2"
