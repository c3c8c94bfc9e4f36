"""How a token is chosen, seen through the wire: the seed decides, the options do what they say, logprobs are true."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Generation, ReflectionClient, Server
from tests.e2e.oracle import (
    TIE,
    Oracle,
    default_oracle,
    expect_complete,
    expect_continuation,
    generate_all,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 24
LONG_TEXT = "The keeper wrote in the log: wind from the west, all lamps lit, no ship in sight. " * 12
BYTES_OF_EMOJI = "😀😃🙂🌊"

# Their margins were looked at: in none of these streams does a draw hang by less than a thousandth on any logit, so the
# shape of a batch cannot change them.
SEEDED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8, "seed": 11},
    "hot": {"temperature": 1.0, "seed": 2**64 - 1},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "seed": 13},
    "top_k": {"temperature": 0.8, "top_k": 40, "seed": 0},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 18},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "seed": 16,
    },
    "all": {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.1,
        "presence_penalty": 0.2,
        "logit_bias": {"260": -5.0, "28": 1.5},
        "seed": 17,
    },
}
PROMPTS = [
    "The old lighthouse",
    "Once, in a harbour town,",
    LONG_TEXT,
    "A",
    "Dear diary, today",
    "List: 1, 2,",
    "I said:",
]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return default_oracle()


def seeded(name: str, **changes: Any) -> dict[str, Any]:
    """One of the seeded requests, given as token ids."""
    prompt_ids = default_oracle().encode(PROMPTS[list(SEEDED).index(name)])
    return {
        "token_ids": {"ids": prompt_ids},
        "sampling": SEEDED[name],
        "stopping": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
        "output": {"token_ids": True},
    } | changes


def company(number: int) -> dict[str, Any]:
    """A stream for others to be in a batch with; each another mixture of options."""
    return {
        "text": f"Company {number}: " + "and so on " * (number % 5 * 6),
        "sampling": {
            "temperature": number % 4 * 0.5,
            "seed": number,
            "top_k": number % 3 * 20,
            "top_p": 1.0 - number % 2 * 0.2,
            "repetition_penalty": 1.0 + number % 5 * 0.1,
        },
        "stopping": {"max_tokens": 8 + number, "ignore_eos": True},
    }


@pytest.fixture(scope="module")
def alone(client: ReflectionClient) -> dict[str, Generation]:
    """What each of the seeded requests answers when nobody else is there, from nobody's cache."""
    return {name: client.generate(**seeded(name), cache={"bypass": True}).expect_ok() for name in SEEDED}


def test_sampled_tokens_are_among_those_that_the_options_keep(alone: dict[str, Generation], oracle: Oracle) -> None:
    """Each token of a sampled stream is one that top-k, top-p and min-p could keep, after bias and penalties."""
    for name, answer in alone.items():
        fields = seeded(name)
        verdict = oracle.judge(fields["token_ids"]["ids"], answer.token_ids, fields)
        assert not verdict.faults, f"{name}: {verdict.faults}"
        expect_complete(answer, fields, oracle.eos_token_ids)
        assert answer.prompt.seed == SEEDED[name]["seed"]
    assert len({tuple(answer.token_ids) for answer in alone.values()}) == len(alone)


def test_the_same_tokens_in_the_crowd(client: ReflectionClient, alone: dict[str, Generation]) -> None:
    """The same request draws the same tokens alone and in a crowd, twice there, cached and not."""
    requests = [
        *(seeded(name) for name in SEEDED),
        *(company(number) for number in range(24)),
        *(seeded(name, cache={"bypass": True}) for name in SEEDED),
    ]
    answers = asyncio.run(generate_all(client, requests))
    for number, name in enumerate(SEEDED):
        for answer in (answers[number], answers[number - len(SEEDED)]):
            assert answer.token_ids == alone[name].token_ids, name
            assert answer.text == alone[name].text, name


@pytest.mark.parametrize("name", SEEDED)
def test_a_sampled_stream_resumes_at_any_cut(
    client: ReflectionClient, alone: dict[str, Generation], name: str, oracle: Oracle
) -> None:
    """With its seed and the tokens it has had, a stream goes on as it would have, wherever it was cut."""
    whole = alone[name]
    cuts = [1, 2, 9, 16, NUM_TOKENS - 1]
    requests = [seeded(name, resume_token_ids=whole.token_ids[:cut]) for cut in cuts]
    for cut, answer in zip(cuts, asyncio.run(generate_all(client, requests)), strict=True):
        assert answer.token_ids == whole.token_ids[cut:], f"cut at {cut}"
        expect_continuation(whole, cut, answer.text)
        expect_complete(answer, seeded(name), oracle.eos_token_ids, num_resumed=cut)


def test_a_cut_inside_a_character_loses_nothing(client: ReflectionClient, oracle: Oracle) -> None:
    """Tokens that are pieces of characters: wherever the stream is cut, the texts before and after it make the whole
    text, with no character lost, doubled or broken by the cut.
    """
    pieces = sorted(set(oracle.encode(BYTES_OF_EMOJI)))
    fields = {
        "token_ids": {"ids": oracle.encode("Faces: ")},
        "sampling": {
            "temperature": 1.0,
            "seed": 5,
            "allowed_token_ids": pieces,
            "logit_bias": dict.fromkeys(pieces, 9),
        },
        "stopping": {"max_tokens": 24, "ignore_eos": True},
        "output": {"token_ids": True},
    }
    whole = client.generate(**fields).expect_ok()
    assert set(whole.token_ids) <= set(pieces)
    assert any(ord(character) > 0xFFFF for character in whole.text), whole.text
    assert whole.text == oracle.text(fields["token_ids"]["ids"], whole.token_ids)
    cuts = range(1, 24)
    requests = [fields | {"resume_token_ids": whole.token_ids[:cut]} for cut in cuts]
    for cut, answer in zip(cuts, asyncio.run(generate_all(client, requests)), strict=True):
        assert answer.token_ids == whole.token_ids[cut:]
        expect_continuation(whole, cut, answer.text)


def test_an_absent_seed_is_returned_and_reproduces_the_output(client: ReflectionClient) -> None:
    """Who gives no seed is told the one that was drawn, on the first message; it gives the same answer again, also from
    the middle. Two requests do not draw the same.
    """
    fields = {
        "text": "Tell me something new:",
        "sampling": {"temperature": 1.0},
        "stopping": {"max_tokens": 12, "ignore_eos": True},
        "output": {"token_ids": True},
    }
    first, second = asyncio.run(generate_all(client, [fields, fields]))
    assert first.prompt.seed != second.prompt.seed
    assert first.token_ids != second.token_ids
    for answer in (first, second):
        again = fields | {"sampling": {"temperature": 1.0, "seed": answer.prompt.seed}}
        assert client.generate(**again).expect_ok().token_ids == answer.token_ids
        rest = client.generate(**again, resume_token_ids=answer.token_ids[:5]).expect_ok()
        assert rest.token_ids == answer.token_ids[5:]


def test_greedy_needs_no_seed(client: ReflectionClient) -> None:
    """At temperature 0 the seed changes nothing; the filters do not, either."""
    fields = {
        "text": "The capital of France is",
        "stopping": {"max_tokens": 8},
        "output": {"token_ids": True},
    }
    variants = [{}, {"seed": 1}, {"seed": 2, "top_k": 3}, {"top_p": 0.1, "min_p": 0.9}]
    answers = [client.generate(**fields, sampling={"temperature": 0, **variant}).expect_ok() for variant in variants]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


# --------------------------------------------------------------------------------------------------------- preemption


NUM_SEATS = 4
NUM_WAVES = 10


@pytest.fixture(scope="module")
def narrow_client() -> Iterator[ReflectionClient]:
    """A server that runs four streams at a time in a small pool."""
    flags = {"max_num_seqs": NUM_SEATS, "max_num_batched_tokens": 256, "num_kv_blocks": 72, "block_size": 16}
    with Server(**flags) as server, ReflectionClient(server.address) as connected:
        yield connected


def test_the_same_tokens_after_preemptions(narrow_client: ReflectionClient, alone: dict[str, Generation]) -> None:
    """Streams that are pushed out again and again by others of a higher priority, and computed anew, from the cache and
    without it, go on with the tokens that they would have had.
    """
    requests = [seeded(name, cache={"bypass": bypass}) for name in SEEDED for bypass in (False, True)]
    usurpers = [
        {
            "token_ids": {"ids": list(range(1000 + number, 1100 + number))},
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": 2, "ignore_eos": True},
            "priority": 5,
        }
        for number in range(NUM_SEATS)
    ]
    before = narrow_client.load().preemptions_total

    async def run() -> list[Generation]:
        progress = asyncio.Semaphore(0)
        async with narrow_client.aio_channel() as channel:
            victims = [
                asyncio.create_task(
                    narrow_client.agenerate(channel, on_response=lambda _: progress.release(), **fields)
                )
                for fields in requests
            ]
            for _ in range(NUM_WAVES):
                for _ in range(2 * NUM_SEATS):
                    await asyncio.wait_for(progress.acquire(), 240.0)
                await generate_all(narrow_client, usurpers)
            return await asyncio.gather(*victims)

    answers = asyncio.run(run())
    num_preemptions = narrow_client.load().preemptions_total - before
    print(f"{num_preemptions} preemptions of {len(requests)} streams")
    for number, answer in enumerate(answers):
        name = list(SEEDED)[number // 2]
        answer.expect_ok()
        assert answer.token_ids == alone[name].token_ids, name
        assert answer.text == alone[name].text, name
    assert num_preemptions >= NUM_WAVES


# -------------------------------------------------------------------------------------------------- what options do

GREEDY_TEXT = "The history of the lighthouse begins with"


def greedy(sampling: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "token_ids": {"ids": default_oracle().encode(GREEDY_TEXT)},
        "sampling": {"temperature": 0, **(sampling or {})},
        "stopping": {"max_tokens": 24, "ignore_eos": True},
        "output": {"token_ids": True},
    } | changes


def judged(client: ReflectionClient, oracle: Oracle, fields: dict[str, Any]) -> list[int]:
    """The token ids of an answer that the oracle finds exact."""
    answer = client.generate(**fields).expect_ok()
    oracle.judge(fields["token_ids"]["ids"], answer.token_ids, fields).expect_exact()
    expect_complete(answer, fields, oracle.eos_token_ids)
    return answer.token_ids


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.9},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.6, "presence_penalty": -1.0},
        {"repetition_penalty": 1.15, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    ],
    ids=str,
)
def test_penalties_are_what_their_formulas_say(
    client: ReflectionClient, oracle: Oracle, penalties: dict[str, float]
) -> None:
    """Greedy decoding with penalties chooses, at each position, the best of transformers' logits after the penalties of
    the tokens so far, written out by hand; and that is another text than without.
    """
    fields = greedy(penalties)
    ids = judged(client, oracle, fields)
    assert ids != client.generate(**greedy()).expect_ok().token_ids
    rest = client.generate(**fields, resume_token_ids=ids[:10]).expect_ok()
    assert rest.token_ids == ids[10:], "resumed tokens count for penalties"


def test_logit_bias_moves_the_choice(client: ReflectionClient, oracle: Oracle) -> None:
    """A bias of 100 makes a token the only one, -100 banishes it, and a small one moves the choice exactly so far."""
    plain = judged(client, oracle, greedy())
    (sea,) = oracle.encode(" sea")
    assert set(judged(client, oracle, greedy({"logit_bias": {str(sea): 100}}))) == {sea}
    banished = judged(client, oracle, greedy({"logit_bias": {str(plain[0]): -100}}))
    assert plain[0] not in banished
    judged(client, oracle, greedy({"logit_bias": {str(token_id): 1.5 for token_id in range(0, 49152, 3)}}))


def test_only_allowed_tokens_come(client: ReflectionClient, oracle: Oracle) -> None:
    """allowed_token_ids: greedy takes the best of them, sampling any of them, and nothing else ever comes."""
    allowed = sorted(
        {ids[0] for word in ("sea", " rock", " the", " light", ".", " a") for ids in [oracle.encode(word)]}
    )
    assert set(judged(client, oracle, greedy({"allowed_token_ids": allowed}))) <= set(allowed)
    hot = {"allowed_token_ids": allowed, "temperature": 5.0, "seed": 3}
    drawn = set(judged_sample(client, oracle, greedy(hot)))
    assert drawn <= set(allowed)
    assert len(drawn) >= 4
    assert judged(client, oracle, greedy({"allowed_token_ids": [allowed[2]]})) == [allowed[2]] * 24


def judged_sample(client: ReflectionClient, oracle: Oracle, fields: dict[str, Any]) -> list[int]:
    answer = client.generate(**fields).expect_ok()
    assert not oracle.judge(fields["token_ids"]["ids"], answer.token_ids, fields).faults
    return answer.token_ids


def test_min_tokens_keeps_stop_tokens_away(client: ReflectionClient, oracle: Oracle) -> None:
    """Until there are min_tokens, a stop token or EOS is not even a candidate; resumed tokens count. Then it stops."""
    plain = judged(client, oracle, greedy())
    (eos,) = oracle.eos_token_ids
    stop = {"max_tokens": 24, "stop_token_ids": [plain[1]]}
    early = client.generate(**greedy(stopping=stop)).expect_ok()
    assert early.token_ids == plain[:2]
    assert early.finish_reason == "STOP_TOKEN"
    late = judged(client, oracle, greedy(stopping={**stop, "min_tokens": 10}))
    assert plain[1] not in late[:10]
    assert len(late) >= 10
    # EOS wants to come at each position; it comes when it may.
    eager = greedy({"logit_bias": {str(eos): 50}}, stopping={"max_tokens": 24, "min_tokens": 7})
    ids = judged(client, oracle, eager)
    assert ids.index(eos) == 7
    assert len(ids) == 8
    rest = client.generate(**eager, resume_token_ids=ids[:4]).expect_ok()
    assert rest.token_ids == ids[4:]
    assert rest.finish_reason == "EOS"


def test_draws_follow_the_models_distribution(client: ReflectionClient, oracle: Oracle) -> None:
    """Over many seeds the first token comes as often as the softmax says, by chi-square at a thousandth, drawn from the
    whole vocabulary and among the best of a list.
    """
    num_draws = 400
    prompt_ids = oracle.encode("The weather is")
    scores = oracle.logits(prompt_ids, [0])[0].double()
    for sampling in ({"temperature": 0.7}, {"temperature": 1.0, "top_k": 8}):
        top_k = sampling.get("top_k", len(scores))
        kept = (scores / sampling["temperature"]).topk(top_k)
        expected = dict(zip(kept.indices.tolist(), (kept.values.softmax(-1) * num_draws).tolist(), strict=True))
        common = {token_id: count for token_id, count in expected.items() if count >= 5}
        common[-1] = num_draws - sum(common.values())  # all others together
        requests = [
            {
                "token_ids": {"ids": prompt_ids},
                "sampling": {**sampling, "seed": seed},
                "stopping": {"max_tokens": 1, "ignore_eos": True},
                "output": {"token_ids": True},
            }
            for seed in range(num_draws)
        ]
        answers = asyncio.run(generate_all(client, requests))
        drawn = [answer.token_ids[0] for answer in answers]
        assert set(drawn) <= set(expected)
        observed = Counter(token_id if token_id in common else -1 for token_id in drawn)
        categories = [token_id for token_id, count in common.items() if count >= 1]
        chi_square = sum((observed[token_id] - common[token_id]) ** 2 / common[token_id] for token_id in categories)
        # Wilson and Hilferty's approximation of the 99.9th percentile.
        degrees = len(categories) - 1
        limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
        print(f"{sampling}: chi-square {chi_square:.1f} at {degrees} degrees of freedom, limit {limit:.1f}")
        assert chi_square < limit


# ----------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "logit_bias": {"260": -20.0}},
        {"temperature": 1.2, "top_k": 100, "seed": 4},
    ],
    ids=["greedy", "controlled", "sampled"],
)
def test_logprobs_are_the_models_own(client: ReflectionClient, oracle: Oracle, sampling: dict[str, Any]) -> None:
    """Logprobs are transformers' log-softmax of the raw logits to within a thousandth, whatever bias, penalties and
    temperature made of them; the rank counts the better ones; the best are the best, in order. In a resumed stream and
    in Complete they are the same.
    """
    num_top = 5
    fields = greedy(sampling, output={"logprobs": num_top})
    first, *crowd = asyncio.run(generate_all(client, [fields, *map(company, range(6)), fields]))
    truth = oracle.logits(fields["token_ids"]["ids"], first.token_ids).double().log_softmax(dim=-1)
    assert len(first.tokens) == 24
    for token, row in zip(first.tokens, truth, strict=True):
        value = float(row[token.id])
        assert token.logprob == pytest.approx(value, abs=TIE)
        assert int((row > value + TIE).sum()) < token.rank <= int((row > value - TIE).sum())
        assert len(token.top) == num_top
        logprobs = [best.logprob for best in token.top]
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=TIE)
        assert logprobs == pytest.approx([float(row[best.id]) for best in token.top], abs=TIE)
        assert len({best.id for best in token.top}) == num_top
        if token.rank <= num_top:
            assert token.top[token.rank - 1].id == token.id
            assert token.top[token.rank - 1].logprob == token.logprob
    rest = client.generate(**fields, resume_token_ids=first.token_ids[:9]).expect_ok()
    whole = client.complete(**fields)
    for tokens, begin in ((crowd[-1].tokens, 0), (rest.tokens, 9), (whole.completions[0].tokens, 0)):
        assert [token.id for token in tokens] == first.token_ids[begin:]
        expected = [token.logprob for token in first.tokens[begin:]]
        assert [token.logprob for token in tokens] == pytest.approx(expected, abs=TIE)


def test_logprobs_only_where_they_are_asked_for(client: ReflectionClient) -> None:
    """`logprobs: 0` gives the emitted token's alone; absent, there are none; without token_ids either there are no
    tokens at all. Tokens, text and usage are the same.
    """
    outputs = [{"logprobs": 0}, {"token_ids": True}, {}, {"logprobs": 1, "text": False}]
    bare, ids_only, text_only, no_text = (client.generate(**greedy(output=output)).expect_ok() for output in outputs)
    assert all(token.HasField("logprob") and token.HasField("rank") and not token.top for token in bare.tokens)
    assert not any(token.HasField("logprob") or token.HasField("rank") or token.top for token in ids_only.tokens)
    assert text_only.tokens == []
    assert no_text.text == ""
    assert all(len(token.top) == 1 for token in no_text.tokens)
    assert bare.token_ids == ids_only.token_ids == no_text.token_ids
    assert bare.text == ids_only.text == text_only.text
    assert [answer.usage.completion for answer in (bare, ids_only, text_only, no_text)] == [24] * 4
