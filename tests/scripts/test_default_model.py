"""The default model as scripts/install converts it from its GGUF file."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from tests.e2e.harness import default_model_dir


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))


def read(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((default_model_dir() / name).read_text())
    return content


def test_the_shape_is_that_of_smollm2_135m() -> None:
    """The configuration says what the model's makers published, rounded as they wrote it."""
    config = read("config.json")
    assert config["model_type"] == "llama"
    expected = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {name: config[name] for name in expected} == expected


def test_generation_ends_at_the_end_of_a_turn(tokenizer: Tokenizer) -> None:
    """<|im_end|> is the end-of-sequence id, in the generation config as in the tokenizer's."""
    assert read("generation_config.json")["eos_token_id"] == tokenizer.token_to_id("<|im_end|>") == 2
    assert read("tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in str(read("tokenizer_config.json")["chat_template"])


def test_control_tokens_are_flagged_special(tokenizer: Tokenizer) -> None:
    """All 17 control tokens of the vocabulary, and no others, can be told from text."""
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special for token in added.values())
    assert tokenizer.encode("<|im_end|>").ids == [2]
    tokenizer.encode_special_tokens = True
    assert 2 not in tokenizer.encode("<|im_end|>").ids
    tokenizer.encode_special_tokens = False


@pytest.mark.parametrize("text", [" 3 1415", "a7b", "x 2026-11-30"])
def test_each_digit_is_a_token_of_its_own(tokenizer: Tokenizer, text: str) -> None:
    """A digit is never joined to a space or to another digit, as the pre-tokenizer named in the GGUF has it."""
    for token in tokenizer.encode(text).tokens:
        assert token.isdigit() is any(character.isdigit() for character in token)
        assert len(token) == 1 or not token.isdigit()


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧 🙂", "สวัสดีครับ", "你好，世界。日本語", "e\u0301 é", " \n\n\t x  y ", "don't I'LL"]
)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Byte-level BPE loses nothing of text whose bytes the vocabulary has, whitespace included."""
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
