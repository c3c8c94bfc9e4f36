"""When a sequence ends well, decided by token ids and counts alone. Stop strings are the front end's business.

What must not be here: state. The sampler masks stop tokens while fewer than `min_tokens` output tokens exist, so the
token that brings the count to `min_tokens + 1` is the first that may stop.
"""

from __future__ import annotations

from scheduler.messages import FinishReason, StoppingParams


def finish_reason_after(
    last_token_id: int, *, num_prompt_tokens: int, num_tokens: int, stopping: StoppingParams, max_model_len: int
) -> FinishReason | None:
    """Why a sequence of `num_tokens` tokens (prompt and output) ends with `last_token_id`, or None if it goes on.

    `last_token_id` must be an output token. Precedence: EOS, STOP_TOKEN, MAX_TOKENS, CONTEXT_LIMIT.
    """
    num_output_tokens = num_tokens - num_prompt_tokens
    assert num_output_tokens > 0, "only an output token can end a sequence"
    if num_output_tokens > stopping.min_tokens:
        if last_token_id in stopping.eos_token_ids:
            return FinishReason.EOS
        if last_token_id in stopping.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if num_output_tokens >= stopping.max_tokens:
        return FinishReason.MAX_TOKENS
    if num_tokens >= max_model_len:
        return FinishReason.CONTEXT_LIMIT
    return None
