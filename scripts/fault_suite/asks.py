"""The load: a pool of asks of many kinds. Pure: the same seed gives the same pool.

A pool is far smaller than a run has streams, so that one undisturbed pass over it tells what every stream must be;
which ask comes next is drawn. So prompts come back, sometimes from the prefix cache, sometimes into an engine that
has none.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scripts.benchmarks.workload import log_uniform, plain_ids
from scripts.fault_suite.history import Answer, Ask

PROMPT_TOKENS = (3, 160)
OUTPUT_TOKENS = (6, 64)
SHARED_PREFIX_TOKENS = 64
FIRST_LEAVER = -1_000_000
MARKS = range(20_000, 45_000)
"""Rare words of any vocabulary that is large enough; see `stream`."""
LEAVERS = 0.12
"""Share of the streams whose clients go away before the end."""
_fresh_numbers = itertools.count(-2_000_000, -1)
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "A recipe for bread: first, mix the flour with",
    "Here is a list of the planets, with one sentence about each:\n1.",
    "Explain in simple words why the sky is blue.\n\n",
    "def fibonacci(n):\n    ",
    "Äpfel, Birnen und 日本語 — a sentence with accents: café,",
    "The three laws of thermodynamics say that",
)


def pool(seed: int, num_asks: int, vocab_size: int, avoid: Sequence[int] = ()) -> list[Ask]:
    """Asks 0 … num_asks − 1. `avoid` are ids that no prompt may hold."""
    rng = random.Random(f"{seed} asks")  # noqa: S311 no secret depends on it
    vocabulary = [token_id for token_id in plain_ids(vocab_size) if token_id not in set(avoid)]
    prefix = rng.choices(vocabulary, k=SHARED_PREFIX_TOKENS)
    return [Ask(number, _fields(rng, number, vocabulary, prefix)) for number in range(num_asks)]


def stream(seed: int, asks: Sequence[Ask], answers: Mapping[int, Answer], leavers: float = LEAVERS) -> Iterator[Ask]:
    """Asks of the pool without end; between them, asked once each, those of clients that will not stay.

    No two are alike to the server: each has a stop token of its own, one that is not in its answer. Or it would hold
    against one stream what another had been in, run it alone, and rightly convict it at the next death, though that was
    by another fault.
    """
    rng = random.Random(f"{seed} stream")  # noqa: S311 no secret depends on it
    for number in itertools.count():
        if rng.random() < leavers:
            max_tokens = log_uniform(rng, *OUTPUT_TOKENS)
            yield replace(endless(FIRST_LEAVER - number, max_tokens), leave_after_tokens=rng.randrange(max_tokens))
        else:
            yield _marked(rng.choice(asks), number, answers)


def _marked(ask: Ask, number: int, answers: Mapping[int, Answer]) -> Ask:
    """The same ask with a stop token that only this stream has, and that its answer has not."""
    answer = answers.get(ask.number)
    said = frozenset(answer.token_ids) if answer is not None else frozenset()
    token_id = MARKS.start + number % len(MARKS)
    while token_id in said:
        token_id = MARKS.start + (token_id + 7919 - MARKS.start) % len(MARKS)
    return replace(ask, fields={**ask.fields, "stopping": {**ask.fields["stopping"], "stop_token_ids": [token_id]}})


def endless(number: int, max_tokens: int = 2000) -> Ask:
    """A greedy stream that outlives what is done to it; each number has a prompt of its own."""
    return Ask(
        number,
        {
            "text": f"Once upon a time, in the {number}th year of the reign,",
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
            "output": {"token_ids": True},
        },
    )


def fresh(max_tokens: int = 2000) -> Ask:
    """The same, and no two are alike: none is taken for one that was in a dying step."""
    return endless(next(_fresh_numbers), max_tokens)


def short() -> Ask:
    """A probe: one token, soon there."""
    return fresh(1)


def leaver(num_tokens: int) -> Ask:
    """A prompt of two tokens, and a client that goes away once it has so many of a long answer."""
    fields = {name: value for name, value in endless(0).fields.items() if name != "text"}
    return Ask(FIRST_LEAVER, {**fields, "token_ids": {"ids": [504, 253]}}, leave_after_tokens=num_tokens)


def poison(number: int, token_id: int, max_tokens: int = 24) -> Ask:
    """An ask with this token in its prompt."""
    fields = dict(endless(number, max_tokens).fields)
    del fields["text"]
    return Ask(number, {**fields, "token_ids": {"ids": [504, 253, token_id, 260]}}, is_poison=True)


def _fields(rng: random.Random, number: int, vocabulary: Sequence[int], prefix: Sequence[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        **_input(rng, number, vocabulary, prefix),
        "sampling": _sampling(rng),
        "stopping": {"max_tokens": log_uniform(rng, *OUTPUT_TOKENS), "ignore_eos": rng.random() < 0.5},
        "output": {"token_ids": True},
    }
    if rng.random() < 0.15:
        fields["stopping"]["stop_strings"] = rng.sample([" the", ".", "\n\n", " and", "e a"], k=2)
    if rng.random() < 0.1:
        fields["cache"] = {"bypass": True}
    if rng.random() < 0.1:
        fields["priority"] = rng.choice([-5, 5])
    return fields


def _input(rng: random.Random, number: int, vocabulary: Sequence[int], prefix: Sequence[int]) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.35:
        return {"text": f"{number}. {rng.choice(TEXTS)}"}
    ids = rng.choices(vocabulary, k=log_uniform(rng, *PROMPT_TOKENS))
    return {"token_ids": {"ids": [*prefix, *ids] if kind < 0.6 else ids}}


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        sampling: dict[str, Any] = {"temperature": 0}
    else:
        # protojson writes 64-bit integers as strings.
        sampling = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": str(rng.randrange(2**64))}
        sampling |= rng.choice([{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}])
    if rng.random() < 0.2:
        sampling |= rng.choice([{"frequency_penalty": 0.5}, {"presence_penalty": 0.8}, {"repetition_penalty": 1.2}])
    return sampling
