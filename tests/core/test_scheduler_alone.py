"""Steps alone: sequences that must share no step yet, and the batch that goes on beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from scheduler.core.scheduler import Scheduler
from scheduler.messages import EngineStats, Submit
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import FakeRunner, make_submit


def alone(
    request_id: int,
    prompt: Iterable[int],
    *,
    until: int,
    max_tokens: int = 4,
    priority: int = 0,
    resume_token_ids: tuple[int, ...] = (),
) -> Submit:
    submit = make_submit(
        request_id, prompt, max_tokens=max_tokens, priority=priority, resume_token_ids=resume_token_ids
    )
    return replace(submit, alone_until=until)


def steps(driver: Driver, num_steps: int) -> list[tuple[int, ...]]:
    """The requests of each of the next steps."""
    in_steps = []
    for _ in range(num_steps):
        assert driver.step() is not None
        in_steps.append(driver.scheduler.step_request_ids)
    return in_steps


def test_steps_alternate_until_it_joins_the_batch() -> None:
    """It has every other step to itself, the batch the ones between; with its count of tokens it is one of them."""
    driver = Driver(make_config())
    for request_id in (1, 2):
        driver.submit(make_submit(request_id, [request_id], max_tokens=20))
    driver.submit(alone(3, [3], until=2, max_tokens=5))
    assert steps(driver, 6) == [(1, 2), (3,), (1, 2), (3,), (1, 2, 3), (1, 2, 3)]
    assert len(driver.answers[3].token_ids) == 4
    driver.run()
    driver.check_answers()


def test_the_batch_has_the_whole_budget_of_its_steps() -> None:
    """One that runs alone takes nothing of the batch's budget."""
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.submit(alone(1, [1], until=20, max_tokens=20))
    driver.submit(make_submit(2, [2], max_tokens=20))
    for _ in range(2):
        driver.step()
    driver.submit(make_submit(3, range(100, 130)))
    driver.step()
    driver.step()
    assert scheduled(driver) == {2: 1, 3: 9}
    driver.run()
    driver.check_answers()


def test_joining_the_batch_opens_the_line() -> None:
    """The next of its kind is let in though somebody behind it, of the batch, had found no room before."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=64))
    driver.submit(alone(1, range(16), until=3, max_tokens=20))
    driver.submit(alone(2, [2], until=1, max_tokens=2))
    driver.submit(make_submit(3, range(100, 150), max_tokens=2))
    assert steps(driver, 6) == [(1,), (1,), (1,), (1,), (2,), (1, 2)]
    driver.run()
    driver.check_answers()


def test_without_a_batch_it_has_every_step() -> None:
    """Nobody else being there, no step is lost."""
    driver = Driver(make_config())
    driver.submit(alone(1, [1], until=100, max_tokens=6))
    assert driver.run() == 6
    driver.check_answers()


def test_it_may_take_the_whole_budget() -> None:
    """Its prompt is cut by the budget alone, the batch's decodes take nothing of it."""
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.submit(make_submit(1, [1], max_tokens=20))
    driver.step()
    driver.submit(alone(2, range(100, 125), until=1))
    chunks = []
    for _ in range(5):
        driver.step()
        chunks.append(scheduled(driver))
    assert chunks == [{2: 10}, {1: 1}, {2: 10}, {1: 1}, {2: 5}]
    driver.run()
    driver.check_answers()


def test_one_after_another_in_order_of_precedence() -> None:
    """Of several the first in precedence is alone until it joins, then comes the next; the batch never stops."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=30))
    for request_id in (2, 3):
        driver.submit(alone(request_id, [request_id], until=2, max_tokens=30))
    driver.submit(alone(4, [4], until=1, max_tokens=30, priority=1))
    in_steps = steps(driver, 12)
    order = [request_ids[0] for request_ids in in_steps if len(request_ids) == 1 and request_ids != (1,)]
    assert order == [4, 2, 2, 3, 3]
    assert all(1 in request_ids for request_ids in in_steps[1::2])
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("num_resumed", [1, 2, 3])
def test_resumed_tokens_count(num_resumed: int) -> None:
    """Tokens it has already had count: with enough of them it is never alone."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=20))
    driver.submit(alone(2, [2], until=2, max_tokens=9, resume_token_ids=(7, 8, 9)[:num_resumed]))
    in_steps = steps(driver, 4)
    assert in_steps.count((2,)) == max(0, 2 - num_resumed)
    driver.run()
    driver.check_answers()


def test_the_batch_grows_by_its_own_steps() -> None:
    """While another is alone every other step, each decoding sequence gets its blocks just in time, not before."""
    driver = Driver(make_config(block_size=4))
    for request_id in (1, 2):
        driver.submit(make_submit(request_id, range(10 * request_id, 10 * request_id + 3), max_tokens=30))
    driver.submit(alone(3, [3], until=40, max_tokens=40))
    num_blocks = {1: 0, 2: 0, 3: 0}
    num_tokens = {1: 0, 2: 0, 3: 0}
    while driver.step() is not None:
        plan = driver.plans[-1]
        for new in plan.new:
            num_blocks[new.seq_id] += len(new.block_ids)
        for seq_id, block_ids in plan.new_block_ids.items():
            assert seq_id in plan.seq_ids
            num_blocks[seq_id] += len(block_ids)
        for seq_id, count in scheduled(driver).items():
            num_tokens[seq_id] += count
            assert num_blocks[seq_id] == -(-num_tokens[seq_id] // 4)
    assert driver.scheduler.stats().num_preemptions_total == 0
    driver.check_answers()


def test_nobody_is_let_in_before_an_earlier_one_that_waits_to_be_alone() -> None:
    """It waits for blocks; a later arrival that would fit does not get them first."""
    driver = Driver(make_config(num_kv_blocks=16, max_model_len=64))
    driver.submit(make_submit(1, range(8), max_tokens=6))
    driver.submit(alone(2, range(100, 156), until=1))
    driver.submit(make_submit(3, range(200, 204), max_tokens=2))
    first_runs: list[int] = []
    while driver.step() is not None:
        first_runs += [new.seq_id for new in driver.plans[-1].new]
    assert first_runs == [1, 2, 3]
    driver.check_answers()


def test_while_one_is_alone_the_next_of_its_kind_holds_nobody_up() -> None:
    """Those behind a second request that waits to be alone are let in while the first one is."""
    driver = Driver(make_config())
    driver.submit(alone(1, [1], until=9, max_tokens=9))
    driver.submit(alone(2, [2], until=9, max_tokens=9))
    driver.submit(make_submit(3, [3], max_tokens=3))
    assert steps(driver, 4) == [(1,), (3,), (1,), (3,)]
    driver.run()
    driver.check_answers()


def test_it_takes_a_seat_like_any_other() -> None:
    """It waits for a free seat, and keeps it when it joins: max_num_seqs holds all the time."""
    driver = Driver(make_config(max_num_seqs=2))
    for request_id in (1, 2):
        driver.submit(make_submit(request_id, [request_id], max_tokens=3))
    driver.submit(alone(3, [3], until=2, max_tokens=6))
    driver.submit(make_submit(4, [4], max_tokens=6))
    assert steps(driver, 3) == [(1, 2)] * 3
    assert steps(driver, 2) == [(3,), (4,)]
    driver.run()
    driver.check_answers()


def test_one_seat() -> None:
    """With a single seat requests that must be alone and others come one after another."""
    driver = Driver(make_config(max_num_seqs=1))
    driver.submit(make_submit(1, [1], max_tokens=3))
    driver.submit(alone(2, [2], until=2, max_tokens=4))
    driver.submit(make_submit(3, [3], max_tokens=2))
    assert [in_step for (in_step,) in steps(driver, 9)] == [1, 1, 1, 2, 2, 2, 2, 3, 3]
    driver.check_answers()


@pytest.mark.parametrize("is_alone_first", [False, True])
def test_shortage_takes_the_last_in_precedence(is_alone_first: bool) -> None:
    """When the pool runs out the later one gives way, whether it is alone or of the batch, and gets its tokens."""
    driver = Driver(make_config(num_kv_blocks=6, max_model_len=24))
    submits = [alone(1, range(8), until=14, max_tokens=14), make_submit(2, range(20, 28), max_tokens=14)]
    if not is_alone_first:
        submits = [make_submit(1, range(8), max_tokens=14), alone(2, range(20, 28), until=14, max_tokens=14)]
    for submit in submits:
        driver.submit(submit)
    driver.run()
    assert {seq_id for plan in driver.plans for seq_id in plan.preempted_seq_ids} == {2}
    driver.check_answers()


@pytest.mark.parametrize("is_alone_higher", [False, True])
def test_higher_priority_takes_the_blocks_of_lower(is_alone_higher: bool) -> None:
    """Priority works between one that is alone and the batch, both ways."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32))
    driver.submit(alone(1, range(20), until=0 if is_alone_higher else 99, max_tokens=9))
    driver.step()
    driver.submit(alone(2, range(100, 120), until=99 if is_alone_higher else 0, max_tokens=3, priority=1))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == [1]
    assert driver.scheduler.step_request_ids == (2,)
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_abort_in_any_state(num_steps: int) -> None:
    """Aborting it in line, alone or in the batch frees its blocks at once; the next of its kind gets its turn."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, [1], max_tokens=20))
    driver.submit(alone(2, range(10, 20), until=2, max_tokens=20))
    driver.submit(alone(3, range(30, 32), until=1, max_tokens=2))
    for _ in range(num_steps):
        driver.step()
    driver.abort(2)
    driver.step()
    driver.step()
    assert {2} not in [set(request_ids) for request_ids in steps(driver, 2)]
    driver.run()
    driver.check_answers()


def test_abort_in_flight() -> None:
    """Aborted while its step runs, its token is dropped and the batch goes on."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=5))
    driver.submit(alone(2, [2], until=9))
    driver.step()
    driver.step(while_in_flight=lambda: driver.abort(2))
    assert driver.answers[2].token_ids == []
    driver.run()
    driver.check_answers()


def test_non_finite_rows_are_told_apart() -> None:
    """A poisoned row of a step alone fails its request, and none of the batch that sat the step out."""
    driver = Driver(make_config(), poison_token_id=49)
    driver.submit(make_submit(1, [1], max_tokens=5))
    driver.submit(alone(2, [2, 49], until=1))
    driver.run()
    driver.check_answers()


def test_stats_count_it_as_running_or_waiting() -> None:
    """One that is alone runs, one that waits to be waits."""
    driver = Driver(make_config(enable_prefix_caching=False))
    for request_id in (1, 2):
        driver.submit(alone(request_id, range(6), until=9, max_tokens=9))
    driver.step()
    assert driver.scheduler.stats() == EngineStats(
        num_running=1,
        num_waiting=1,
        num_waiting_tokens=6,
        num_used_kv_blocks=2,
        num_kv_blocks=64,
        num_prompt_tokens_total=6,
    )


def test_step_request_ids_stay_the_same_object() -> None:
    """While the same sequences decode, the ids of each batch step are one object, steps alone between them or not."""
    scheduler = Scheduler(make_config(block_size=16))
    runner = FakeRunner(num_kv_blocks=64, block_size=16)
    for request_id in (7, 5):
        scheduler.add_request(make_submit(request_id, [request_id], max_tokens=40))
    seen = []
    for num_steps in range(12):
        if num_steps == 4:
            scheduler.add_request(alone(9, [9], until=9, max_tokens=30))
        plan = scheduler.schedule()
        assert plan is not None
        seen.append(scheduler.step_request_ids)
        scheduler.update_from_output(plan, runner.execute(plan))
    batch_steps = [request_ids for request_ids in seen[1:] if request_ids != (9,)]
    assert len(batch_steps) == 7
    assert all(request_ids is batch_steps[0] for request_ids in batch_steps)
    assert batch_steps[0] == (7, 5)
