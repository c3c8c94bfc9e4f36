"""A model's vocabulary as guides see it: the bytes of each token.

What must live here: what the compiler's process and the engine must agree on. What must not: guides.

A guide speaks of text, so a token that has none of its own is out of every guide's reach: special tokens, whatever the
tokenizer writes for them, and rows of the model's vocabulary that the tokenizer does not know. The end-of-sequence ids
are outside of it, too: a matcher allows them where the form is complete, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast


def read_vocabulary(model: str | Path, revision: str | None, vocab_size: int) -> list[bytes]:
    """The bytes of each id in [0, vocab_size); empty for a token without a text of its own.

    The files are those that the model was loaded from: nothing is fetched. Raises what reading them raises.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), revision=revision or "main", local_files_only=True)
    # Some id must be named here; which one makes no difference to the bytes.
    decoded = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    vocabulary = list(decoded.decoded_vocab)
    flagged = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    for token_id in {*tokenizer.all_special_ids, *flagged}:
        if token_id < len(vocabulary):
            vocabulary[token_id] = b""
    return vocabulary


def tokenizer_info(vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """What xgrammar compiles for and matches with. `eos_token_ids`: at least one."""
    return xgrammar.TokenizerInfo(
        list(vocabulary),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(eos_token_ids),
    )
