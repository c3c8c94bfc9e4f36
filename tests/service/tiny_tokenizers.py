"""Tiny tokenizers of each kind that models come with, and model directories that hold them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from service.tokenizer import Tokenizer as ServiceTokenizer
from service.tokenizer import load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}"
    "[{{ m['role'] | upper }}] {{ m['content'] | trim }}{{ eos_token }}"
    "{% endfor %}"
)
QUOTING = "{% for m in messages %}<|im_start|>{{ m['content'] | tojson }}<|im_end|>{% endfor %}"
QUOTING_ASCII = (
    "{% for m in messages %}<|im_start|>{{ m['content'] | tojson(ensure_ascii=True) }}<|im_end|>{% endfor %}"
)
REFUSING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no ' + messages[0]['content']) }}{% endif %}ok"

DEFAULT_MODEL = (
    Path(os.environ.get("EMBERLINE_CACHE", Path.home() / ".cache" / "emberline")) / "models" / "SmolLM2-135M-Instruct"
)

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|pad|>")


def byte_level() -> Tokenizer:
    """GPT-2's kind, with special tokens, and added tokens that are not special (one outside the byte alphabet)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("ð", "Ł"), ("ðŁ", "Ĵ"), ("ä", "½"), ("ä½", "ł"), ("l", "l")]
    vocabulary = {char: rank for rank, char in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" 東 ", normalized=False)])
    return tokenizer


def _byte_fallback_vocabulary() -> dict[str, int]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "c", ".", "▁a", "▁b", "ab", "▁ab", "▁▁", "你", "é", "<|im_start|>", "<|im_end|>", "\n"]
    return {word: rank for rank, word in enumerate(words)}


def byte_fallback() -> Tokenizer:
    """Llama-2's kind: a space before the text, bytes where there is no piece, BOS added around a text."""
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(_byte_fallback_vocabulary(), merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """A later Llama's kind: the space goes before the first piece of the whole text only."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = metaspace_first()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "##lo", "do", "not", ".", "'", "##s", "n't", "##", "wor", "##ld"]
    tokenizer = Tokenizer(models.WordPiece({word: rank for rank, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def end_of_word() -> Tokenizer:
    words = ["a</w>", "b", "c</w>", "</w>", "d", "<s>"]
    tokenizer = Tokenizer(models.BPE({word: rank for rank, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def no_decoder() -> Tokenizer:
    words = ["a", "b", " c", "<s>"]
    tokenizer = Tokenizer(models.WordLevel({word: rank for rank, word in enumerate(words)}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def odd_steps() -> Tokenizer:
    """Steps that no model is known to combine so: regular expressions, cuts of each piece, cuts at both ends."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("▁+"), " "),
            decoders.Strip("b", 1, 0),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("a", "xy"),
            decoders.Strip(" ", 2, 0),
            decoders.Strip("x", 0, 0),
        ]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace_first": metaspace_first,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "no_decoder": no_decoder,
    "odd_steps": odd_steps,
}


def write_model(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    **tokenizer_config: object,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def load(directory: Path, tokenizer: Tokenizer, **files: Any) -> ServiceTokenizer:
    return load_tokenizer(write_model(directory, tokenizer, **files))
