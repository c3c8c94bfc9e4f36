"""Text to token ids and back, as the served model sees them.

What lives here: encoding and whole decoding. What must not: torch (`AutoTokenizer` would bring it), gRPC. All methods
of `Tokenizer` may be called from any thread; `encode` of a long text takes milliseconds and belongs off the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.request import ChatTurn, PromptInput, SamplingDefaults


class Tokenizer:
    """One model's tokenizer, chat template and generation defaults."""

    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    vocab_size: int
    """One more than the highest id that has a text; the model's own vocab_size may be larger."""

    @property
    def has_chat_template(self) -> bool:
        raise NotImplementedError

    def encode(self, prompt: PromptInput) -> tuple[int, ...]:
        """Any validated input; token ids pass as they are. Raises what `encode_chat` does."""
        raise NotImplementedError

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> tuple[int, ...]:
        """Special-token strings in the text stay plain text unless `parse_special`."""
        raise NotImplementedError

    def encode_chat(self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Raises NoChatTemplateError and TemplateError."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a text count as empty."""
        raise NotImplementedError

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text, special tokens included."""
        raise NotImplementedError


def load_tokenizer(model: str | Path, revision: str | None = None) -> Tokenizer:
    """`model`: a directory, or a hub name. Blocking: call it off the loop. Raises StartupError (files missing, not
    readable) and ConfigurationError (a config that cannot be served)."""
    raise NotImplementedError
