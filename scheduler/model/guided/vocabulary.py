"""A model's vocabulary as guides see it: the bytes of each token.

What must live here: what the compiler's process and the engine must agree on. What must not: guides.

A guide speaks of text, so a token that has none of its own is out of every guide's reach: special tokens, whatever the
tokenizer writes for them, and rows of the model's vocabulary that the tokenizer does not know. The end-of-sequence ids
are outside of it, too: a matcher allows them where the form is complete, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xgrammar
from transformers import PreTrainedTokenizerFast

TEXT_FORM, JSON_FORM = b"T", b"J"
FIRST_PRINTABLE = 0x20
CHECKED_TOKENS = 1024
"""Of a vocabulary, spread over it."""


class UnsupportedVocabularyError(Exception):
    """Its tokens are no pieces of text that could be strung together."""


def read_vocabulary(model: str | Path, revision: str | None, vocab_size: int) -> list[bytes]:
    """The bytes of each id in [0, vocab_size); empty for a token without a text of its own.

    The files are those that the model was loaded from: nothing is fetched. Raises UnsupportedVocabularyError, and what
    reading them raises.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), revision=revision or "main", local_files_only=True)
    # Some id must be named here; which one makes no difference to the bytes.
    decoded = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    vocabulary = list(decoded.decoded_vocab)
    flagged = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    for token_id in {*tokenizer.all_special_ids, *flagged}:
        if token_id < len(vocabulary):
            vocabulary[token_id] = b""
    _check(tokenizer, vocabulary)
    return vocabulary


def _check(tokenizer: Any, vocabulary: Sequence[bytes]) -> None:
    """Compares what tokens are taken for with what the tokenizer makes of them behind another one.

    Raises UnsupportedVocabularyError if a token's text depends on its place in a word, or is found in another way.
    """
    texts = {token_id: _text(token) for token_id, token in enumerate(vocabulary)}
    known = [token_id for token_id, text in texts.items() if text and text.strip() and token_id < len(tokenizer)]
    if not known:
        raise UnsupportedVocabularyError("no token has a text of its own")
    anchor = known[0]
    checked = known[:: max(1, len(known) // CHECKED_TOKENS)]
    before = len(tokenizer.backend_tokenizer.decode([anchor], skip_special_tokens=False))
    decoded = tokenizer.backend_tokenizer.decode_batch([[anchor, token_id] for token_id in checked])
    num_others = sum(text[before:] != texts[token_id] for text, token_id in zip(decoded, checked, strict=True))
    if num_others:
        raise UnsupportedVocabularyError(f"{num_others} of {len(checked)} tokens have another text than their bytes")


def _text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None  # a part of a character, which the tokenizer alone would write as U+FFFD


def for_json(vocabulary: Sequence[bytes]) -> list[bytes]:
    """Without the tokens that hold a control character: JSON on one line has none, but in a string that only has
    to match a pattern such as `[^a]` xgrammar would let it stand as it is.
    """
    return [b"" if token and min(token) < FIRST_PRINTABLE else token for token in vocabulary]


def tokenizer_info(vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """What xgrammar compiles for and matches with. `eos_token_ids`: at least one."""
    return xgrammar.TokenizerInfo(
        list(vocabulary),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(eos_token_ids),
    )


class Vocabularies:
    """One model's vocabulary, as guides of each form see it."""

    def __init__(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._info = {
            TEXT_FORM: tokenizer_info(vocabulary, eos_token_ids),
            JSON_FORM: tokenizer_info(for_json(vocabulary), eos_token_ids),
        }

    def info(self, form: bytes) -> xgrammar.TokenizerInfo:
        """Of `TEXT_FORM` or `JSON_FORM`. Raises KeyError for another."""
        return self._info[form]
