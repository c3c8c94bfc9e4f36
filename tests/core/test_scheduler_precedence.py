"""Who gives way to whom: preemption, priorities, headroom."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.request import AGEING_STEPS
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import make_submit


def test_last_one_is_preempted_and_finishes_later() -> None:
    """When the pool runs out the latest arrival gives way, resumes, and gets the tokens it would have got."""
    driver = Driver(make_config(num_kv_blocks=6, max_model_len=24))
    driver.submit(make_submit(1, range(8), max_tokens=14))
    driver.submit(make_submit(2, range(20, 28), max_tokens=14))
    driver.run()
    assert {seq_id for plan in driver.plans for seq_id in plan.preempted_seq_ids} == {2}
    assert driver.scheduler.stats().num_preemptions_total == 1
    driver.check_answers()


def test_resume_hits_its_own_blocks() -> None:
    """A preempted sequence finds what is left of its own blocks instead of computing all again."""
    driver = Driver(make_config(num_kv_blocks=7, max_model_len=28))
    driver.submit(make_submit(1, range(12), max_tokens=8))
    driver.submit(make_submit(2, range(20, 32), max_tokens=8))
    driver.run()
    (resumed,) = [resumed for plan in driver.plans for resumed in plan.resumed]
    assert resumed.num_computed_tokens > 0
    driver.check_answers()


def test_higher_priority_takes_a_seat() -> None:
    """A waiting request of higher priority takes the seat of the last one of lower priority; an equal one waits."""
    driver = Driver(make_config(max_num_seqs=2, max_num_batched_tokens=2))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, [request_id], max_tokens=30))
    driver.step()
    driver.step()
    assert set(scheduled(driver)) == {1, 2}
    driver.submit(make_submit(4, [4], max_tokens=3, priority=1))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == [2]
    assert set(scheduled(driver)) == {1, 4}
    driver.run()
    driver.check_answers()


def test_higher_priority_takes_blocks() -> None:
    """A waiting request of higher priority takes the blocks of lower ones, as many as it needs and no more."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=60))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, range(100 * request_id, 100 * request_id + 16), max_tokens=40))
    driver.step()
    driver.submit(make_submit(4, range(14), max_tokens=2, priority=1))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == [3]
    assert {1, 2, 4} <= set(scheduled(driver))
    driver.run()
    driver.check_answers()


def test_the_lowest_priority_does_not_starve() -> None:
    """Beside a stream of requests one point above that never lets a seat go empty, it gets its turn once it has waited
    AGEING_STEPS steps for it, and is then not thrown out for any of them again."""
    driver = Driver(make_config(max_num_seqs=2, max_num_batched_tokens=2))
    first_steps: dict[int, int] = {}

    def submit_higher() -> None:
        num_here = sum(not answer.is_over for answer in driver.answers.values())
        for request_id in range(len(driver.answers) + 1, len(driver.answers) + 6 - num_here):
            driver.submit(make_submit(request_id, [request_id % 40], max_tokens=3, priority=1))

    submit_higher()
    driver.step()
    low = driver.submit(make_submit(100_000, [1], max_tokens=20))
    for _ in range(2 * AGEING_STEPS):
        if low.is_over:
            break
        submit_higher()
        driver.step()
        for request_id in driver.scheduler.step_request_ids:
            first_steps.setdefault(request_id, len(driver.plans))
    assert low.is_over
    waited = first_steps[100_000] - 1
    assert AGEING_STEPS < waited <= AGEING_STEPS + 2 * 3
    assert len(driver.plans) - first_steps[100_000] == 20 - 1, "it had a token of each step once it ran"
    assert driver.scheduler.stats().num_preemptions_total == 0


def test_who_waited_long_enough_is_not_outranked() -> None:
    """One that runs gives way to a higher one for as long as it has not waited off the difference."""
    for num_steps, expected in ((AGEING_STEPS - 2, 2), (AGEING_STEPS + 1, 1)):
        driver = Driver(make_config(max_num_seqs=1, max_model_len=2000, num_kv_blocks=600))
        driver.submit(make_submit(1, [1], max_tokens=1000))
        for _ in range(num_steps):
            driver.step()
        driver.submit(make_submit(2, [2], max_tokens=5, priority=1))
        driver.step()
        assert set(scheduled(driver)) == {expected}


def test_nobody_is_preempted_in_vain() -> None:
    """If all that lower ones hold would not be enough for a higher waiting one, they go on."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=60))
    driver.submit(make_submit(1, range(40), max_tokens=4, priority=2))
    driver.submit(make_submit(2, range(100, 108), max_tokens=4))
    driver.step()
    driver.submit(make_submit(3, range(200, 240), max_tokens=2, priority=1))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == []
    assert set(scheduled(driver)) == {1, 2}
    driver.run()
    driver.check_answers()


def test_budget_goes_to_the_higher_priority_first() -> None:
    """A new request of higher priority computes its prompt before the rest of a long one of lower priority."""
    driver = Driver(make_config(max_num_batched_tokens=10, num_kv_blocks=64))
    driver.submit(make_submit(1, range(60)))
    driver.step()
    driver.submit(make_submit(2, range(100, 108), priority=1))
    driver.step()
    assert scheduled(driver) == {2: 8, 1: 2}


def test_budget_goes_to_the_earlier_arrival_first() -> None:
    """The rest of a long prompt comes before that of a later arrival, which gets what is left."""
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.submit(make_submit(1, range(25)))
    driver.submit(make_submit(2, range(100, 120)))
    chunks = []
    for _ in range(3):
        driver.step()
        chunks.append(scheduled(driver))
    assert chunks == [{1: 10}, {1: 10}, {1: 5, 2: 5}]


def test_headroom_is_kept_beside_others() -> None:
    """A request that would leave no room for growth waits while others run, and is let in when nobody does."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=64))
    driver.submit(make_submit(1, range(8), max_tokens=4))
    driver.submit(make_submit(2, range(100, 160), max_tokens=2))
    driver.step()
    assert set(scheduled(driver)) == {1}
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats().num_preemptions_total == 0


def test_first_in_precedence_computes_in_every_step() -> None:
    """The oldest request is never preempted, and is part of every step until its end, whatever the shortage."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32, max_num_batched_tokens=8))
    for request_id in range(1, 9):
        driver.submit(make_submit(request_id, range(10 * request_id, 10 * request_id + 4), max_tokens=28))
    num_steps = 0
    while driver.answers[1].end is None:
        driver.step()
        assert 1 in scheduled(driver)
        num_steps += 1
    assert num_steps == 28
    driver.run()
    driver.check_answers()


def test_gaps_between_preemptions() -> None:
    """Under lasting shortage nobody is thrown out over and over: recomputation stays a small part of the work."""
    driver = Driver(make_config(num_kv_blocks=24, max_model_len=96, max_num_batched_tokens=32, max_num_seqs=16))
    for request_id in range(1, 41):
        driver.submit(make_submit(request_id, [request_id, *range(5)], max_tokens=24, cache_bypass=True))
    driver.run(5000)
    driver.check_answers()
    num_tokens_useful = sum(6 + len(answer.token_ids) - 1 for answer in driver.answers.values())
    assert driver.scheduler.stats().num_preemptions_total > 0
    assert driver.runner.num_tokens_computed_total < 2 * num_tokens_useful


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=8),
    st.integers(8, 20),
    st.integers(1, 8),
)
def test_equal_priority_starts_in_order_of_arrival(
    lengths: list[tuple[int, int]], num_kv_blocks: int, max_num_seqs: int
) -> None:
    """Within a priority nobody overtakes: requests get into the batch for the first time as they arrived."""
    driver = Driver(make_config(num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=9))
    for request_id, (prompt_len, max_tokens) in enumerate(lengths, start=1):
        driver.submit(make_submit(request_id, [request_id] * prompt_len, max_tokens=max_tokens))
    driver.run(5000)
    driver.check_answers()
    first_runs = [new.seq_id for plan in driver.plans for new in plan.new]
    assert all(earlier < later for earlier, later in pairwise(first_runs))
