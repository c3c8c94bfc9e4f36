"""What is known of a stream: what it has had, what is left of it, and whether it is past the place of a death."""

from __future__ import annotations

from scheduler.messages import FinishReason, SamplingParams, SequenceOutput, SequenceStart, StoppingParams, Submit
from service.journal import Journal, JournalEntry

THREE = (SequenceStart(0), SequenceStart(1), SequenceStart(2))


def entry_of(*sequences: SequenceStart, alone_until: int = 0) -> JournalEntry:
    """A stream whose first attempt has just been sent."""
    submit = Submit(1, (1, 2), SamplingParams(), StoppingParams(100), sequences)
    entry = Journal().open(submit)
    entry.on_sent(entry.next_attempt(alone_until), message_ordinal=1)
    return entry


def bring(entry: JournalEntry, index: int, *token_ids: int, end: FinishReason | None = None) -> None:
    entry.record(SequenceOutput(1, index, token_ids, finish_reason=end))


def test_the_next_attempt_names_the_unfinished_sequences_behind_their_own_tokens() -> None:
    """Each has its own; those that finished are not sent again; indexes stay, also over several attempts."""
    entry = entry_of(*THREE)
    bring(entry, 0, 5, 6)
    bring(entry, 1, 7, end=FinishReason.EOS)
    bring(entry, 2, 8)
    again = entry.next_attempt(alone_until=4)
    assert again.sequences == (SequenceStart(0, (5, 6)), SequenceStart(2, (8,)))
    assert again.alone_until == 4
    entry.on_sent(again, message_ordinal=2)
    bring(entry, 2, 9, 10)
    bring(entry, 0, 11, end=FinishReason.EOS)
    assert entry.next_attempt(0).sequences == (SequenceStart(2, (8, 9, 10)),)
    assert not entry.is_finished
    bring(entry, 2, end=FinishReason.MAX_TOKENS)
    assert entry.is_finished


def test_resumed_tokens_of_the_caller_stay_in_front() -> None:
    """What a call began with and what engines brought are one row for the next engine."""
    entry = entry_of(SequenceStart(0, (3, 4)))
    assert not entry.has_output
    bring(entry, 0, 5)
    assert entry.next_attempt(0).sequences == (SequenceStart(0, (3, 4, 5)),)
    assert entry.num_output_tokens == 3


def test_progress_is_that_of_the_present_attempt() -> None:
    """A token of any sequence is progress; what earlier attempts brought is not."""
    entry = entry_of(*THREE)
    assert not entry.has_progressed
    bring(entry, 1, 5)
    assert entry.has_progressed
    entry.on_sent(entry.next_attempt(0), message_ordinal=2)
    assert not entry.has_progressed
    bring(entry, 2, 6)
    assert entry.has_progressed


def test_a_suspect_is_past_its_place_with_its_last_sequence() -> None:
    """Alone until each unfinished sequence has the tokens that were asked for; told once."""
    entry = entry_of(*THREE, alone_until=2)
    told = []
    for index, token_ids, end in (
        (0, (5, 6, 7), None),
        (1, (5,), None),
        (2, (5, 6), None),
        (1, (), FinishReason.EOS),
        (0, (8,), None),
    ):
        bring(entry, index, *token_ids, end=end)
        told.append((entry.is_alone, entry.gets_past_its_place()))
    assert told == [(True, False), (True, False), (True, False), (False, True), (False, False)]


def test_who_is_no_suspect_or_was_past_its_place_gets_past_none() -> None:
    """Sent without a place, or with tokens enough from before: there is nothing to be cleared of."""
    innocent = entry_of(*THREE)
    bring(innocent, 0, 5)
    assert not innocent.is_alone
    assert not innocent.gets_past_its_place()
    beyond = entry_of(SequenceStart(0, (1, 2, 3)), alone_until=3)
    bring(beyond, 0, 5)
    assert not beyond.gets_past_its_place()


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    """What a later engine finds in its cache is no gain of the caller's."""
    entry = entry_of(*THREE)
    entry.record(SequenceOutput(1, 0, (5,), num_cached_tokens=16))
    entry.record(SequenceOutput(1, 1, (5,), num_cached_tokens=0))
    entry.on_sent(entry.next_attempt(0), message_ordinal=2)
    entry.record(SequenceOutput(1, 0, (6,), num_cached_tokens=32))
    assert entry.num_cached_tokens == 16
