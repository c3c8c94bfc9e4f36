"""The text of one output sequence: incremental detokenizer, then stop strings.

The law: the concatenation of all `TextDelta.text` is decode(prompt ids + kept ids) less decode(prompt ids), in whole
characters, cut at the first stop string; and what has been sent at any moment is a function of the token ids so far,
however they were chunked. So a resumed sequence sends exactly what the first attempt had not yet sent, which includes
what that one held back.

A stop string counts if the token that makes its last character certain is at least the `min_tokens`-th of the output,
resumed ones included; tokens after that one are not kept. Where one token reaches a stop string and another end,
the stop string is the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import FinishReason
from service.stop_strings import StopStrings
from service.tokenizer import Tokenizer

_SILENT = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})
"""The token that ends a sequence for these reasons counts, but has no text."""


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

    def __init__(
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
        """Cost grows with the prompt: a millisecond or two per 1,000 tokens."""
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._detokenizer.prime(prompt_token_ids)
        self._stop_strings = StopStrings(stop_strings, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._finished = False
        self._resumed = self.push(resume_token_ids)
        self._only_resumed = bool(resume_token_ids)

    @property
    def resumed(self) -> TextDelta | None:
        """Not None if the resumed tokens hold a complete stop string: the sequence is over before it began. Its text
        is empty (the first attempt has sent it) and the request need not reach an engine.
        """
        delta = self._resumed
        if delta.finish_reason is None:
            return None
        return TextDelta("", 0, delta.finish_reason, delta.matched_stop)

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TextDelta:
        """Take the engine's next tokens; with EOS or STOP_TOKEN the last of them counts but has no text. With any
        reason the delta includes what was held back.
        """
        assert not self._finished, "a sequence ends once"
        if not token_ids:
            return self._finish([], 0, finish_reason)
        self._only_resumed = False
        silent = finish_reason in _SILENT
        texts: list[str] = []
        for position, token_id in enumerate(token_ids[: len(token_ids) - silent]):
            self._num_tokens += 1
            matched = self._scan(self._detokenizer.push(token_id), texts)
            if matched is not None:
                return self._stopped(texts, position + 1, matched)
        return self._finish(texts, len(token_ids), finish_reason, num_spoken=len(token_ids) - silent)

    def _finish(
        self, texts: list[str], num_tokens: int, reason: FinishReason | None, *, num_spoken: int = 0
    ) -> TextDelta:
        """After the last of the tokens pushed; flushes if there is a reason."""
        if reason is None:
            return TextDelta("".join(texts), num_tokens)
        if self._only_resumed and reason is not FinishReason.TIME_LIMIT:
            # The resumed tokens themselves had reached this end, so the first attempt's last delta has said it all.
            self._finished = True
            return TextDelta("", 0, reason)
        matched = self._scan(self._detokenizer.flush(), texts)
        if matched is not None:
            return self._stopped(texts, num_spoken, matched)
        texts.append(self._stop_strings.flush())
        self._finished = True
        return TextDelta("".join(texts), num_tokens, reason)

    def _scan(self, text: str, texts: list[str]) -> str | None:
        """Pass text through the search; what may be sent is appended to `texts`."""
        if not text:
            return None
        scan = self._stop_strings.feed(text, may_stop=self._num_tokens >= self._min_tokens)
        texts.append(scan.text)
        return scan.matched

    def _stopped(self, texts: list[str], num_kept: int, matched: str) -> TextDelta:
        self._finished = True
        return TextDelta("".join(texts), num_kept, FinishReason.STOP_STRING, matched)
