"""Which tokens may come next, as a function of the output, and what becomes of a request whose guide cannot tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler.guide_messages import GuideKind
from scheduler.messages import FailureKind
from scheduler.model.guided import matcher
from scheduler.model.guided.matcher import CompiledGuides, GuidedSequence, GuideReader
from tests.model.guided.vocabularies import EOS, TOKENS, compiled, ids

WAIT_S = 60.0
WORDS = -(-len(TOKENS) // 32)


@pytest.fixture
def guides(monkeypatch: pytest.MonkeyPatch) -> CompiledGuides:
    """Of the vocabulary on one screen."""
    monkeypatch.setattr("scheduler.model.guided.vocabulary.read_vocabulary", lambda *_: TOKENS)
    return CompiledGuides("model", None, len(TOKENS))


def array(token_ids: list[int]) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def allowed(sequence: GuidedSequence, output: list[int]) -> set[bytes | int]:
    """What may come next: bytes of tokens, and the EOS id."""
    bitmask = np.full((3, WORDS), 0x55, dtype=np.int32)
    assert sequence.fill(array(output), bitmask, 1) is None
    assert (bitmask[[0, 2]] == 0x55).all(), "other rows are not touched"
    bits = np.unpackbits(bitmask[1:2].view(np.uint8), axis=1, count=len(TOKENS), bitorder="little")[0]
    found = np.flatnonzero(bits).tolist()
    return {TOKENS[token_id] or token_id for token_id in found}


def sequence_of(guides: Any, guide: bytes, num_given: int = 0) -> GuidedSequence:
    return GuidedSequence(guides, guide, (EOS,), num_given)


def test_the_mask_is_what_the_guide_allows(guides: CompiledGuides) -> None:
    """Single bytes and longer tokens; the end of sequence where the form is complete, and nothing else at its end."""
    sequence = sequence_of(guides, compiled(GuideKind.REGEX, "abc?"))
    assert allowed(sequence, []) == {b"a", b"ab", b"abc"}
    assert allowed(sequence, ids("a")) == {b"b"}
    assert allowed(sequence, ids("ab")) == {b"c", EOS}
    assert allowed(sequence, ids("abc")) == {EOS}


def test_tokens_without_a_text_are_never_allowed(guides: CompiledGuides) -> None:
    """Not even where the guide takes anything: special tokens and unused rows are not text."""
    sequence = sequence_of(guides, compiled(GuideKind.REGEX, "(.|\\n)*"))
    assert allowed(sequence, []) & {0, 1} == set()
    assert EOS in allowed(sequence, [])


def test_the_state_is_a_function_of_the_output(guides: CompiledGuides) -> None:
    """Token by token, all at once after a resume or a replay, or asked twice: the same mask."""
    guide = compiled(
        GuideKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    text = ids('{"a": 12')
    step_by_step = sequence_of(guides, guide)
    for end in range(len(text) + 1):
        fresh = sequence_of(guides, guide, num_given=end)
        assert allowed(fresh, text[:end]) == allowed(step_by_step, text[:end]) == allowed(step_by_step, text[:end])


def test_two_sequences_of_one_guide_know_nothing_of_each_other(guides: CompiledGuides) -> None:
    """They share the compiled guide and no state."""
    guide = compiled(GuideKind.CHOICE, options=("ab", "ba"))
    first, second = sequence_of(guides, guide), sequence_of(guides, guide)
    assert allowed(first, ids("a")) == {b"b"}
    assert allowed(second, ids("b")) == {b"a"}


def test_resumed_tokens_that_do_not_follow(guides: CompiledGuides) -> None:
    """They are the caller's word: BAD_GUIDE."""
    sequence = sequence_of(guides, compiled(GuideKind.REGEX, "abc"), num_given=2)
    failure = sequence.fill(array(ids("ax")), np.zeros((1, WORDS), np.int32), 0)
    assert failure is not None
    assert failure.kind is FailureKind.BAD_GUIDE


def test_sampled_tokens_that_do_not_follow_are_our_bug(guides: CompiledGuides) -> None:
    """The mask had allowed them, so it is an incident, and of this request alone."""
    sequence = sequence_of(guides, compiled(GuideKind.REGEX, "abc"))
    assert allowed(sequence, ids("a")) == {b"b"}
    failure = sequence.fill(array(ids("ax")), np.zeros((1, WORDS), np.int32), 0)
    assert failure is not None
    assert failure.kind is FailureKind.INTERNAL
    assert failure.incident_id


@pytest.mark.parametrize("guide", [b"nonsense", compiled(GuideKind.REGEX, "a")[:-3]])
def test_bytes_that_are_no_guide(guides: CompiledGuides, guide: bytes) -> None:
    """An incident of the request, each time it is tried."""
    for _ in range(2):
        failure = sequence_of(guides, guide).fill(array([]), np.zeros((1, WORDS), np.int32), 0)
        assert failure is not None
        assert failure.kind is FailureKind.INTERNAL


def test_a_guide_that_takes_too_long_fails(guides: CompiledGuides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody else waits while its mask is made."""
    sequence = sequence_of(guides, compiled(GuideKind.REGEX, "a+"))
    clock = iter((0.0, matcher.MASK_S_MAX + 0.1))
    monkeypatch.setattr(matcher.time, "thread_time", lambda: next(clock))
    failure = sequence.fill(array([]), np.zeros((1, WORDS), np.int32), 0)
    assert failure is not None
    assert failure.kind is FailureKind.GUIDE_TOO_SLOW


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_reading_is_done_beside_the_loop(guides: CompiledGuides, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide is not ready while it is being read, and once it is, opening it reads nothing."""
    reads: list[bytes] = []
    may_read = False
    read = GuideReader.read

    def slow_read(self: GuideReader, guide: bytes, eos_token_ids: tuple[int, ...]) -> Any:
        until(lambda: may_read)
        reads.append(guide)
        return read(self, guide, eos_token_ids)

    monkeypatch.setattr(GuideReader, "read", slow_read)
    guide = compiled(GuideKind.REGEX, "a")
    assert not guides.is_ready(guide, (EOS,))
    assert not guides.is_ready(guide, (EOS,))
    may_read = True
    until(lambda: guides.is_ready(guide, (EOS,)))
    guides.open(guide, (EOS,))
    assert guides.is_ready(guide, (EOS,))
    guides.open(guide, (EOS,))
    assert reads == [guide]


def test_guides_kept_are_bounded_by_bytes(guides: CompiledGuides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used longest ago give way, and are read again when they come back."""
    monkeypatch.setattr(matcher, "CACHE_BYTES_MAX", 1)
    first, second = compiled(GuideKind.REGEX, "a"), compiled(GuideKind.REGEX, "b")
    for guide in (first, second):
        guides.open(guide, (EOS,))
    assert guides.is_ready(second, (EOS,))
    assert not guides.is_ready(first, (EOS,))
    assert allowed(sequence_of(guides, first), []) == {b"a"}


def test_guides_that_nobody_opens_are_not_kept_for_ever(
    guides: CompiledGuides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who asked for them left while they were read: the bounds hold for them, too."""
    monkeypatch.setattr(matcher, "CACHE_BYTES_MAX", 1)
    monkeypatch.setattr(matcher, "ERRORS_MAX", 2)
    some = [*(compiled(GuideKind.REGEX, f"a{{{number}}}") for number in range(1, 6)), b"x", b"y", b"z"]
    for guide in some:
        guides.is_ready(guide, (EOS,))
    until(lambda: not guides._being_read)
    assert len(guides._compiled) == 1
    assert len(guides._errors) == 2
