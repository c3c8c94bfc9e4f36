"""The sampler does what `SamplingParams` promises, row by row, and no row can see another."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.messages import SamplingParams
from scheduler.model.noise import gumbel, position_keys, sequence_key
from scheduler.model.sampler import (
    FLOAT32_MAX,
    GROUP_SIZE,
    BiasList,
    PenaltyList,
    SampledTokens,
    SamplingRows,
    TokenList,
    best_first,
    sample,
    score,
)

VOCAB_SIZE = 700


class Row:
    """One row's logits and wishes, and the sampler's answer as the simplest code would find it."""

    def __init__(
        self,
        logits: np.ndarray,
        params: SamplingParams,
        *,
        position: int = 0,
        prompt: tuple[int, ...] = (),
        output: tuple[int, ...] = (),
        forbidden: tuple[int, ...] = (),
    ) -> None:
        self.logits = logits.astype(np.float32)
        self.params, self.position, self.forbidden = params, position, forbidden
        self.output_counts = dict.fromkeys(prompt, 0) | Counter(output)
        self.has_penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)

    @property
    def key(self) -> np.ndarray:
        sequence = np.array([sequence_key(self.params.seed, 0)], dtype=np.uint64)
        return position_keys(sequence, np.array([self.position]))

    def processed(self) -> np.ndarray:
        """Logits after all controls, one token at a time."""
        params = self.params
        values = [float(v) for v in self.logits]
        bias = dict(params.logit_bias)
        for i, value in enumerate(values):
            if (params.allowed_token_ids and i not in params.allowed_token_ids) or i in self.forbidden:
                values[i] = -math.inf
                continue
            new = float(np.float32(value + bias[i])) if i in bias else value
            if self.has_penalties and i in self.output_counts:
                count = self.output_counts[i]
                new = new / params.repetition_penalty if new > 0 else new * params.repetition_penalty
                new -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            values[i] = max(-FLOAT32_MAX, min(FLOAT32_MAX, new)) if value != -math.inf else value
        return np.array(values).astype(np.float32)

    def kept(self, scores: np.ndarray, top_p: float) -> list[int]:
        """The ids the filters keep, best first."""
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        if self.params.top_k:
            order = order[: self.params.top_k]
        mass = [math.exp(scores[i]) for i in order]
        kept, before = [], 0.0
        for i, own in zip(order, mass, strict=True):
            if top_p < 1 and kept and before >= top_p * sum(mass):
                break
            kept.append(i)
            before += own
        return [i for i in kept if self.params.min_p <= 0 or scores[i] >= math.log(self.params.min_p) or i == order[0]]

    def expected(self) -> int | None:
        """The token that must come out; None where rounding decides whether a token is in the nucleus."""
        params, values = self.params, self.processed()
        if not np.isfinite(values).any():
            return -1
        if params.temperature < 1e-5:
            return int(values.argmax())
        with np.errstate(over="ignore"):
            scores = ((values - values.max()) / np.float32(params.temperature)).astype(np.float64)
        keeps_all = params.top_k == 0 or params.top_k >= len(scores)
        if keeps_all and params.top_p >= 1 and params.min_p <= 0:
            return self.in_two_stages(scores)
        kept = self.kept(scores, params.top_p)
        if any(self.kept(scores, params.top_p + nudge) != kept for nudge in (-1e-5, 1e-5)) and params.top_p < 1:
            return None
        possible = [i for i in kept if scores[i] >= math.log(np.finfo(np.float64).tiny)]
        if 512 < params.top_k < len(scores) or (not 0 < params.top_k < len(scores) and len(possible) >= 512):
            return self.in_two_stages(np.where(np.isin(np.arange(len(scores)), possible), scores, -np.inf))
        noise = gumbel(self.key, np.array(kept) + (2 << 32))[0]
        return kept[int((scores[kept] + noise).argmax())]

    def in_two_stages(self, scores: np.ndarray) -> int:
        """A group of ids by its mass, then one of the group."""
        num_groups = -(-len(scores) // GROUP_SIZE)
        padded = np.full(num_groups * GROUP_SIZE, -np.inf)
        padded[: len(scores)] = scores
        groups = padded.reshape(num_groups, GROUP_SIZE)
        with np.errstate(divide="ignore"):
            log_mass = np.log(np.exp(groups).sum(axis=1))
        group = int((log_mass + gumbel(self.key, np.arange(num_groups))[0]).argmax())
        member = (groups[group] + gumbel(self.key, np.arange(GROUP_SIZE) + (1 << 32))[0]).argmax()
        return group * GROUP_SIZE + int(member)


def rows_of(rows: list[Row]) -> SamplingRows:
    """The batch of these rows, as the input batch would put it."""

    def flat(ids_of: Any) -> TokenList | None:
        pairs = [(row, token_id) for row, source in enumerate(rows) for token_id in sorted(set(ids_of(source)))]
        return TokenList(*np.array(pairs, dtype=np.int64).T) if pairs else None

    params = [row.params for row in rows]
    bias = [(r, i, value) for r, row in enumerate(rows) for i, value in row.params.logit_bias]
    penalties = [
        (r, i, count, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        for r, (row, p) in enumerate(zip(rows, params, strict=True))
        if row.has_penalties
        for i, count in row.output_counts.items()
    ]
    columns = [np.array(column) for column in zip(*penalties, strict=True)]
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        num_logprobs=np.array([-1 if p.num_logprobs is None else p.num_logprobs for p in params], dtype=np.int64),
        keys=np.concatenate([row.key for row in rows]),
        allowed=flat(lambda row: row.params.allowed_token_ids),
        bias=BiasList(*[np.array(c) for c in zip(*bias, strict=True)]) if bias else None,
        forbidden=flat(lambda row: row.forbidden),
        penalties=PenaltyList(*columns[:3], *[c.astype(np.float64) for c in columns[3:]]) if penalties else None,
    )


def run(rows: list[Row]) -> SampledTokens:
    return sample(torch.from_numpy(np.stack([row.logits for row in rows])), rows_of(rows))


def gaussian(seed: int, scale: float = 3.0, size: int = VOCAB_SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size) * scale


# Coarse values make ties; -inf is a legal logit.
LOGITS = st.tuples(st.integers(0, 2**32), st.sampled_from([0.02, 1.0, 4.0]), st.booleans(), st.booleans()).map(
    lambda made: np.where(
        np.random.default_rng(made[0]).random(VOCAB_SIZE) < 0.2 * made[3],
        -np.inf,
        np.round(gaussian(made[0], made[1]) * 4) / 4 if made[2] else gaussian(made[0], made[1]),
    )
)
TOKEN = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7, 100.0]),
    top_p=st.sampled_from([1.0, 1e-9, 0.137, 0.5317, 0.9173, 0.9991]),
    top_k=st.sampled_from([0, 1, 7, 64, 65, 600, VOCAB_SIZE, 10**6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.1, 1.3, 10.0]),
    seed=st.sampled_from([0, 1, 12345, 2**64 - 1]),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.5, 4.0, 100.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.one_of(st.just(()), st.lists(TOKEN, min_size=1, max_size=90).map(tuple)),
)
ROW = st.builds(
    Row,
    LOGITS,
    PARAMS,
    position=st.integers(0, 10_000),
    prompt=st.lists(TOKEN, max_size=5).map(tuple),
    output=st.lists(st.integers(0, 40), max_size=20).map(tuple),
    forbidden=st.lists(TOKEN, max_size=3).map(tuple),
)


@given(rows=st.lists(ROW, min_size=1, max_size=5))
@settings(max_examples=150)
def test_every_row_is_what_the_simple_code_finds(rows: list[Row]) -> None:
    """Any mixture of options in one batch gives each row the token of a straightforward one-row implementation."""
    expected = [row.expected() for row in rows]
    assume(None not in expected)
    assert run(rows).token_ids == expected


@given(rows=st.lists(ROW, min_size=2, max_size=6), data=st.data())
@settings(max_examples=60)
def test_a_row_does_not_depend_on_its_batch(rows: list[Row], data: st.DataObject) -> None:
    """Alone, and among the others in any order, a row gets the same token."""
    together = run(rows).token_ids
    assert [run([row]).token_ids[0] for row in rows] == together
    order = data.draw(st.permutations(range(len(rows))))
    assert run([rows[i] for i in order]).token_ids == [together[i] for i in order]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=200),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.02, top_p=0.97),
        SamplingParams(temperature=3.0, top_k=600),
    ],
    ids=["plain", "cool", "top_k", "top_p", "min_p", "long"],
)
def test_tokens_are_drawn_in_proportion_to_their_probability(params: SamplingParams) -> None:
    """Over 20,000 positions a chi-square test finds nothing against the filtered softmax distribution."""
    num_draws = 20_000
    row = Row(gaussian(1, 1.5), params)
    scores = ((row.logits - row.logits.max()) / np.float32(params.temperature)).astype(np.float64)
    probabilities = np.zeros(VOCAB_SIZE)
    kept = row.kept(scores, params.top_p)
    probabilities[kept] = np.exp(scores[kept]) / np.exp(scores[kept]).sum()
    counts = np.zeros(VOCAB_SIZE)
    for start in range(0, num_draws, 2000):
        rows = rows_of([Row(row.logits, params, position=position) for position in range(start, start + 2000)])
        token_ids = sample(torch.from_numpy(row.logits).repeat(2000, 1), rows).token_ids
        counts += np.bincount(token_ids, minlength=VOCAB_SIZE)
    assert counts[probabilities == 0].sum() == 0
    assert abs(standard_score(counts, probabilities * num_draws)) < 4


def standard_score(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty 1931); rare tokens are thrown together."""
    common = expected >= 8
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = (expected > 0).sum() - 1
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5


def test_draws_of_different_sequences_are_independent() -> None:
    """Two seeds, and two indices of a seed, agree no more often than chance lets them."""
    uniform = torch.zeros(4000, 16)
    draws = []
    for seed, index in ((1, 0), (2, 0), (1, 1)):
        rows = rows_of([Row(np.zeros(16), SamplingParams(seed=seed), position=p) for p in range(4000)])
        keys = position_keys(np.full(4000, sequence_key(seed, index), dtype=np.uint64), np.arange(4000))
        object.__setattr__(rows, "keys", keys)
        draws.append(np.array(sample(uniform.clone(), rows).token_ids))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs((draws[first] == draws[second]).mean() - 1 / 16) < 0.02


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "num_logprobs": 3, "repetition_penalty": 1.5}])
def test_a_row_that_is_not_finite_harms_nobody_else(
    poison: float | str, temperature: float, options: dict[str, Any]
) -> None:
    """NaN or +inf anywhere, or nothing but -inf, gives -1 and no logprobs; neighbours get what they get without it."""
    params = SamplingParams(temperature=temperature, seed=9, **options)
    rows = [Row(gaussian(seed), params, prompt=(1, 2), output=(3,)) for seed in range(3)]
    alone = [run([row]).token_ids[0] for row in rows]
    if poison == "all -inf":
        rows[1].logits[:] = -np.inf
    else:
        rows[1].logits[VOCAB_SIZE - 1] = poison
    sampled = run(rows)
    assert sampled.token_ids == [alone[0], -1, alone[2]]
    assert set(sampled.logprobs) == ({0, 2} if options else set())


def test_minus_infinity_is_a_token_that_cannot_be_sampled() -> None:
    """A model may exclude tokens by -inf: the row is finite, and they are never drawn, whatever their bias."""
    logits = np.full(VOCAB_SIZE, -np.inf)
    logits[[17, 400]] = 0.0
    rows = [Row(logits, SamplingParams(seed=s, logit_bias=((5, 100.0),), top_p=0.99)) for s in range(50)]
    assert set(run(rows).token_ids) == {17, 400}


def test_controls_that_exclude_every_token_fail_their_row_alone() -> None:
    """A row whose allowed tokens are all forbidden by min_tokens has nothing left: -1, and the other row a token."""
    rows = [
        Row(gaussian(1), SamplingParams(temperature=t, allowed_token_ids=(4, 5)), forbidden=f)
        for t in (0.0, 1.0)
        for f in ((4, 5), (4,))
    ]
    assert run(rows).token_ids == [-1, 5, -1, 5]


EXTREMES = [
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=5e-324),
    SamplingParams(temperature=100.0, top_p=5e-324, top_k=2**31 - 1, min_p=1.0),
    SamplingParams(temperature=1e-5, repetition_penalty=1e-6, frequency_penalty=-2.0, presence_penalty=-2.0),
    SamplingParams(temperature=1e-5, repetition_penalty=1e6, frequency_penalty=2.0, presence_penalty=2.0),
    SamplingParams(temperature=1.0, repetition_penalty=1e-300, frequency_penalty=1e300),
    SamplingParams(temperature=1.0, logit_bias=tuple((i, 100.0) for i in range(VOCAB_SIZE))),
    SamplingParams(temperature=1.0, logit_bias=tuple((i, -1e308) for i in range(VOCAB_SIZE)), top_p=0.9),
    SamplingParams(temperature=1.0, logit_bias=((0, math.nan), (1, math.inf), (2, -math.inf), (3, -0.0))),
    SamplingParams(temperature=1.0, seed=2**64 - 1, num_logprobs=10**6),
]


@pytest.mark.parametrize("scale", [0.0, 3.0, 1e37])
@pytest.mark.parametrize("params", EXTREMES, ids=lambda params: str(params)[:80])
def test_extremes_always_give_a_token(params: SamplingParams, scale: float) -> None:
    """Values at and beyond the limits of what callers may ask for never produce NaN: each row gets a legal token."""
    rows = [Row(gaussian(seed, scale), params, prompt=(1, 2, 3), output=(3, 3, 4), forbidden=(7,)) for seed in range(4)]
    sampled = run(rows)
    assert all(0 <= token_id < VOCAB_SIZE and token_id != 7 for token_id in sampled.token_ids)
    for logprobs in sampled.logprobs.values():
        assert not math.isnan(logprobs.logprob)
        assert len(logprobs.top_token_ids) == VOCAB_SIZE


def test_ties_go_to_the_lowest_id() -> None:
    """Greedy choice, top-k's edge and the order of logprobs prefer the lower id among equals."""
    logits = np.zeros(VOCAB_SIZE)
    logits[[90, 30, 60]] = 1.0
    rows = [Row(logits, SamplingParams(temperature=0.0, num_logprobs=5))]
    rows += [Row(logits, SamplingParams(top_k=4, seed=seed)) for seed in range(200)]
    sampled = run(rows)
    assert sampled.token_ids[0] == 30
    assert sampled.logprobs[0].top_token_ids == (30, 60, 90, 0, 1)
    assert sampled.logprobs[0].rank == 1
    assert set(sampled.token_ids[1:]) == {30, 60, 90, 0}


@given(seed=st.integers(0, 2**32), num=st.sampled_from([1, 5, 64, 299, 300]), levels=st.sampled_from([2, 10, 10**6]))
def test_best_first_is_a_stable_sort(seed: int, num: int, levels: int) -> None:
    """The list of best tokens is the beginning of a stable descending sort, however many are equal."""
    values = np.random.default_rng(seed).integers(levels, size=(3, 300)).astype(np.float32)
    top, ids = best_first(torch.from_numpy(values), num)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :num]
    assert np.array_equal(ids.numpy(), expected)
    assert np.array_equal(top.numpy(), np.take_along_axis(values, expected, axis=1))


def test_logprobs_only_for_those_who_ask() -> None:
    """Each row gets as many best tokens as it asked for, counted from the raw logits; others get none."""
    wishes = [None, 0, 3]
    rows = [
        Row(gaussian(5), SamplingParams(temperature=1.0, seed=1, num_logprobs=n, logit_bias=((3, 50.0),)))
        for n in wishes
    ]
    sampled = run(rows)
    assert sampled.token_ids == [3, 3, 3]
    assert set(sampled.logprobs) == {1, 2}
    raw = rows[0].logits.astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum())
    order = np.argsort(-raw, kind="stable")
    for row, num in ((1, 0), (2, 3)):
        logprobs = sampled.logprobs[row]
        assert logprobs.logprob == pytest.approx(expected[3], abs=1e-5)
        assert logprobs.rank == 1 + (raw > raw[3]).sum()
        assert list(logprobs.top_token_ids) == order[:num].tolist()
        assert list(logprobs.top_logprobs) == pytest.approx(expected[order[:num]].tolist(), abs=1e-5)


def test_scores_of_rows_that_are_no_numbers_touch_no_other_row() -> None:
    """NaN marks a row with NaN, +inf or nothing but -inf; a token that cannot be sampled scores -inf, ranked last."""
    logits = torch.zeros(6, 10)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 7] = -torch.inf
    logits[4, [2, 7]] = 1.0
    logits[5] = 3e38
    scored = score(logits, torch.full((6,), 7), 2)
    assert scored.logprobs[:3].isnan().all()
    assert scored.logprobs[3] == -torch.inf
    assert scored.ranks[3] == 10
    assert scored.top_token_ids[3:].tolist() == [[0, 1], [2, 7], [0, 1]]
    assert scored.logprobs[4] == scored.top_logprobs[4, 0] == pytest.approx(1 - math.log(8 + 2 * math.e))
    assert scored.ranks[4:].tolist() == [1, 1]
    assert scored.logprobs[5].item() == pytest.approx(-math.log(10))


def test_long_lists_of_candidates_are_found_too() -> None:
    """A nucleus of thousands, and one of the whole vocabulary, is exact beyond the first guess at its size."""
    for size, top_p in ((5000, 0.97531), (5000, 0.2531), (5000, 1 - 1e-9)):
        rows = [
            Row(gaussian(seed, 0.3, size), SamplingParams(seed=seed, top_p=top_p), position=seed) for seed in range(3)
        ]
        expected = [row.expected() for row in rows]
        sampled = run(rows).token_ids
        assert all(e is None or e == s for e, s in zip(expected, sampled, strict=True))


@pytest.mark.parametrize("filters", [{"top_p": 0.9999}, {"top_k": 4999}, {"min_p": 1e-6}])
def test_a_filter_that_keeps_nearly_everything_costs_no_noise_per_token(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens the filters keep, the noise of a row stays hundreds of numbers; equal tokens share fairly."""
    drawn = 0

    def counted(keys: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        nonlocal drawn
        noise = gumbel(keys, lanes)
        drawn += noise.size
        return noise

    monkeypatch.setattr("scheduler.model.sampler.gumbel", counted)
    rows = [Row(np.zeros(5000), SamplingParams(seed=seed, **filters)) for seed in range(100)]
    token_ids = run(rows).token_ids
    assert drawn <= 100 * 900
    assert len(set(token_ids)) > 90
    assert max(token_ids) < filters.get("top_k", 5000)


def test_one_row_at_a_time_is_drawn_like_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many long rows, or how many entries of bias, are worked on at once changes no token."""
    biases = tuple((i, math.sin(i)) for i in range(VOCAB_SIZE))
    rows = [Row(gaussian(s), SamplingParams(temperature=9.0, seed=s, top_p=0.999, logit_bias=biases)) for s in range(9)]
    together = run(rows).token_ids
    monkeypatch.setattr("scheduler.model.sampler._SCORES_MAX", 1)
    monkeypatch.setattr("scheduler.model.sampler.LIST_ENTRIES_MAX", 100)
    assert run(rows).token_ids == together
