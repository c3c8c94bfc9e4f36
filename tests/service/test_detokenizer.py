from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigurationError
from scheduler.messages import FinishReason
from service.detokenizer import compile_decoder
from service.sequence_text import SequenceText
from service.tokenizer import Tokenizer, load_tokenizer
from tests.service.tiny_tokenizers import DEFAULT_MODEL, KINDS, load

Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Load:
    loaded: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in loaded:
            directory: Path = tmp_path_factory.mktemp(kind)
            loaded[kind] = load_tokenizer(DEFAULT_MODEL) if kind == "default_model" else load(directory, KINDS[kind]())
        return loaded[kind]

    return get


def text_in_chunks(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], cuts: set[int], *, skip: bool
) -> list[str]:
    """The deltas of one sequence, pushed in chunks that end at `cuts`."""
    text = SequenceText(tokenizer, prompt, skip_special_tokens=skip)
    ends = [*sorted(cut for cut in cuts if cut < len(output)), len(output)]
    deltas = []
    begin = 0
    for end in ends:
        reason = FinishReason.MAX_TOKENS if end == len(output) else None
        deltas.append(text.push(output[begin:end], reason).text)
        begin = end
    return deltas


ALL_KINDS = [*KINDS, *(["default_model"] if (DEFAULT_MODEL / "tokenizer.json").is_file() else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_concatenate_to_the_definition(tokenizer_of: Load, kind: str, data: st.DataObject) -> None:
    """Whatever the tokens and the chunks: decode(prompt + kept) less decode(prompt), for every kind of decoder."""
    tokenizer = tokenizer_of(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    skip = data.draw(st.booleans())
    deltas = text_in_chunks(tokenizer, prompt, output, data.draw(st.sets(st.integers(1, 11))), skip=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if after.startswith(before):
        assert "".join(deltas) == after[len(before) :]
    else:  # the prompt ends inside a character, and the output has changed how that shows
        assert after.endswith("".join(deltas))
        assert len("".join(deltas)) <= len(after) - len(before.rstrip("\ufffd")) or "\ufffd" in after


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.binary(max_size=6),
    output=st.lists(
        st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x92, 0x96, 0xFF, 0x41, 0xC3, 0xA9, 0xED]), max_size=12
    ),
)
def test_bytes_of_a_byte_level_model_in_any_order(tokenizer_of: Load, prompt: bytes, output: list[int]) -> None:
    """Every byte a token of its own: broken, truncated and whole characters, with a prompt that may end in one."""
    tokenizer = tokenizer_of("byte_level")
    ids_of_bytes = byte_ids(tokenizer)
    prompt_ids = [ids_of_bytes[byte] for byte in prompt]
    output_ids = [ids_of_bytes[byte] for byte in output]
    deltas = text_in_chunks(tokenizer, prompt_ids, output_ids, set(range(1, 12)), skip=True)
    before, after = prompt.decode(errors="replace"), (prompt + bytes(output)).decode(errors="replace")
    if not after.startswith(before):
        before = before.removesuffix("\ufffd")
    assert "".join(deltas) == after[len(before) :]


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The id of each single byte's token in a byte-level vocabulary."""
    by_string = {string: token_id for token_id, string in enumerate(tokenizer._token_strings)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(rest)}
    return [by_string[chars[byte]] for byte in range(256)]


@settings(max_examples=100, deadline=None)
@given(
    output=st.lists(st.integers(0, 280), max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_what_is_sent_at_any_moment_depends_on_the_tokens_alone(
    tokenizer_of: Load, output: list[int], cuts: set[int], kind: str
) -> None:
    """After the same tokens the same text has been sent, whether they came one by one or in chunks."""
    tokenizer = tokenizer_of(kind)
    by_chunk = SequenceText(tokenizer, [1], stop_strings=["a你", "\ufffdb"])
    by_token = SequenceText(tokenizer, [1], stop_strings=["a你", "\ufffdb"])
    sent_by_chunk = sent_by_token = ""
    begin = 0
    for end in [*sorted(cut for cut in cuts if cut < len(output)), len(output)]:
        delta = by_chunk.push(output[begin:end])
        sent_by_chunk += delta.text
        for token_id in output[begin : begin + delta.num_kept_tokens]:
            sent_by_token += by_token.push([token_id]).text
        assert sent_by_chunk == sent_by_token
        if delta.finish_reason is not None:
            break
        begin = end


def test_an_incomplete_character_is_held_back(tokenizer_of: Load) -> None:
    """No part of a character is ever sent, and the whole of it as soon as its last byte is there."""
    tokenizer = tokenizer_of("byte_level")
    ids = byte_ids(tokenizer)
    text = SequenceText(tokenizer, [ids[0x41]])
    assert [text.push([ids[byte]]).text for byte in "💖ก".encode()] == ["", "", "", "💖", "", "", "ก"]


def test_a_byte_that_can_begin_nothing_is_shown_at_once(tokenizer_of: Load) -> None:
    """U+FFFD is sent for what can never become valid, without waiting."""
    tokenizer = tokenizer_of("byte_level")
    ids = byte_ids(tokenizer)
    text = SequenceText(tokenizer, [ids[0x41]])
    assert [text.push([ids[byte]]).text for byte in (0xFF, 0xE4, 0x42)] == ["\ufffd", "", "\ufffdB"]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"A\xe4\xbd", b"\xa0!", "你!"),  # the output completes it: it is in no decoding of the prompt
        (b"A\xe4\xbd", b"B", "B"),  # the prompt's decoding showed the broken tail already
        (b"A\xe4\xbd", b"", ""),
        (b"A\xf0\x9f", b"\x92", ""),  # still broken at the end, and shown already
        (b"A\xf0\x9f", b"\x92B", "B"),
    ],
)
def test_a_prompt_that_ends_inside_a_character(tokenizer_of: Load, prompt: bytes, output: bytes, expected: str) -> None:
    """A byte-level prompt's broken tail never puts prompt text into the output, and loses no character."""
    tokenizer = tokenizer_of("byte_level")
    ids = byte_ids(tokenizer)
    deltas = text_in_chunks(tokenizer, [ids[b] for b in prompt], [ids[b] for b in output], {1}, skip=True)
    assert "".join(deltas) == expected


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"\xe4\xbd", b"\xa0", "你"),
        (b"\xe4\xbd\xa0\xe4\xbd", b"\xa0", "你"),  # the first of the two is the prompt's
        (b"\xe4\xbd\xa0", b"A", "A"),
        (b"\xe4\xbd\xa0", b"\xff", "\ufffd"),  # one per byte of the output; the prompt's are not shown again
        (b"\xe4", b"\xff\xff", "\ufffd\ufffd"),
    ],
)
def test_a_prompt_that_ends_inside_a_run_of_byte_tokens(
    tokenizer_of: Load, prompt: bytes, output: bytes, expected: str
) -> None:
    """Of a run that prompt and output share, the output shows what its own bytes complete."""
    tokenizer = tokenizer_of("byte_fallback")
    deltas = text_in_chunks(tokenizer, [1, *(3 + b for b in prompt)], [3 + b for b in output], {1}, skip=True)
    assert "".join(deltas) == expected


def test_the_first_space_is_cut_only_at_the_beginning_of_the_text(tokenizer_of: Load) -> None:
    """A prompt of special tokens alone leaves the first output token at the beginning of the text; another does not."""
    tokenizer = tokenizer_of("metaspace")
    piece = tokenizer._token_strings.index("▁a")
    assert SequenceText(tokenizer, [1]).push([piece]).text == "a"
    assert SequenceText(tokenizer, [1, piece]).push([piece]).text == " a"
    assert SequenceText(tokenizer, [1], skip_special_tokens=False).push([piece]).text == " a"


def test_pieces_show_each_token_as_inside_a_text(tokenizer_of: Load) -> None:
    """A piece keeps its leading space; a broken character shows as U+FFFD; a special token shows itself."""
    fallback = tokenizer_of("byte_fallback")
    strings = fallback._token_strings
    ids = [strings.index("▁a"), strings.index("b"), strings.index("<0xE4>"), strings.index("</s>"), 10_000]
    assert fallback.pieces(ids) == [" a", "b", "\ufffd", "</s>", ""]
    byte_level = tokenizer_of("byte_level")
    assert byte_level.pieces([byte_ids(byte_level)[0xE4], byte_ids(byte_level)[0x20]]) == ["\ufffd", " "]


def test_a_decoder_that_cannot_run_incrementally_is_refused_by_name() -> None:
    """Loading says which step is at fault, instead of sending wrong text later."""
    with pytest.raises(ConfigurationError, match="CTC"):
        compile_decoder({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True})
    with pytest.raises(ConfigurationError, match="ByteFallback"):
        compile_decoder({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]})


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_cost_of_a_token_does_not_grow_with_the_output(tokenizer_of: Load, kind: str) -> None:
    """What a detokenizer keeps stays as small after 20,000 tokens as after ten: it never looks back."""
    tokenizer = tokenizer_of(kind)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    ids = [tokenizer._token_strings.index(char) for char in "abc"]
    sizes = []
    for count in range(20_000):
        detokenizer.push(ids[count % 3])
        if count in {10, 19_999}:
            sizes.append([len(repr(vars(stage))) for stage in detokenizer._stages])
    assert sizes[0] == sizes[1]
