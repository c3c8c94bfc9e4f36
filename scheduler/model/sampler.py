"""From a step's rows of logits to one token per row, all rows at once.

What must live here: the order of operations that `SamplingParams` promises, and the rule that no row can see another.
What must not: state of any kind; which sequence a row belongs to; noise that depends on anything but its key.

How it works. A step whose rows are all plain greedy is one argmax and one maximum, whose finiteness is the finiteness
of the row. Otherwise: controls that touch few tokens (bias, stop mask, penalties) are gathered into flat lists of
(row, id), computed in float64 and scattered back; controls of a whole row touch only the rows that ask for them.

A token is drawn by the Gumbel-max trick (Maddison et al. 2014): logits that differ in the last bits, as they do between
batch shapes, change the token only where two candidates are tied to those bits. A row without filters draws in two
stages, first a group of 256 neighbouring ids by Gumbel + log of the group's mass, then a token of that group by
Gumbel + its score: that is the softmax distribution exactly, for a few hundred numbers of noise instead of one per
token of the vocabulary. A row with filters (top-k, top-p, min-p) draws among the best tokens, which are mostly few;
where they are not, it draws in two stages, like a row without filters, from what its filters keep.

Reductions run along a row only. Ties go to the lowest id, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scheduler.core.output import SequenceFailure
from scheduler.messages import GREEDY_TEMPERATURE, TokenLogprobs
from scheduler.model.noise import UInt64Array, gumbel

GROUP_SIZE = 256
"""Ids per group of the two-stage draw. Part of the noise: another value draws other tokens."""
FLOAT32_MAX = float(torch.finfo(torch.float32).max)

# Lengths of the list of best tokens: one for most rows, one for most others. Where the filters keep more than the last
# one holds, the row is drawn in two stages: so the last one is part of the noise.
_LIST_LENGTHS = (64, 512)
# Bounds of what is worked on at once beside the logits themselves: scores of long rows, entries of bias.
_SCORES_MAX = 1 << 21
LIST_ENTRIES_MAX = 1 << 20
# Lanes of noise: 0… for groups, then for a group's members, then for tokens by id.
_MEMBER_LANES = 1 << 32
_TOKEN_LANES = 2 << 32

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens of some rows, flat: entry i is token `ids[i]` of row `rows[i]`, rows ascending. No pair occurs twice."""

    rows: Int64Array
    ids: Int64Array


@dataclass(frozen=True, slots=True)
class BiasList:
    """`values[i]` is added to the logit of token `ids[i]` of row `rows[i]`. No pair occurs twice."""

    rows: Int64Array
    ids: Int64Array
    values: Float64Array


@dataclass(frozen=True, slots=True)
class PenaltyList:
    """Tokens that a penalty may touch, those of prompt and output, with what applies to each. No pair occurs twice."""

    rows: Int64Array
    ids: Int64Array
    output_counts: Int64Array
    """How often the token is in the output; 0 for one of the prompt only."""
    repetition: Float64Array
    frequency: Float64Array
    presence: Float64Array


@dataclass(frozen=True, slots=True)
class GuideMask:
    """What the guides of some rows allow."""

    rows: Int64Array
    """[G], ascending."""
    bitmask: Int32Array
    """[G, V / 32, rounded up]: bit i of word w is 1 where token 32 w + i is allowed."""
    failures: dict[int, SequenceFailure] = field(default_factory=dict)
    """row → why its guide cannot tell; all is allowed there, and whatever is sampled does not count."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What each row asks for; arrays are [S], parallel to the rows of logits. None: no row asks."""

    temperature: Float64Array
    top_k: Int64Array
    top_p: Float64Array
    min_p: Float64Array
    num_logprobs: Int64Array
    """-1: none asked for."""
    keys: UInt64Array
    """`noise.position_keys` of the tokens to be sampled."""
    guide: GuideMask | None = None
    allowed: TokenList | None = None
    """For rows that have an entry here, no other token can be sampled."""
    bias: BiasList | None = None
    forbidden: TokenList | None = None
    """Stop tokens and EOS of rows that have not yet produced `min_tokens`."""
    penalties: PenaltyList | None = None

    @property
    def plain_greedy(self) -> bool:
        """True if every row wants nothing but its best token."""
        if self.guide or self.allowed or self.bias or self.forbidden or self.penalties:
            return False
        return bool((self.temperature < GREEDY_TEMPERATURE).all() and (self.num_logprobs < 0).all())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row."""

    token_ids: list[int]
    """-1 where the row was not finite, or its controls left no token at all."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """row → logprobs, for finite rows that asked."""
    emptied: tuple[int, ...] = ()
    """Of the rows with -1 those that were finite, until their controls left no token."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> SampledTokens:
    """Samples one token per row of `logits` [S, V] float32, which is used up (written to).

    A row with NaN or +inf anywhere, or with nothing but -inf, gives -1 and changes no other row; so does a row whose
    own controls exclude every token. -inf is a legal logit of a token that cannot be sampled.
    """
    best = logits.amax(dim=-1)  # NaN if there is one, +inf if there is one, -inf only if there is nothing else
    if rows.plain_greedy:
        return SampledTokens(_mark(logits.argmax(dim=-1), best.isfinite()))
    finite = best.isfinite()
    if not bool(finite.all()):
        logits[~finite] = 0.0
    wants_logprobs = np.flatnonzero(rows.num_logprobs >= 0)
    raw = logits[_on_device(wants_logprobs, logits)] if len(wants_logprobs) else None
    emptied: tuple[int, ...] = ()
    if _apply_controls(logits, rows):
        best = logits.amax(dim=-1)
        left = best.isfinite()
        emptied = tuple((finite & ~left).nonzero()[:, 0].tolist())
        finite &= left
    drawn = np.flatnonzero(rows.temperature >= GREEDY_TEMPERATURE)
    token_ids = torch.zeros_like(best, dtype=torch.long) if len(drawn) == len(best) else logits.argmax(dim=-1)
    if len(drawn):
        index = _on_device(drawn, logits)
        # A row without any token left has no best; it is drawn from as if it were flat, and marked below.
        best_drawn = torch.where(finite[index], best[index], 0.0)
        token_ids[index] = _draw(logits[index], best_drawn, rows, drawn)
    sampled = _mark(token_ids, finite)
    if raw is None:
        return SampledTokens(sampled, emptied=emptied)
    logprobs = _logprobs(raw, wants_logprobs, sampled, rows.num_logprobs[wants_logprobs])
    return SampledTokens(sampled, logprobs, emptied)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """How likely given tokens are, one per row, and which are the most likely. On the device of the logits."""

    logprobs: torch.Tensor
    """[R] float32; NaN where the row is not finite."""
    ranks: torch.Tensor
    """[R]: 1 is the most likely; of equal ones each counts only those that are more likely."""
    top_token_ids: torch.Tensor
    """[R, num_top]: best first, ties by lowest id."""
    top_logprobs: torch.Tensor
    """[R, num_top]"""


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> ScoredTokens:
    """Log-softmax of `logits` [R, V] at `token_ids` [R], and its `num_top` best values (or V, if that is less).

    A row with NaN or +inf anywhere, or with nothing but -inf, gives NaN and changes no other row.
    """
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    best = logits.amax(dim=-1, keepdim=True)
    # Less the maximum first, so that large logits lose no digits; where that is no number, nothing is.
    log_mass = (logits - best).exp_().sum(dim=-1, keepdim=True).log()
    top_values, top_ids = best_first(logits, num_top) if num_top else (chosen[:, :0], token_ids[:, None][:, :0])
    return ScoredTokens((chosen - best - log_mass)[:, 0], ranks, top_ids, top_values - best - log_mass)


def best_first(values: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` best of each row of `values` [R, V] as (values, ids), both [R, num], best first, ties by lowest id.

    torch.topk alone promises no order among equals, nor which of them it takes at the end of its list.
    """
    # One more than asked for: if it equals the last one, there may be more of its kind.
    top, ids = values.topk(min(num + 1, values.shape[1]), dim=-1)
    tied = top[:, num - 1] == top[:, num] if top.shape[1] > num else torch.zeros_like(top[:, 0], dtype=torch.bool)
    ids, order = ids[:, :num].sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if bool(tied.any()):
        exact_values, exact_ids = values[tied].sort(dim=-1, descending=True, stable=True)
        top[tied], ids[tied] = exact_values[:, :num], exact_ids[:, :num]
    return top, ids


def _mark(token_ids: torch.Tensor, finite: torch.Tensor) -> list[int]:
    return torch.where(finite, token_ids, -1).tolist()


def _on_device(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)


# ------------------------------------------------------------------------------------------ controls, before sampling


def _apply_controls(logits: torch.Tensor, rows: SamplingRows) -> bool:
    """Applies, in their promised order, the controls some row asks for; True if there were any."""
    if rows.guide is not None:
        _follow_guides(logits, rows.guide)
    if rows.allowed is not None:
        _keep_only(logits, rows.allowed)
    if rows.bias is not None:
        _add_bias(logits, rows.bias)
    if rows.forbidden is not None:
        forbidden = rows.forbidden
        logits[_on_device(forbidden.rows, logits), _on_device(forbidden.ids, logits)] = -torch.inf
    if rows.penalties is not None:
        _penalise(logits, rows.penalties)
    return any((rows.guide, rows.allowed, rows.bias, rows.forbidden, rows.penalties))


def _follow_guides(logits: torch.Tensor, guide: GuideMask) -> None:
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":  # numpy has a kernel for it, without intermediates of 32 bits a token
        bits = np.unpackbits(guide.bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        barred = torch.from_numpy(bits) == 0
    else:
        words = _on_device(guide.bitmask, logits)[:, :, None]
        bits_on_device = words >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
        barred = (bits_on_device == 0).flatten(1)[:, :vocab_size]
    if len(guide.rows) == len(logits):
        logits.masked_fill_(barred, -torch.inf)
    else:
        index = _on_device(guide.rows, logits)
        logits[index] = logits[index].masked_fill_(barred, -torch.inf)


def _keep_only(logits: torch.Tensor, allowed: TokenList) -> None:
    constrained = allowed.rows[np.diff(allowed.rows, prepend=-1) > 0]
    index = (_on_device(allowed.rows, logits), _on_device(allowed.ids, logits))
    kept = logits[index]
    logits.index_fill_(0, _on_device(constrained, logits), -torch.inf)
    logits[index] = kept


def _add_bias(logits: torch.Tensor, bias: BiasList) -> None:
    for start in range(0, len(bias.rows), LIST_ENTRIES_MAX):
        part = slice(start, start + LIST_ENTRIES_MAX)
        index = (_on_device(bias.rows[part], logits), _on_device(bias.ids[part], logits))
        # Whatever the front end lets through, a bias is a finite float32 from here on.
        values = np.nan_to_num(np.clip(bias.values[part], -FLOAT32_MAX, FLOAT32_MAX), nan=0.0)
        before = logits[index]
        logits[index] = _as_logits(before.double() + _on_device(values, logits), before)


def _penalise(logits: torch.Tensor, penalties: PenaltyList) -> None:
    """Repetition penalty after Keskar et al. 2019 (CTRL), then frequency and presence penalty."""
    index = (_on_device(penalties.rows, logits), _on_device(penalties.ids, logits))
    counts = penalties.output_counts
    subtrahend = _on_device(penalties.frequency * counts + penalties.presence * (counts > 0), logits)
    repetition = _on_device(penalties.repetition, logits)
    before = logits[index]
    values = before.double()
    values = torch.where(values > 0, values / repetition, values * repetition) - subtrahend
    logits[index] = _as_logits(values, before)


def _as_logits(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Float64 results back to finite float32; what was excluded (-inf) before stays so."""
    clamped = values.clamp(-FLOAT32_MAX, FLOAT32_MAX).to(before.dtype)
    return torch.where(before == -torch.inf, before, clamped)


# ---------------------------------------------------------------------------------- temperature, filters and the draw


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: SamplingRows, drawn: Int64Array) -> torch.Tensor:
    """Draws a token [R] from each of `logits` [R, V], the rows `drawn`, whose maxima are `best` [R]."""
    # Less its maximum first: the quotient is then 0 or below, so no temperature can overflow it upwards.
    scores = logits.sub_(best[:, None]).div_(_on_device(rows.temperature[drawn], logits).to(logits.dtype)[:, None])
    filters = _Filters.of(rows, drawn, scores.shape[1])
    free = np.flatnonzero(filters.none)
    if len(free) == len(drawn):
        return _draw_from_all(scores, rows.keys[drawn])
    token_ids = torch.empty(len(drawn), dtype=torch.long, device=scores.device)
    if len(free):
        index = _on_device(free, scores)
        token_ids[index] = _draw_from_all(scores[index], rows.keys[drawn[free]])
    filtered = np.flatnonzero(~filters.none)
    index = _on_device(filtered, scores)
    # Not a copy where all rows are filtered.
    scores = scores[index] if len(free) else scores
    token_ids[index] = _draw_from_best(scores, filters.take(filtered), rows.keys[drawn[filtered]])
    return token_ids


def _draw_from_all(scores: torch.Tensor, keys: UInt64Array) -> torch.Tensor:
    """A token [R] for each row of `scores` [R, V]: a group by its mass, then a token of the group by its score."""
    mass = _mass_by_group(scores)
    group_noise = _on_device(gumbel(keys, np.arange(mass.shape[1])), scores)
    member_noise = _on_device(gumbel(keys, np.arange(GROUP_SIZE) + _MEMBER_LANES), scores)
    group = (mass.log() + group_noise).argmax(dim=-1)
    members = _grouped(scores)[torch.arange(len(group), device=scores.device), group].double()
    return group * GROUP_SIZE + (members + member_noise).argmax(dim=-1)


def _mass_by_group(scores: torch.Tensor) -> torch.Tensor:
    """exp(scores) [R, V] summed over each group of ids: float64 [R, number of groups]."""
    return _grouped(scores).exp().sum(dim=-1).double()


def _grouped(scores: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R, number of groups, GROUP_SIZE], the last group filled up with tokens that cannot be drawn."""
    missing = -scores.shape[1] % GROUP_SIZE
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return scores.view(scores.shape[0], -1, GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class _Filters:
    """Of R rows. `top_k` is the vocabulary's size where it keeps all."""

    top_k: Int64Array
    top_p: Float64Array
    min_p: Float64Array
    vocab_size: int

    @classmethod
    def of(cls, rows: SamplingRows, drawn: Int64Array, vocab_size: int) -> _Filters:
        top_k = rows.top_k[drawn]
        top_k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
        return cls(top_k, rows.top_p[drawn], rows.min_p[drawn], vocab_size)

    def take(self, index: Int64Array) -> _Filters:
        return _Filters(self.top_k[index], self.top_p[index], self.min_p[index], self.vocab_size)

    @property
    def none(self) -> npt.NDArray[np.bool_]:
        """[R]: the rows that keep every token."""
        return (self.top_k == self.vocab_size) & (self.top_p >= 1.0) & (self.min_p <= 0.0)


def _draw_from_best(scores: torch.Tensor, filters: _Filters, keys: UInt64Array) -> torch.Tensor:
    """A token [R] for each row of `scores` [R, V], from what its filters keep.

    What they keep is the beginning of the list of best tokens. So that list is made only as long as it has to be, and
    where it would be very long, it is not made at all. Which way a row goes is its own business, and so is its noise.
    """
    needs_whole = bool(((filters.top_p < 1.0) & (filters.top_k == filters.vocab_size)).any())
    whole = _mass_by_group(scores).sum(dim=-1) if needs_whole else scores.new_zeros(len(keys), dtype=torch.double)
    token_ids = torch.empty(len(keys), dtype=torch.long, device=scores.device)
    pending = np.arange(len(keys))
    for length in _LIST_LENGTHS:
        num_candidates = min(length, filters.vocab_size)
        top_k = filters.top_k[pending]
        tried = pending[(top_k <= num_candidates) | (top_k == filters.vocab_size)]
        if len(tried) == 0:
            continue
        index = _on_device(tried, scores)
        values, ids = best_first(scores if len(tried) == len(keys) else scores[index], num_candidates)
        kept, complete = _apply_filters(values, filters.take(tried), whole[index])
        noise = _on_device(gumbel(keys[tried], ids.cpu().numpy() + _TOKEN_LANES), scores)
        winners = (values.double().masked_fill(~kept, -torch.inf) + noise).argmax(dim=-1, keepdim=True)
        token_ids[index] = ids.gather(1, winners)[:, 0]  # overwritten where the list is too short
        pending = np.setdiff1d(pending, tried[complete.cpu().numpy()], assume_unique=True)
    num_rows_max = max(1, _SCORES_MAX // filters.vocab_size)
    for start in range(0, len(pending), num_rows_max):
        rows = pending[start : start + num_rows_max]
        index = _on_device(rows, scores)
        token_ids[index] = _draw_from_many(scores[index], filters.take(rows), keys[rows])
    return token_ids


def _draw_from_many(scores: torch.Tensor, filters: _Filters, keys: UInt64Array) -> torch.Tensor:
    """A token [R] for each row of `scores` [R, V], which is used up, from what its filters keep: thousands, perhaps."""
    ordered = _descending(scores)
    whole = ordered.double().exp_().sum(dim=-1)
    kept, _ = _apply_filters(ordered, filters, whole)
    # How many are kept says which: those above the last one kept, and of those equal to it the first ones by id.
    num_kept = kept.sum(dim=-1, keepdim=True)
    edge = ordered.gather(1, (num_kept - 1).clamp_(min=0))
    above, tied = scores > edge, scores == edge
    num_tied_kept = num_kept - above.sum(dim=-1, keepdim=True)
    kept = above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= num_tied_kept))
    return _draw_from_all(scores.masked_fill_(~kept, -torch.inf), keys)


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Each row of `values` [R, V] sorted, best first."""
    if values.device.type == "cpu":  # numpy's sort has no indices to carry along: some twenty times as fast
        return torch.from_numpy(-np.sort(-values.numpy(), axis=-1))
    return values.sort(dim=-1, descending=True).values


def _apply_filters(values: torch.Tensor, filters: _Filters, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the best scores `values` [R, n] are kept [R, n], and of which rows that is all that is kept [R].

    top-k, then the smallest set of best tokens whose mass reaches `top_p` of what top-k left (Holtzman et al. 2020),
    then those at least `min_p` times as likely as the best one, whose score is 0. `whole` [R]: mass of the whole row.
    """
    num_candidates = values.shape[1]
    top_k = _on_device(filters.top_k, values)[:, None]
    top_p = _on_device(filters.top_p, values)[:, None]
    floor = _on_device(np.log(np.maximum(filters.min_p, np.finfo(np.float64).tiny)), values)[:, None]
    within_k = torch.arange(num_candidates, device=values.device)[None, :] < top_k
    # Sums in float64 along one row: what a neighbour holds cannot move the edge of the nucleus.
    mass = values.double().exp() * within_k
    whole = torch.where(top_k < filters.vocab_size, mass.sum(dim=-1, keepdim=True), whole[:, None])
    mass_limit = torch.where(top_p < 1.0, top_p * whole, torch.inf)
    kept = within_k & (mass.cumsum(dim=-1) - mass < mass_limit) & (values >= floor)
    complete = (top_k[:, 0] <= num_candidates) | ~kept[:, -1]
    return kept, complete


# ------------------------------------------------------------------------------------------------------------ logprobs


def _logprobs(
    raw: torch.Tensor, wants: Int64Array, sampled: list[int], num_logprobs: Int64Array
) -> dict[int, TokenLogprobs]:
    """Log-softmax of the raw logits `raw` [L, V], those of the rows `wants`: of the sampled token and the best ones."""
    chosen = torch.tensor([max(sampled[row], 0) for row in wants.tolist()], device=raw.device)
    scored = score(raw, chosen, int(num_logprobs.max()))
    columns = zip(
        wants.tolist(),
        scored.logprobs.tolist(),
        scored.ranks.tolist(),
        num_logprobs.tolist(),
        scored.top_token_ids.tolist(),
        scored.top_logprobs.tolist(),
        strict=True,
    )
    return {
        row: TokenLogprobs(logprob, rank, tuple(ids[:num]), tuple(logprobs[:num]))
        for row, logprob, rank, num, ids, logprobs in columns
        if sampled[row] >= 0
    }
