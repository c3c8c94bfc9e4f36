"""After a failed step: dropping it, confining who may run, limiting how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.scheduler import Scheduler
from scheduler.messages import SequenceStart
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import make_submit

# ------------------------------------------------------------------------------------------------------ dropped steps


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_a_dropped_step_costs_no_token(num_steps: int) -> None:
    """Whenever a step fails, in prefill or in decode, all end with exactly the tokens they would have got."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, range(10 * request_id, 10 * request_id + 6), max_tokens=6))
    for _ in range(num_steps):
        driver.step()
    tokens_before = {request_id: list(answer.token_ids) for request_id, answer in driver.answers.items()}
    driver.fail_step()
    assert {request_id: answer.token_ids for request_id, answer in driver.answers.items()} == tokens_before
    driver.run()
    driver.check_answers()


def test_a_dropped_step_tells_whose_it_was() -> None:
    """The requests come in the order of the plan: decodes first, then chunks; those who waited are not among them."""
    driver = Driver(make_config(max_num_seqs=3))
    for request_id in (4, 9):
        driver.submit(make_submit(request_id, [request_id], max_tokens=9))
    driver.step()
    driver.submit(make_submit(2, range(5)))
    driver.submit(make_submit(1, range(5)))
    assert driver.fail_step() == (4, 9, 2)


def test_everybody_starts_anew() -> None:
    """After a dropped step the runner is told of everyone it knew, preempted ones too, as new, and of no end."""
    driver = Driver(make_config(num_kv_blocks=6, max_model_len=24))
    for request_id, prompt in ((1, range(8)), (2, range(20, 28))):
        driver.submit(make_submit(request_id, prompt, max_tokens=14))
    driver.submit(make_submit(3, [3], max_tokens=1))
    while driver.scheduler.stats().num_preemptions_total == 0:
        driver.step()
    driver.step(while_in_flight=lambda: driver.abort(3))
    driver.fail_step()
    num_plans = len(driver.plans)
    driver.run()
    after = driver.plans[num_plans:]
    assert after[0].finished_seq_ids == ()
    assert [new.seq_id for plan in after for new in plan.new][:2] == [1, 2]
    assert after[0].new[0].token_ids[:8] == tuple(range(8))
    assert after[0].new[0].num_prompt_tokens == 8
    driver.check_answers()


def test_kv_of_a_failed_step_is_found_by_nobody() -> None:
    """What the step's sequences had computed, in good steps before too, is out of the prefix cache."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(16), max_tokens=9))
    driver.step()
    driver.fail_step()
    driver.abort(1)
    later = driver.submit(make_submit(2, range(16)))
    driver.run()
    assert later.outputs[0].num_cached_tokens == 0
    driver.check_answers()


def test_kv_of_those_who_sat_the_step_out_is_kept() -> None:
    """A batch that was not in the failed step finds its blocks again when it starts anew."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(16), max_tokens=9))
    driver.step()
    driver.submit(replace(make_submit(2, range(20, 30)), alone_until=1))
    assert driver.fail_step() == (2,)
    num_plans = len(driver.plans)
    driver.run()
    (again,) = [new for plan in driver.plans[num_plans:] for new in plan.new if new.seq_id == 1]
    assert again.num_computed_tokens == 16
    driver.check_answers()


def test_totals_count_a_prompt_once() -> None:
    """Starting anew adds nothing to the totals of prompt and cached tokens, nor does it count as preemption."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(12), max_tokens=4))
    driver.fail_step()
    driver.step()
    driver.fail_step()
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens_total, stats.num_cached_tokens_total, stats.num_preemptions_total) == (12, 0, 0)
    driver.check_answers()


def test_precedence_survives() -> None:
    """After a dropped step requests are let in in their old order, ahead of later arrivals, priorities included."""
    driver = Driver(make_config(max_num_seqs=2))
    driver.submit(make_submit(1, [1], max_tokens=9))
    driver.submit(make_submit(2, [2], max_tokens=9))
    driver.step()

    def arrive() -> None:
        driver.submit(make_submit(3, [3]))
        driver.submit(make_submit(4, [4], priority=1))

    driver.fail_step(arrive)
    driver.step()
    assert driver.scheduler.step_request_ids == (4, 1)
    driver.run()
    driver.check_answers()


def test_only_a_plan_in_flight_is_dropped() -> None:
    """There is nothing to drop before schedule() or after the update, and nothing to vacate in between."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1]))
    with pytest.raises(AssertionError, match="no plan"):
        driver.scheduler.drop_step()
    assert driver.scheduler.schedule() is not None
    with pytest.raises(AssertionError, match="comes first"):
        driver.scheduler.vacate()
    assert driver.scheduler.drop_step() == (1,)
    with pytest.raises(AssertionError, match="no plan"):
        driver.scheduler.drop_step()


def test_vacating_keeps_what_was_computed() -> None:
    """Sequences taken off the runner in good order find their full blocks again."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(16), max_tokens=9))
    driver.step()
    driver.vacate()
    driver.step()
    assert driver.plans[-1].new[0].num_computed_tokens == 16
    driver.run()
    driver.check_answers()


# ------------------------------------------------------------------------------------------------------- confinement


def confined(driver: Driver, *request_ids: int) -> None:
    driver.vacate()
    driver.confine(request_ids)


def test_confined_steps_hold_nobody_else() -> None:
    """Only the chosen run, whoever is ahead of them or arrives; the others count as waiting, with their tokens."""
    driver = Driver(make_config())
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, [request_id] * 5, max_tokens=9))
    driver.step()
    confined(driver, 2)
    driver.submit(make_submit(4, [4], priority=9))
    driver.step()
    assert set(scheduled(driver)) == {2}
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 3, 6 + 6 + 1)
    driver.run()
    assert driver.answers[2].is_over
    driver.unconfine()
    driver.step()
    assert list(scheduled(driver)) == [4, 1, 3]
    driver.run()
    driver.check_answers()


def test_who_runs_at_the_end_of_a_confinement_goes_on() -> None:
    """Lifting it moves nobody; those held come in beside them."""
    driver = Driver(make_config())
    for request_id in (1, 2):
        driver.submit(make_submit(request_id, [request_id], max_tokens=9))
    confined(driver, 2)
    driver.step()
    driver.unconfine()
    driver.step()
    assert scheduled(driver) == {2: 1, 1: 1}
    assert driver.plans[-1].preempted_seq_ids == []
    driver.run()
    driver.check_answers()


def test_the_end_of_a_confinement_opens_the_line() -> None:
    """One that was held and fits is let in at once, though the front of the confined had found no room."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=64))
    driver.submit(make_submit(1, [1], max_tokens=9))
    driver.submit(make_submit(2, range(20), max_tokens=9))
    driver.submit(make_submit(3, range(100, 150), max_tokens=9))
    confined(driver, 2, 3)
    driver.step()
    driver.step()
    assert set(scheduled(driver)) == {2}
    driver.unconfine()
    driver.step()
    assert set(scheduled(driver)) == {1, 2}
    driver.run()
    driver.check_answers()


def test_abort_of_one_that_is_held() -> None:
    """A held request can be aborted, before and after it has run; the runner is told of neither."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1]))
    driver.submit(make_submit(2, [2], max_tokens=9))
    driver.step()
    driver.submit(make_submit(3, [3]))
    confined(driver, 2)
    driver.step()
    driver.abort(1, 3)
    driver.step()
    assert driver.plans[-1].finished_seq_ids == ()
    assert driver.scheduler.stats().num_waiting == 0
    driver.unconfine()
    driver.run()
    driver.check_answers()


def test_one_confinement_follows_another() -> None:
    """The second takes the place of the first; ids that are not here do no harm."""
    driver = Driver(make_config())
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, [request_id], max_tokens=9))
    groups: tuple[tuple[int, ...], ...] = ((1,), (3, 77), (2, 3))
    for group in groups:
        confined(driver, *group)
        driver.step()
        assert set(driver.scheduler.step_request_ids) == set(group) - {77}
    driver.unconfine()
    driver.run()
    driver.check_answers()


def test_confine_wants_an_empty_batch() -> None:
    """Confining while somebody runs is a bug of ours."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1]))
    driver.step()
    with pytest.raises(AssertionError, match="vacate"):
        driver.scheduler.confine([1])


# -------------------------------------------------------------------------------------------------------------- limits


def test_limited_steps_are_smaller() -> None:
    """Both bounds hold from the next plan on."""
    driver = Driver(make_config(max_num_seqs=4, max_num_batched_tokens=16))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, range(10 * request_id, 10 * request_id + 6), max_tokens=9))
    driver.scheduler.limit(max_num_seqs=2, max_num_batched_tokens=5)
    assert driver.scheduler.is_limited
    in_steps = []
    for _ in range(4):
        driver.step()
        in_steps.append(scheduled(driver))
    assert in_steps == [{1: 5}, {1: 1, 2: 4}, {1: 1, 2: 2}, {1: 1, 2: 1}]


def test_raised_limits_let_others_in_at_once() -> None:
    """Raising needs no pause, reaches the configured bounds and no further, and opens the line."""
    driver = Driver(make_config(max_num_seqs=3, max_num_batched_tokens=16))
    for request_id in range(1, 6):
        driver.submit(make_submit(request_id, [request_id], max_tokens=9))
    driver.scheduler.limit(max_num_seqs=1, max_num_batched_tokens=1)
    driver.step()
    driver.step()
    assert scheduled(driver) == {1: 1}
    driver.scheduler.limit(max_num_seqs=99, max_num_batched_tokens=99)
    assert (driver.scheduler.max_num_seqs, driver.scheduler.max_num_batched_tokens) == (3, 16)
    assert not driver.scheduler.is_limited
    driver.step()
    assert scheduled(driver) == {1: 1, 2: 1, 3: 1}
    driver.run()
    driver.check_answers()


def test_lowering_wants_an_empty_batch() -> None:
    """Lowering a bound while somebody runs is a bug of ours, and so are bounds no step could respect."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1]))
    driver.step()
    with pytest.raises(AssertionError, match="vacate"):
        driver.scheduler.limit(max_num_seqs=1, max_num_batched_tokens=64)
    with pytest.raises(AssertionError):
        Scheduler(make_config()).limit(max_num_seqs=4, max_num_batched_tokens=3)


# ---------------------------------------------------------------------------------------------------------- questions


def test_output_tokens_are_told_while_a_request_lives() -> None:
    """Of each unfinished sequence, resumed ones included; None of a request that is unknown or over."""
    driver = Driver(make_config())
    sequences = (SequenceStart(0, (5, 6)), SequenceStart(3, (5, 6, 7)))
    driver.submit(make_submit(1, [1], max_tokens=4, sequences=sequences))
    counts = [driver.scheduler.num_output_tokens(1)]
    while driver.step() is not None:
        counts.append(driver.scheduler.num_output_tokens(1))
    assert counts == [{0: 2, 3: 3}, {0: 3}, None]
    assert driver.scheduler.num_output_tokens(2) is None


def test_a_request_that_raises_leaves_no_trace() -> None:
    """Whatever add_request raises, the scheduler is as it was, the numbering of sequences included."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=9))
    driver.step()
    before = driver.scheduler.stats()
    breaks: tuple[dict[str, Any], ...] = (
        {"priority": None},
        {"sequences": ()},
        {"prompt_token_ids": ()},
        {"stopping": None},
    )
    for broken in breaks:
        with pytest.raises((TypeError, ValueError, AttributeError)):
            driver.scheduler.add_request(replace(make_submit(2, [2]), **broken))
        assert driver.scheduler.stats() == before
        driver.check_invariants()
    driver.submit(make_submit(2, [2]))
    driver.step()
    assert driver.plans[-1].new[0].seq_id == 2
    driver.run()
    driver.check_answers()
