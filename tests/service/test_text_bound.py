"""The fewest tokens that a text can become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from service.text_bound import bytes_per_token_max
from tests.service import tiny_tokenizers


def bound(tokenizer: Tokenizer) -> int | None:
    return bytes_per_token_max(json.loads(tokenizer.to_str()))


BOUNDED = {
    kind: tiny_tokenizers.KINDS[kind]() for kind in ("byte_level", "byte_fallback", "metaspace_first", "metaspace")
}
WITH_NFC = tiny_tokenizers.byte_level()
WITH_NFC.normalizer = normalizers.NFC()
BOUNDED["nfc"] = WITH_NFC


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text(st.sampled_from("the 你💡é\u0301\u1100\u1161\u11a8 <|im_start|>ab"), min_size=1, max_size=60))
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str, text: str) -> None:
    """Its bytes over the bound, whatever the text is made of."""
    tokenizer = BOUNDED[kind]
    most = bound(tokenizer)
    assert most is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


def test_the_bound_is_that_of_the_longest_token() -> None:
    """In bytes of text, which the alphabet of byte-level tokenizers writes in more."""
    assert bound(BOUNDED["byte_level"]) == len("<|im_start|>")


@pytest.mark.parametrize(("char", "has_bound"), [("Ć", True), ("ÿ", True), ("a", False), ("Ġ", False)])
def test_a_byte_without_a_token_matters_if_texts_have_it(char: str, has_bound: bool) -> None:
    """Many vocabularies lack a control character or a byte that no UTF-8 has; without a letter there is no bound."""
    described = json.loads(tiny_tokenizers.byte_level().to_str())
    del described["model"]["vocab"][char]
    assert (bytes_per_token_max(described) is not None) == has_bound


def test_the_default_model_has_a_bound() -> None:
    """Its longest token is a run of spaces."""
    path = tiny_tokenizers.DEFAULT_MODEL / "tokenizer.json"
    if not path.is_file():
        pytest.skip("the default model is not installed")
    assert bytes_per_token_max(json.loads(path.read_text())) == 81


def _change(change: str) -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    match change:
        case "a normalizer that strips":
            tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
        case "a pre-tokenizer that drops spaces":
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
        case "a split that removes":
            split: Any = pre_tokenizers.Split(" ", "removed")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
        case "a token that swallows spaces":
            tokenizer.add_special_tokens([AddedToken("<x>", lstrip=True, special=True)])
        case "bytes without a token":
            tokenizer.pre_tokenizer = None
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        "a normalizer that strips",
        "a pre-tokenizer that drops spaces",
        "a split that removes",
        "a token that swallows spaces",
        "bytes without a token",
    ],
)
def test_where_text_may_be_lost_there_is_no_bound(change: str) -> None:
    """A text of any length may then be few tokens."""
    assert bound(tiny_tokenizers.byte_level()) is not None
    assert bound(_change(change)) is None


@pytest.mark.parametrize("kind", ["word_piece", "end_of_word", "no_decoder"])
def test_kinds_with_unknown_words_have_no_bound(kind: str) -> None:
    """One token stands for an unknown word of any length, or for none of it."""
    assert bound(tiny_tokenizers.KINDS[kind]()) is None
