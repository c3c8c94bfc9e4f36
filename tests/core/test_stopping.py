from __future__ import annotations

import pytest

from scheduler.core.stopping import finish_reason_after
from scheduler.messages import FinishReason, StoppingParams

EOS, STOP, BOTH, OTHER = 1, 2, 3, 4
STOPPING = StoppingParams(max_tokens=5, min_tokens=2, eos_token_ids=(EOS, BOTH), stop_token_ids=(STOP, BOTH))


def reason(token_id: int, num_output_tokens: int, max_model_len: int = 100) -> FinishReason | None:
    return finish_reason_after(
        token_id,
        num_prompt_tokens=10,
        num_tokens=10 + num_output_tokens,
        stopping=STOPPING,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize(
    ("token_id", "num_output_tokens", "max_model_len", "expected"),
    [
        (OTHER, 3, 100, None),
        (EOS, 3, 100, FinishReason.EOS),
        (STOP, 3, 100, FinishReason.STOP_TOKEN),
        (BOTH, 3, 100, FinishReason.EOS),
        (OTHER, 5, 100, FinishReason.MAX_TOKENS),
        (OTHER, 6, 100, FinishReason.MAX_TOKENS),
        (OTHER, 3, 13, FinishReason.CONTEXT_LIMIT),
        (EOS, 5, 15, FinishReason.EOS),
        (STOP, 5, 15, FinishReason.STOP_TOKEN),
        (OTHER, 5, 15, FinishReason.MAX_TOKENS),
    ],
)
def test_reason_and_precedence(
    token_id: int, num_output_tokens: int, max_model_len: int, expected: FinishReason | None
) -> None:
    """EOS comes before STOP_TOKEN, MAX_TOKENS and CONTEXT_LIMIT, in this order, where several apply."""
    assert reason(token_id, num_output_tokens, max_model_len) is expected


@pytest.mark.parametrize("token_id", [EOS, STOP, BOTH])
def test_min_tokens(token_id: int) -> None:
    """A stop token ends nothing among the first min_tokens, where the sampler masks it, and ends the next."""
    assert [reason(token_id, count) is not None for count in (1, 2, 3)] == [False, False, True]


def test_stop_token_within_min_tokens_still_counts() -> None:
    """max_tokens and the context end a sequence even at a stop token that min_tokens disarms."""
    stopping = StoppingParams(max_tokens=2, min_tokens=2, eos_token_ids=(EOS,))
    assert (
        finish_reason_after(EOS, num_prompt_tokens=1, num_tokens=3, stopping=stopping, max_model_len=9)
        is FinishReason.MAX_TOKENS
    )


def test_prompt_tokens_never_end() -> None:
    """Asking about a prompt token is a bug of ours."""
    with pytest.raises(AssertionError):
        reason(EOS, 0)
