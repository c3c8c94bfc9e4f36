"""Finds stop strings in a text that arrives in pieces, and holds back what may become one.

The law: which stop string ends a text, and where, depends on the text alone, not on its pieces. The first one to be
complete wins; of several complete at the same character the longest, which begins earliest. A match that is complete
before `min_tokens` is let through, though a later one may overlap it.

Each stop string is followed by its Knuth–Morris–Pratt automaton, so that a character costs the same however long the
stop strings are, and the number of characters matched so far is exactly what has to be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """What a piece of text brings."""

    text: str
    """What may be sent now."""
    matched: str | None = None
    """The stop string that ends the text; `text` is then cut at it."""


class StopStrings:
    """The search of one sequence."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stop_strings), key=lambda stop: (-len(stop), stop)))
        self._failures = tuple(_failure_links(stop) for stop in self._stops)
        self._num_matched = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, *, may_stop: bool) -> StopScan:
        """`may_stop`: whether a match completed in this piece counts."""
        if not self._held and not any(self._num_matched) and self._first_chars.isdisjoint(text):
            return StopScan(text)
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            matched = self._advance(pending[position])
            if matched is not None and may_stop:
                self._held = ""
                end = position + 1
                return StopScan(pending[: end if self._include_stop else end - len(matched)], matched)
        cut = len(pending) - (0 if self._include_stop else max(self._num_matched))
        self._held = pending[cut:]
        return StopScan(pending[:cut])

    def flush(self) -> str:
        """What was held back and will become no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Follow all automata over one character; the longest stop string that ends with it."""
        found = None
        for rank, stop in enumerate(self._stops):
            failure = self._failures[rank]
            state = self._num_matched[rank]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found if found is not None else stop
                state = failure[state - 1]
            self._num_matched[rank] = state
        return found


def _failure_links(pattern: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt 1977)."""
    links = [0] * len(pattern)
    state = 0
    for position in range(1, len(pattern)):
        while state and pattern[position] != pattern[state]:
            state = links[state - 1]
        if pattern[position] == pattern[state]:
            state += 1
        links[position] = state
    return tuple(links)
