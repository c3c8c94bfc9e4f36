"""What becomes of a request at its arrival: which of its sequences have anything left to do, and whether that can fit.

What must not be here: state. `Scheduler.add_request` puts in line what this lets through.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.core.stopping import finish_reason_after
from scheduler.messages import FinishReason, SequenceOutput, SequenceStart, Submit


class RequestNeverFitsError(Exception):
    """A request needs more than the whole KV pool, or than the longest context."""


class Arrival(NamedTuple):
    """A request, sorted out."""

    over: tuple[SequenceOutput, ...]
    """The only outputs of those sequences that their resumed tokens have already brought to their end."""
    unfinished: tuple[SequenceStart, ...]
    """Those that run."""
    start_reasons: tuple[FinishReason | None, ...]
    """Parallel to `unfinished`: why a sequence ends without a token once its known ones are computed."""


def sort_out(submit: Submit, *, max_model_len: int) -> Arrival:
    """Where logprobs of the prompt are asked for, sequences that are over run, too, but no further than through their
    known tokens: so nothing is told before the prompt is.

    Raises `RequestNeverFitsError` if one of the others could not get a single token even alone, `ValueError` for an
    empty prompt, or for sequences that cannot be told apart.
    """
    if not submit.prompt_token_ids:
        raise ValueError("prompt_token_ids is empty; there is nothing to compute logits from")
    indexes = [start.index for start in submit.sequences]
    if not indexes or indexes != sorted(set(indexes)):
        raise ValueError(f"the indexes of the sequences are {indexes}; they must be ascending, and at least one")
    over, unfinished, start_reasons = [], [], []
    for start in submit.sequences:
        reason = _finish_reason_at(submit, start, max_model_len)
        if reason is None or submit.sampling.num_prompt_logprobs is not None:
            unfinished.append(start)
            start_reasons.append(reason)
        else:
            output = SequenceOutput(submit.request_id, start.index, (), finish_reason=reason, num_cached_tokens=0)
            over.append(output)
    return Arrival(tuple(over), tuple(unfinished), tuple(start_reasons))


def _finish_reason_at(submit: Submit, start: SequenceStart, max_model_len: int) -> FinishReason | None:
    """Why a sequence that begins there is over already, or None."""
    num_tokens = len(submit.prompt_token_ids) + len(start.resume_token_ids)
    if start.resume_token_ids and num_tokens <= max_model_len:
        reason = finish_reason_after(
            start.resume_token_ids[-1],
            num_prompt_tokens=len(submit.prompt_token_ids),
            num_tokens=num_tokens,
            stopping=submit.stopping,
            max_model_len=max_model_len,
        )
        if reason is not None:
            return reason
    if num_tokens + 1 > max_model_len:
        raise RequestNeverFitsError(
            f"{num_tokens} tokens and one to come exceed the limit of {max_model_len} tokens: that of the context, or "
            "what the KV pool holds"
        )
    return FinishReason.MAX_TOKENS if submit.stopping.max_tokens == 0 else None
