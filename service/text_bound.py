"""How many bytes of text one token can stand for, so that a text which cannot fit is refused before it is encoded.

What lives here: the reading of tokenizer.json for this one number. The law: a text of N bytes has at least N / number
tokens. That holds only where no step loses text, so every step that is not known to keep it makes the answer None: a
normalizer may strip, a pre-tokenizer may drop spaces, an unknown word of any length may be one token. One loss is
passed over: vocabularies without control characters and unassigned planes drop those, and none else counts on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.detokenizer import byte_level_alphabet

NFC_SHRINKS_BY_MAX = 4
"""Composition makes at most three bytes into one (Hangul), and a little less of other letters."""
_TEXT_BYTES = frozenset((*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)))
"""What UTF-8 of text is made of, planes 4 to 16 left out."""
_TEXT_CHARS = frozenset(char for char, byte in byte_level_alphabet().items() if byte in _TEXT_BYTES)


def bytes_per_token_max(description: Mapping[str, Any]) -> int | None:
    """Of tokenizer.json's content; None where there is no such bound."""
    model = description.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    steps = _steps(description.get("pre_tokenizer"), "pretokenizers")
    shrinks_by = 1
    for step in _steps(description.get("normalizer"), "normalizers"):
        if step.get("type") == "NFC":
            shrinks_by = NFC_SHRINKS_BY_MAX
        elif not _keeps(step):
            return None
    added = description.get("added_tokens") or []
    if not all(map(_keeps, steps)) or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if any(step.get("type") == "ByteLevel" for step in steps):
        if not vocabulary.keys() >= _TEXT_CHARS:
            return None
        longest = max(map(len, vocabulary))  # a character of that alphabet is a byte
    elif model.get("byte_fallback") and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}:
        longest = max(len(string.encode()) for string in vocabulary)
    else:
        return None
    return shrinks_by * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _steps(step: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, however deep."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [inner for part in step[parts] for inner in _steps(part, parts)]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer or a pre-tokenizer leaves at least as many bytes as it finds."""
    match step.get("type"):
        case "ByteLevel" | "Metaspace" | "Digits" | "Prepend":
            return True
        case "Split":
            return step.get("behavior") != "Removed"
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
        case _:
            return False
