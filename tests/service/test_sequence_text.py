from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.messages import FinishReason
from service.sequence_text import SequenceText, TextDelta
from service.tokenizer import Tokenizer
from tests.service.tiny_tokenizers import byte_fallback, byte_level, load


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("byte_level"), byte_level())


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("byte_fallback"), byte_fallback())


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token per byte, so that a test says which token completes what."""
    by_string = {string: token_id for token_id, string in enumerate(tokenizer._token_strings)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(rest)}
    return [by_string[chars[byte]] for byte in text.encode()]


STOP = FinishReason.STOP_STRING


def test_a_stop_string_over_three_tokens_never_leaks(tokenizer: Tokenizer) -> None:
    """What may become one is held back, and sent once it cannot."""
    text = SequenceText(tokenizer, ids(tokenizer, "p"), stop_strings=["END"])
    sent = [text.push([token_id]).text for token_id in ids(tokenizer, "aENbE")]
    assert sent == ["a", "", "", "ENb", ""]
    assert text.push(ids(tokenizer, "N")) == TextDelta("", 1)
    assert text.push(ids(tokenizer, "D")) == TextDelta("", 1, STOP, "END")


def test_tokens_past_a_stop_string_are_not_kept(tokenizer: Tokenizer) -> None:
    """Those up to the one that completes it are; the text ends before it, or after it if asked for."""
    chunk = ids(tokenizer, "abSTOPcd")
    text = SequenceText(tokenizer, [], stop_strings=["STOP"])
    assert text.push(chunk) == TextDelta("ab", 6, STOP, "STOP")
    text = SequenceText(tokenizer, [], stop_strings=["STOP"], include_stop=True)
    assert text.push(chunk) == TextDelta("abSTOP", 6, STOP, "STOP")


def test_a_stop_string_goes_before_any_other_end(tokenizer: Tokenizer) -> None:
    """Reached by the very token that reaches max_tokens, or before an EOS that the engine had already sampled."""
    text = SequenceText(tokenizer, [], stop_strings=["b"])
    assert text.push(ids(tokenizer, "ab"), FinishReason.MAX_TOKENS) == TextDelta("a", 2, STOP, "b")
    eos = tokenizer._token_strings.index("<|im_end|>")
    text = SequenceText(tokenizer, [], stop_strings=["b"])
    assert text.push([*ids(tokenizer, "ab"), eos], FinishReason.EOS) == TextDelta("a", 2, STOP, "b")


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.STOP_TOKEN])
def test_the_token_that_ends_a_sequence_counts_but_has_no_text(tokenizer: Tokenizer, reason: FinishReason) -> None:
    """Not even where special tokens are shown; another special token then is."""
    special = tokenizer._token_strings.index("<|im_end|>")
    text = SequenceText(tokenizer, [], skip_special_tokens=False)
    assert text.push([special, *ids(tokenizer, "a"), special], reason) == TextDelta("<|im_end|>a", 3, reason)
    text = SequenceText(tokenizer, [])
    assert text.push([special], reason) == TextDelta("", 1, reason)


def test_an_end_sends_what_was_held_back(tokenizer: Tokenizer) -> None:
    """The beginning of a stop string that never came, and an incomplete character, as decode() shows it."""
    text = SequenceText(tokenizer, [], stop_strings=["STOP"])
    broken = ids(tokenizer, "你")[:2]
    assert text.push([*ids(tokenizer, "aST"), *broken]) == TextDelta("a", 5)
    assert text.push(ids(tokenizer, "x")[:0], FinishReason.MAX_TOKENS) == TextDelta(
        "ST\ufffd", 0, FinishReason.MAX_TOKENS
    )


def test_a_stop_string_may_end_with_what_only_the_end_decides(tokenizer: Tokenizer) -> None:
    """No stop string is ever in the text, even one with U+FFFD that the flush completes."""
    text = SequenceText(tokenizer, [], stop_strings=["a\ufffd"])
    broken = [*ids(tokenizer, "a"), ids(tokenizer, "你")[0]]
    eos = tokenizer._token_strings.index("<|im_end|>")
    assert text.push([*broken, eos], FinishReason.EOS) == TextDelta("", 2, STOP, "a\ufffd")


def test_min_tokens_defers_stop_strings(tokenizer: Tokenizer) -> None:
    """A match counts if the token that completes it is at least the min_tokens-th; resumed ones count."""
    text = SequenceText(tokenizer, [], stop_strings=["b"], min_tokens=3)
    assert text.push(ids(tokenizer, "abbb")) == TextDelta("ab", 3, STOP, "b")
    text = SequenceText(tokenizer, [], ids(tokenizer, "ab"), stop_strings=["b"], min_tokens=3)
    assert text.resumed is None
    assert text.push(ids(tokenizer, "b")) == TextDelta("", 1, STOP, "b")


def test_resumed_tokens_with_a_complete_stop_string_are_the_end(tokenizer: Tokenizer) -> None:
    """Nothing follows: no text is sent again, no token counts."""
    text = SequenceText(tokenizer, [], ids(tokenizer, "aSTOP"), stop_strings=["STOP"])
    assert text.resumed == TextDelta("", 0, STOP, "STOP")


def test_an_end_that_the_resumed_tokens_had_reached_sends_nothing_again(tokenizer: Tokenizer) -> None:
    """The delta that brought the last of them brought all text; an end that came later sends what was held back."""
    resumed = ids(tokenizer, "aST")
    text = SequenceText(tokenizer, [], resumed, stop_strings=["STOP"])
    assert text.push([], FinishReason.MAX_TOKENS) == TextDelta("", 0, FinishReason.MAX_TOKENS)
    text = SequenceText(tokenizer, [], resumed, stop_strings=["STOP"])
    assert text.push([], FinishReason.TIME_LIMIT) == TextDelta("ST", 0, FinishReason.TIME_LIMIT)
    text = SequenceText(tokenizer, [], resumed, stop_strings=["STOP"])
    assert text.push([0], FinishReason.EOS) == TextDelta("ST", 1, FinishReason.EOS)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    output=st.text("abS你💖T", max_size=8),
    cut=st.integers(0, 30),
    stops=st.lists(st.sampled_from(["ST", "aS", "你b", "TT", "\ufffd"]), max_size=2),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_a_resumed_stream_goes_on_where_the_first_attempt_was(
    tokenizer: Tokenizer,
    fallback: Tokenizer,
    output: str,
    cut: int,
    stops: list[str],
    min_tokens: int,
    include_stop: bool,
    kind: str,
) -> None:
    """Text of the first attempt up to any token, and text of the one that resumes: together the uninterrupted text."""
    if kind == "byte_level":
        prompt, chosen, token_ids = ids(tokenizer, "p"), tokenizer, ids(tokenizer, output)
    else:
        prompt, chosen, token_ids = [1], fallback, [3 + byte for byte in output.encode()]
    options = {"stop_strings": stops, "min_tokens": min_tokens, "include_stop": include_stop}

    whole = SequenceText(chosen, prompt, **options).push(token_ids, FinishReason.MAX_TOKENS)  # type: ignore[arg-type] # drawn
    cut = min(cut, max(0, len(token_ids) - 1))
    first = SequenceText(chosen, prompt, **options)  # type: ignore[arg-type] # drawn
    sent = ""
    for position, token_id in enumerate(token_ids[:cut]):
        delta = first.push([token_id])
        sent += delta.text
        if delta.finish_reason is not None:
            assert (sent, position + 1) == (whole.text, whole.num_kept_tokens)
            return
    second = SequenceText(chosen, prompt, token_ids[:cut], **options)  # type: ignore[arg-type] # drawn
    assert second.resumed is None
    if cut == len(token_ids):
        return
    delta = second.push(token_ids[cut:], FinishReason.MAX_TOKENS)
    assert sent + delta.text == whole.text
    assert (delta.finish_reason, delta.matched_stop) == (whole.finish_reason, whole.matched_stop)
    assert cut + delta.num_kept_tokens == whole.num_kept_tokens
