"""From a step's rows of logits to one token per row, all rows at once.

What must live here: the order of operations that `SamplingParams` promises, and the rule that no row can see another.
What must not: state of any kind; which sequence a row belongs to; noise that depends on anything but its key.

How it works. A step whose rows are all plain greedy is one argmax and one maximum, whose finiteness is the finiteness
of the row. Otherwise: controls that touch few tokens (bias, stop mask, penalties) are gathered into flat lists of
(row, id), computed in float64 and scattered back; controls of a whole row touch only the rows that ask for them.

A token is drawn by the Gumbel-max trick in two stages (Maddison et al. 2014; top-down as in Kool et al. 2019): first a
group of 256 neighbouring ids by Gumbel + log of the group's mass, then a token of that group by Gumbel + its logit.
That is the softmax distribution exactly, for a few hundred numbers of noise per row instead of one per token of the
vocabulary, and it keeps what makes Gumbel noise the right one here: logits that differ in the last bits, as they do
between batch shapes, change the token only where two candidates are tied to those bits.

Reductions run along a row only. Ties go to the lowest id, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from scheduler.messages import TokenLogprobs
from scheduler.model.noise import UInt64Array, gumbel

GROUP_SIZE = 256
"""Ids per group of the two-stage draw. Part of the noise: another value draws other tokens."""
GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy: its distribution could not be told from the argmax in float32."""
FLOAT32_MAX = float(torch.finfo(torch.float32).max)

_FIRST_TOKEN_LANE = 1 << 32  # the lanes before it are those of the groups
_NUCLEUS_CANDIDATES = 64  # the first guess at a nucleus's size; 8 times as many are tried each time it is too small

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens of some rows, flat: entry i is token `ids[i]` of row `rows[i]`. No pair occurs twice."""

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
    allowed: TokenList | None = None
    """For rows that have an entry here, no other token can be sampled."""
    bias: BiasList | None = None
    forbidden: TokenList | None = None
    """Stop tokens and EOS of rows that have not yet produced `min_tokens`."""
    penalties: PenaltyList | None = None

    @property
    def plain_greedy(self) -> bool:
        """True if every row wants nothing but its best token."""
        if self.allowed or self.bias or self.forbidden or self.penalties:
            return False
        return bool((self.temperature < GREEDY_TEMPERATURE).all() and (self.num_logprobs < 0).all())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row."""

    token_ids: list[int]
    """-1 where the row was not finite, or its controls left no token at all."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """row → logprobs, for finite rows that asked."""


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
    raw = logits[_index(wants_logprobs, logits)] if len(wants_logprobs) else None
    if _apply_controls(logits, rows):
        best = logits.amax(dim=-1)
        finite &= best.isfinite()
    token_ids = logits.argmax(dim=-1)
    drawn = np.flatnonzero(rows.temperature >= GREEDY_TEMPERATURE)
    if len(drawn):
        index = _index(drawn, logits)
        # A row without any token left has no best; it is drawn from as if it were flat, and marked below.
        best_drawn = torch.where(finite[index], best[index], 0.0)
        token_ids[index] = _draw(logits[index], best_drawn, rows, drawn)
    sampled = _mark(token_ids, finite)
    if raw is None:
        return SampledTokens(sampled)
    return SampledTokens(sampled, _logprobs(raw, wants_logprobs, sampled, rows.num_logprobs[wants_logprobs]))


def best_first(values: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` best of each row of `values` [R, V] as (values, ids), both [R, num], best first, ties by lowest id.

    torch.topk alone promises no order among equals, nor which of them it takes at the end of its list.
    """
    top, ids = values.topk(num, dim=-1)
    ids, order = ids.sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    tied = (values >= top[:, -1:]).sum(dim=-1) > num
    if bool(tied.any()):
        exact_values, exact_ids = values[tied].sort(dim=-1, descending=True, stable=True)
        top[tied], ids[tied] = exact_values[:, :num], exact_ids[:, :num]
    return top, ids


def _mark(token_ids: torch.Tensor, finite: torch.Tensor) -> list[int]:
    return torch.where(finite, token_ids, -1).tolist()


def _index(rows: Int64Array, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)


# ------------------------------------------------------------------------------------------ controls, before sampling


def _apply_controls(logits: torch.Tensor, rows: SamplingRows) -> bool:
    """Applies, in their promised order, the controls some row asks for; True if there were any."""
    if rows.allowed is not None:
        _keep_only(logits, rows.allowed)
    if rows.bias is not None:
        _add_bias(logits, rows.bias)
    if rows.forbidden is not None:
        forbidden = rows.forbidden
        logits[_index(forbidden.rows, logits), _index(forbidden.ids, logits)] = -torch.inf
    if rows.penalties is not None:
        _penalise(logits, rows.penalties)
    return any((rows.allowed, rows.bias, rows.forbidden, rows.penalties))


def _keep_only(logits: torch.Tensor, allowed: TokenList) -> None:
    constrained, local = np.unique(allowed.rows, return_inverse=True)
    target = _index(constrained, logits)
    ids = _index(allowed.ids, logits)
    kept = torch.full((len(constrained), logits.shape[1]), -torch.inf, dtype=logits.dtype, device=logits.device)
    kept[_index(local, logits), ids] = logits[_index(allowed.rows, logits), ids]
    logits[target] = kept


def _add_bias(logits: torch.Tensor, bias: BiasList) -> None:
    index = (_index(bias.rows, logits), _index(bias.ids, logits))
    # Whatever the front end lets through, a bias is a finite float32 from here on.
    values = np.nan_to_num(np.clip(bias.values, -FLOAT32_MAX, FLOAT32_MAX), nan=0.0)
    before = logits[index]
    logits[index] = _as_logits(before.double() + _index(values, logits), before)


def _penalise(logits: torch.Tensor, penalties: PenaltyList) -> None:
    """Repetition penalty after Keskar et al. 2019 (CTRL), then frequency and presence penalty."""
    index = (_index(penalties.rows, logits), _index(penalties.ids, logits))
    counts = penalties.output_counts
    subtrahend = _index(penalties.frequency * counts + penalties.presence * (counts > 0), logits)
    repetition = _index(penalties.repetition, logits)
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
    scores = logits.sub_(best[:, None]).div_(_index(rows.temperature[drawn], logits).to(logits.dtype)[:, None])
    scores = _filter_top_k(scores, rows.top_k[drawn])
    scores = _filter_top_p(scores, rows.top_p[drawn])
    scores = _filter_min_p(scores, rows.min_p[drawn])
    return _gumbel_max(scores, rows.keys[drawn])


def _filter_top_k(scores: torch.Tensor, top_k: Int64Array) -> torch.Tensor:
    """Keeps each row's `top_k` best tokens, ties by lowest id; 0 or more than the vocabulary keeps all."""
    limited = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]))
    if len(limited) == 0:
        return scores
    index = _index(limited, scores)
    limits = top_k[limited]
    values, ids = best_first(scores[index], int(limits.max()))
    ranks = torch.arange(values.shape[1], device=scores.device)
    values = values.masked_fill(ranks[None, :] >= _index(limits, scores)[:, None], -torch.inf)
    scores[index] = torch.full_like(scores[index], -torch.inf).scatter_(1, ids, values)
    return scores


def _filter_top_p(scores: torch.Tensor, top_p: Float64Array) -> torch.Tensor:
    """Keeps each row's smallest set of best tokens whose mass reaches `top_p` of the whole (Holtzman et al. 2020)."""
    pending = np.flatnonzero(top_p < 1.0)
    if len(pending) == 0:
        return scores
    # Sums in float64 along one row: what a neighbour holds cannot move the edge of the nucleus.
    mass_limits = _mass_by_group(scores[_index(pending, scores)]).sum(dim=-1) * _index(top_p[pending], scores)
    num_candidates = _NUCLEUS_CANDIDATES
    while len(pending):
        num_candidates = min(num_candidates, scores.shape[1])
        index = _index(pending, scores)
        values, ids = best_first(scores[index], num_candidates)
        mass = values.double().exp()
        keep = mass.cumsum(dim=-1) - mass < mass_limits[:, None]
        keep[:, 0] = True
        complete = ~keep[:, -1] if num_candidates < scores.shape[1] else torch.ones_like(keep[:, -1])
        done = index[complete]
        kept = values.masked_fill(~keep, -torch.inf)[complete]
        scores[done] = torch.full_like(scores[done], -torch.inf).scatter_(1, ids[complete], kept)
        pending = pending[(~complete).cpu().numpy()]
        mass_limits = mass_limits[~complete]
        num_candidates *= 8
    return scores


def _filter_min_p(scores: torch.Tensor, min_p: Float64Array) -> torch.Tensor:
    """Keeps the tokens at least `min_p` times as likely as the best one, whose score is 0."""
    limited = np.flatnonzero(min_p > 0.0)
    if len(limited) == 0:
        return scores
    index = _index(limited, scores)
    floor = _index(np.log(min_p[limited]), scores).to(scores.dtype)
    subset = scores[index]
    scores[index] = subset.masked_fill(subset < floor[:, None], -torch.inf)
    return scores


def _mass_by_group(scores: torch.Tensor) -> torch.Tensor:
    """exp(scores) [R, V] summed over each group of ids: float64 [R, number of groups]."""
    return _grouped(scores).exp().sum(dim=-1).double()


def _grouped(scores: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R, number of groups, GROUP_SIZE], the last group filled up with tokens that cannot be drawn."""
    missing = -scores.shape[1] % GROUP_SIZE
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return scores.view(scores.shape[0], -1, GROUP_SIZE)


def _gumbel_max(scores: torch.Tensor, keys: UInt64Array) -> torch.Tensor:
    """A token [R] for each row of `scores` [R, V], unnormalised log-probabilities, from the noise of `keys` [R]."""
    mass = _mass_by_group(scores)
    group_noise = _index(gumbel(keys, 0, mass.shape[1]), scores)
    token_noise = _index(gumbel(keys, _FIRST_TOKEN_LANE, GROUP_SIZE), scores)
    group = (mass.log() + group_noise).argmax(dim=-1)
    members = _grouped(scores)[torch.arange(len(group), device=scores.device), group].double()
    return group * GROUP_SIZE + (members + token_noise).argmax(dim=-1)


# ------------------------------------------------------------------------------------------------------------ logprobs


def _logprobs(
    raw: torch.Tensor, wants: Int64Array, sampled: list[int], num_logprobs: Int64Array
) -> dict[int, TokenLogprobs]:
    """Log-softmax of the raw logits `raw` [L, V], those of the rows `wants`: of the sampled token and the best ones."""
    chosen = torch.tensor([max(sampled[row], 0) for row in wants.tolist()], device=raw.device)[:, None]
    chosen_logits = raw.gather(1, chosen)
    ranks = (raw > chosen_logits).sum(dim=-1) + 1
    normaliser = raw.logsumexp(dim=-1, keepdim=True)
    chosen_logprobs = (chosen_logits - normaliser)[:, 0]
    num_top = min(int(num_logprobs.max()), raw.shape[1])
    top_ids: list[list[int]] = [[]] * len(wants)
    top_logprobs: list[list[float]] = [[]] * len(wants)
    if num_top:
        top_values, top_indices = best_first(raw, num_top)
        top_ids = top_indices.tolist()
        top_logprobs = (top_values - normaliser).tolist()
    columns = zip(
        wants.tolist(), chosen_logprobs.tolist(), ranks.tolist(), num_logprobs.tolist(), top_ids, top_logprobs, strict=True
    )
    return {
        row: TokenLogprobs(logprob, rank, tuple(ids[:num]), tuple(logprobs[:num]))
        for row, logprob, rank, num, ids, logprobs in columns
        if sampled[row] >= 0
    }
