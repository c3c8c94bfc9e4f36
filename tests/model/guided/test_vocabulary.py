"""What guides take the tokens of each kind of tokenizer for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.model.guided.vocabulary import UnsupportedVocabularyError, read_vocabulary
from tests.service import tiny_tokenizers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte_level", {"the": b"the", "Ġthe": b" the", "ðŁĴ": b"\xf0\x9f\x92", "<think>": b"<think>"}),
        ("byte_fallback", {"▁ab": b" ab", "<0x0A>": b"\n", "<0xE4>": b"\xe4", "é": "é".encode()}),
    ],
)
def test_tokens_are_bytes_and_special_ones_are_nothing(kind: str, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Spaces, parts of characters and added tokens count as text; special tokens, also those that only the config calls
    so, and rows of the model that the tokenizer does not know have none.
    """
    tokenizer = tiny_tokenizers.KINDS[kind]()
    pad = "<|im_start|>"
    directory = tiny_tokenizers.write_model(
        tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast", pad_token=pad, eos_token="<|im_end|>"
    )
    size = tokenizer.get_vocab_size() + 7
    vocabulary = read_vocabulary(directory, None, size)
    assert len(vocabulary) == size
    for token, text in expected.items():
        assert vocabulary[tokenizer.token_to_id(token)] == text
    for token in (pad, "<|im_end|>"):
        assert vocabulary[tokenizer.token_to_id(token)] == b""
    assert set(vocabulary[-7:]) == {b""}


def test_a_vocabulary_larger_than_the_model(tmp_path: Path) -> None:
    """Tokens that the model cannot sample are left out."""
    directory = tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level())
    assert len(read_vocabulary(directory, None, 100)) == 100


@pytest.mark.parametrize("kind", ["word_piece", "end_of_word", "odd_steps"])
def test_tokens_whose_text_depends_on_their_place(kind: str, tmp_path: Path) -> None:
    """A guide would be followed in bytes that are not the output's: refused, not followed wrongly."""
    directory = tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.KINDS[kind]())
    size = tiny_tokenizers.KINDS[kind]().get_vocab_size()
    with pytest.raises(UnsupportedVocabularyError):
        read_vocabulary(directory, None, size)
