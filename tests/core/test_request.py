from __future__ import annotations

from itertools import product

import pytest

from scheduler.core.request import AGEING_STEPS, LEGAL_MOVES, Sequence, SequenceStatus, make_request
from tests.fakes import make_submit


def make_sequence(priority: int = 0, arrival: int = 1, step_id: int = 0) -> Sequence:
    submit = make_submit(7, [1, 2, 3], resume_token_ids=(4,), max_tokens=5, priority=priority)
    return make_request(submit, step_id=step_id, arrival=arrival, first_seq_id=arrival, max_model_len=100).sequences[0]


@pytest.mark.parametrize(("before", "after"), list(product(SequenceStatus, SequenceStatus)))
def test_moves(before: SequenceStatus, after: SequenceStatus) -> None:
    """move_to makes exactly the moves of the table, and an illegal one changes nothing."""
    sequence = make_sequence()
    sequence.status = before
    if after in LEGAL_MOVES[before]:
        sequence.move_to(after)
        assert sequence.status is after
    else:
        with pytest.raises(AssertionError):
            sequence.move_to(after)
        assert sequence.status is before


def test_finished_is_final() -> None:
    """Every status can end, and nothing comes after the end."""
    assert not LEGAL_MOVES[SequenceStatus.FINISHED]
    assert all(SequenceStatus.FINISHED in after for before, after in LEGAL_MOVES.items() if after)


def test_order() -> None:
    """A higher priority goes first, whenever it arrived; within a priority the earlier arrival does."""
    late_high, early, late = make_sequence(priority=1, arrival=9), make_sequence(arrival=2), make_sequence(arrival=3)
    assert sorted([late, early, late_high], key=lambda sequence: sequence.order) == [late_high, early, late]


def test_waiting_makes_up_for_priority() -> None:
    """A request is passed by one of a priority p points above for as long as p times AGEING_STEPS, and not later."""
    for points in (1, 3, 200):
        early = make_sequence(arrival=1, step_id=10)
        just_in_time = make_sequence(priority=points, arrival=2, step_id=10 + points * AGEING_STEPS - 1)
        too_late = make_sequence(priority=points, arrival=3, step_id=10 + points * AGEING_STEPS)
        assert just_in_time.order < early.order < too_late.order


def test_resumed_tokens_are_output() -> None:
    """Resumed tokens follow the prompt and use up max_tokens."""
    sequence = make_sequence()
    assert sequence.token_ids == [1, 2, 3, 4]
    assert sequence.num_prompt_tokens == 3
    assert sequence.num_uncomputed_tokens == 4
    assert sequence.num_tokens_max == 3 + 5


def test_context_bounds_the_length() -> None:
    """A sequence never outgrows max_model_len, however large max_tokens is."""
    submit = make_submit(1, [1, 2, 3], max_tokens=2**31 - 1)
    assert make_request(submit, step_id=0, arrival=1, first_seq_id=1, max_model_len=10).num_tokens_max == 10
