"""The text of one output sequence: incremental detokenizer, then stop strings.

The law: the concatenation of all `TextDelta.text` is decode(prompt ids + kept ids) less decode(prompt ids), in whole
characters, cut at the first stop string; and what has been sent at any moment is a function of the token ids so far,
however they were chunked. So a resumed sequence sends exactly what the first attempt had not yet sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import FinishReason
from service.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some new tokens bring."""

    text: str
    """New text to send; may be empty."""
    num_kept_tokens: int
    """How many of the tokens pushed belong to the output; the rest ran past a stop string: drop, do not count."""
    finish_reason: FinishReason | None = None
    """Effective reason: that of the engine, or STOP_STRING. Set: nothing may be pushed any more; if the engine has not
    finished the sequence itself, abort it there."""
    matched_stop: str | None = None
    """The stop string, for STOP_STRING."""


class SequenceText:
    """Holds the text state of one sequence. Made once the prompt is tokenized; not shared between threads."""

    def __init__(  # noqa: PLR0913 - one per option of the request
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        resume_token_ids: Sequence[int] = (),
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Cost grows with the prompt (about 0.1 ms per 1,000 tokens)."""
        raise NotImplementedError

    @property
    def resumed(self) -> TextDelta | None:
        """Not None if the resumed tokens hold a complete stop string: the sequence is over before it began. Its text
        is empty (the first attempt has sent it) and the request need not reach an engine."""
        raise NotImplementedError

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TextDelta:
        """Take the engine's next tokens; with EOS or STOP_TOKEN the last of them counts but has no text. With any
        reason the delta includes what was held back."""
        raise NotImplementedError
