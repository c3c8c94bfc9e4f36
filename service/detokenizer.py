"""Token strings to text, a token at a time, exactly as the whole decoding would have it.

The law: after any number of tokens, the pieces given out and a final `flush` concatenate to what the tokenizer's own
`decode` makes of all tokens together, less what it makes of the prompt alone. Nothing given out is ever taken back,
and each token costs the same however long the output is. So nothing here calls `decode` again and again: the decoder
that tokenizer.json describes is a chain of small steps, and each has its incremental counterpart below, a `Stage`.

A stage holds back what later tokens can still change: an incomplete UTF-8 tail, or (where tokens of single bytes
stand beside whole pieces) the run of byte tokens that has not ended, since such a run is decoded as a whole or not at
all. U+FFFD comes out only for what can never become a character, or at the end.

Where the prompt ends inside a character that the output completes, that character belongs to the output: it is in no
decoding of the prompt. What the prompt's decoding had already shown for the broken tail is not shown again.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Regex, decoders

from scheduler.errors import ConfigurationError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Stage(Protocol):
    """One step of a decoder, fed in order."""

    def feed(self, pieces: list[str]) -> list[str]:
        """Take pieces from the step before; give out what no later piece can change."""

    def end_prompt(self) -> list[str]:
        """All pieces so far were the prompt's. Return what its decoding shows for what is held back, and from now on
        give out only what is beyond that.
        """

    def flush(self) -> list[str]:
        """Nothing follows: give out what is held back."""


class _HoldsNothing:
    """What the steps have in common whose output no later piece can change."""

    def end_prompt(self) -> list[str]:
        return []

    def flush(self) -> list[str]:
        return []


class _Stateless(_HoldsNothing):
    """A step that looks at each piece alone."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._function(piece) for piece in pieces]


class _FirstDiffers(_HoldsNothing):
    """A step that looks at each piece alone, but treats the sequence's first one in its own way."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._first = first
        self._later = later
        self._begun = False

    def feed(self, pieces: list[str]) -> list[str]:
        if self._begun or not pieces:
            return [self._later(piece) for piece in pieces]
        self._begun = True
        return [self._first(pieces[0]), *(self._later(piece) for piece in pieces[1:])]


class _ByteLevel:
    """Each piece is bytes in GPT-2's alphabet; all of them together are UTF-8, decoded with replacement."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_showed_tail = False

    def feed(self, pieces: list[str]) -> list[str]:
        return self._give(self._decoder.decode(b"".join(map(_bytes_of_byte_level, pieces))))

    def end_prompt(self) -> list[str]:
        pending, _ = self._decoder.getstate()
        self._prompt_showed_tail = bool(pending)
        return [REPLACEMENT] if pending else []

    def flush(self) -> list[str]:
        return self._give(self._decoder.decode(b"", final=True))

    def _give(self, text: str) -> list[str]:
        if not text:
            return []
        if self._prompt_showed_tail:  # as one U+FFFD: an incomplete tail is always one
            self._prompt_showed_tail = False
            text = text.removeprefix(REPLACEMENT)
        return [text] if text else []


class _ByteFallback:
    """Pieces of the form <0xE4> are bytes. A run of them is text if all of it is UTF-8, else one U+FFFD per byte."""

    def __init__(self) -> None:
        self._run = bytearray()
        self._num_prompt_bytes = 0

    def feed(self, pieces: list[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            match = _BYTE_TOKEN.fullmatch(piece) if piece.startswith("<0x") else None
            if match is not None:
                self._run.append(int(match[1], 16))
                continue
            if self._run:
                out += self.flush()
            out.append(piece)
        return out

    def end_prompt(self) -> list[str]:
        num_prompt_bytes = len(self._run)
        run = bytes(self._run)
        shown = self.flush()
        self._run += run
        self._num_prompt_bytes = num_prompt_bytes
        return shown

    def flush(self) -> list[str]:
        run, num_prompt_bytes = bytes(self._run), self._num_prompt_bytes
        self._run.clear()
        self._num_prompt_bytes = 0
        try:
            text = run.decode()
        except UnicodeDecodeError:
            return [REPLACEMENT] * (len(run) - num_prompt_bytes)
        # A character whose last byte is the prompt's is the prompt's.
        text = text[len(run[:num_prompt_bytes].decode(errors="ignore")) :]
        return [text] if text else []


class _FusedStrip:
    """Up to `start` leading and `stop` trailing characters `content` are cut from the whole text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._num_to_cut = start
        self._stop = stop
        self._held = ""

    def feed(self, pieces: list[str]) -> list[str]:
        text = self._held + self._cut_start("".join(pieces))
        num_trailing = min(self._stop, len(text) - len(text.rstrip(self._content)))
        cut = len(text) - num_trailing
        self._held = text[cut:]
        return [text[:cut]] if cut else []

    def end_prompt(self) -> list[str]:
        return []

    def flush(self) -> list[str]:
        self._held = ""
        return []

    def _cut_start(self, text: str) -> str:
        cut = 0
        while self._num_to_cut and cut < len(text):
            if text[cut] != self._content:
                self._num_to_cut = 0
                break
            self._num_to_cut -= 1
            cut += 1
        return text[cut:]


class _EndOfWord(_HoldsNothing):
    """A suffix marks the end of a word: a space before the next piece, nothing at the end of the text."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._owes_space = False

    def feed(self, pieces: list[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            if self._owes_space:
                out.append(" ")
            self._owes_space = bool(self._suffix) and piece.endswith(self._suffix)
            out.append(piece.removesuffix(self._suffix) if self._owes_space else piece)
        return out


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, stages: Sequence[Stage], token_strings: Sequence[str | None]) -> None:
        """`token_strings`: by token id; None for those that are left out of the text. Ids beyond it have no text."""
        self._stages = tuple(stages)
        self._token_strings = token_strings

    def prime(self, prompt_token_ids: Sequence[int]) -> None:
        """Take the prompt, whose text is not given out. At most once, before any push."""
        self._run(self._pieces(prompt_token_ids))
        pieces: list[str] = []
        for stage in self._stages:
            # The later stages see the prompt's text as its decoding shows it, held back parts included.
            pieces = stage.feed(pieces) + stage.end_prompt()

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often empty."""
        return "".join(self._run(self._pieces((token_id,))))

    def flush(self) -> str:
        """The rest, as the end of the text decides it. Nothing may be pushed afterwards."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.feed(pieces) + stage.flush()
        return "".join(pieces)

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        strings = self._token_strings
        known = (strings[token_id] for token_id in token_ids if token_id < len(strings))
        return [string for string in known if string is not None]

    def _run(self, pieces: list[str]) -> list[str]:
        for stage in self._stages:
            pieces = stage.feed(pieces)
        return pieces


def compile_decoder(spec: Mapping[str, Any] | None) -> Callable[[], list[Stage]]:
    """The `decoder` of tokenizer.json as a maker of fresh stages. Raises ConfigurationError for one that cannot be run
    incrementally; none that a text model is known to use.
    """
    makers: list[Callable[[], Stage]] = []
    fused = False
    for step in _flatten(spec):
        kind = step.get("type")
        maker = _fused_maker(step) if fused else _maker(step)
        if maker is not None:
            makers.append(maker)
        elif kind != "Fuse":
            raise ConfigurationError(f"the tokenizer's decoder step {kind!r} is not supported at its place")
        fused = fused or kind in {"Fuse", "ByteLevel"}
    return lambda: [make() for make in makers]


def _flatten(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return [{"type": None}]
    if spec.get("type") != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _flatten(inner)]


def _maker(step: Mapping[str, Any]) -> Callable[[], Stage] | None:
    """How to make the stage of one step that sees the tokens one by one; None if there is none."""
    match step.get("type"):
        case None:
            return lambda: _FirstDiffers(str, lambda piece: " " + piece)
        case "ByteLevel":
            return _ByteLevel
        case "ByteFallback":
            return _ByteFallback
        case "Replace":
            replace = _replace(step)
            return lambda: _Stateless(replace)
        case "Strip":
            strip = decoders.Strip(step["content"], step["start"], step["stop"])
            return lambda: _Stateless(lambda piece: str(strip.decode([piece])))
        case "Metaspace":
            return _metaspace(step)
        case "WordPiece":
            return _word_piece(step)
        case "BPEDecoder":
            return lambda: _EndOfWord(step["suffix"])
    return None


def _fused_maker(step: Mapping[str, Any]) -> Callable[[], Stage] | None:
    """The same for a step that sees all the text as one token, because an earlier one has fused it."""
    match step.get("type"):
        case "Strip":
            return lambda: _FusedStrip(step["content"], step["start"], step["stop"])
        case "Replace" if len(step["pattern"].get("String", "")) == 1:
            replace = _replace(step)
            return lambda: _Stateless(replace)
    return None


def _replace(step: Mapping[str, Any]) -> Callable[[str], str]:
    pattern, content = step["pattern"], step["content"]
    if "String" in pattern:
        return lambda piece: piece.replace(pattern["String"], content)
    decoder = decoders.Replace(Regex(pattern["Regex"]), content)  # its regex dialect is not Python's
    return lambda piece: str(decoder.decode([piece]))


def _metaspace(step: Mapping[str, Any]) -> Callable[[], Stage]:
    replacement = step["replacement"]
    cuts_first = step.get("prepend_scheme", "always") != "never"
    return lambda: _FirstDiffers(
        lambda piece: piece.replace(replacement, "" if cuts_first else " "),
        lambda piece: piece.replace(replacement, " "),
    )


_CLEANUPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(step: Mapping[str, Any]) -> Callable[[], Stage]:
    prefix = step["prefix"]

    def first(piece: str) -> str:
        if step.get("cleanup", True):
            for dirty, clean in _CLEANUPS:
                piece = piece.replace(dirty, clean)
        return piece

    def later(piece: str) -> str:
        return first(piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece)

    return lambda: _FirstDiffers(first, later)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters: a printable one is itself, the rest come from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(rest)}


_BYTE_OF_CHAR = byte_level_alphabet()


@lru_cache(maxsize=2**17)
def _bytes_of_byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet (some added tokens have one) stands for itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
