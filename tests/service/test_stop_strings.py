from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from service.stop_strings import StopStrings

ALPHABET = "ab\n"
TEXTS = st.text(ALPHABET, max_size=14)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that is complete first, and the longest match that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """What is sent after each piece, with the flush at the end."""
    search = StopStrings(stops, include_stop=include_stop)
    sent = []
    for piece in pieces:
        scan = search.feed(piece, may_stop=True)
        sent.append(scan.text)
        if scan.matched is not None:
            return sent, scan.matched
    return [*sent, search.flush()], None


def cut(text: str, cuts: set[int]) -> list[str]:
    ends = [0, *sorted(position for position in cuts if position < len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


@given(text=TEXTS, stops=STOPS, cuts=st.sets(st.integers(0, 14)))
@example(text="aab", stops=["aab", "ab"], cuts={1, 2})
@example(text="ababa", stops=["abab\n", "ba\n"], cuts={3})
def test_the_match_depends_on_the_text_alone(text: str, stops: list[str], cuts: set[int]) -> None:
    """However it is cut into pieces: the first stop string to be complete, of several the longest."""
    sent, matched = run(cut(text, cuts), stops)
    assert ("".join(sent), matched) == definition(text, stops)


@given(text=TEXTS, stops=STOPS, cuts=st.sets(st.integers(0, 14)))
def test_with_include_stop_the_match_is_in_the_text(text: str, stops: list[str], cuts: set[int]) -> None:
    """The text then ends with the stop string, and nothing is held back."""
    sent, matched = run(cut(text, cuts), stops, include_stop=True)
    before, expected = definition(text, stops)
    assert ("".join(sent), matched) == (before + (expected or ""), expected)


@given(text=TEXTS, stops=STOPS)
def test_exactly_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    """After each character all is sent but the longest end of the text that begins a stop string."""
    search = StopStrings(stops)
    sent = ""
    for end in range(1, len(text) + 1):
        scan = search.feed(text[end - 1], may_stop=True)
        sent += scan.text
        if scan.matched is not None:
            return
        prefixes = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((size for size in range(end + 1) if text[end - size : end] in prefixes), default=0)
        assert sent == text[: end - held]


def test_a_match_before_its_time_is_let_through() -> None:
    """It is text like any other, but its end may begin a match that counts."""
    search = StopStrings(["aba"])
    assert search.feed("xaba", may_stop=False).text == "x" + "ab"
    scan = search.feed("bay", may_stop=True)
    assert (scan.text, scan.matched) == ("", "aba")


def test_without_stop_strings_text_passes() -> None:
    """Nothing is held back, nothing is found."""
    search = StopStrings([])
    assert search.feed("abc", may_stop=True).text == "abc"
    assert search.flush() == ""


def test_the_longest_stop_strings_cost_little() -> None:
    """Sixteen stop strings of 1,024 characters, all of one letter but the last: each character is looked at a bounded
    number of times, which a naive search would not finish in this test's time limit.
    """
    stops = ["a" * 1023 + chr(ord("b") + rank) for rank in range(16)]
    search = StopStrings(stops)
    sent = sum(len(search.feed("a" * 10, may_stop=True).text) for _ in range(1000))
    assert sent == 10_000 - 1023
