"""Paused requests: no steps, no seat, no work; and blocks for as long as nobody needs them."""

from __future__ import annotations

from dataclasses import replace

from scheduler.messages import SequenceStart
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import make_submit


def test_a_paused_request_keeps_its_blocks_and_gives_up_its_seat() -> None:
    """With one seat, another runs meanwhile; unpaused it goes on where it was and computes nothing again."""
    driver = Driver(make_config(max_num_seqs=1))
    driver.submit(make_submit(1, range(9), max_tokens=9))
    driver.step()
    driver.step()
    driver.submit(make_submit(2, [5], max_tokens=3))
    driver.pause(1)
    num_held = driver.scheduler.stats().num_used_kv_blocks
    assert num_held == 3
    driver.run()
    assert driver.answers[2].is_over
    assert not driver.answers[1].is_over
    assert driver.scheduler.stats().num_used_kv_blocks == num_held
    driver.unpause(1)
    driver.run()
    driver.check_answers()
    assert driver.runner.num_tokens_computed_total == (9 + 8) + (1 + 2)
    assert driver.scheduler.stats().num_preemptions_total == 0


def test_paused_requests_are_no_work() -> None:
    """Whether it waits, runs or is in the middle of its prompt: schedule() has nothing, and says so beforehand."""
    for num_steps in range(4):
        driver = Driver(make_config(max_num_batched_tokens=8))
        driver.submit(make_submit(1, range(20), max_tokens=9))
        for _ in range(num_steps):
            driver.step()
        driver.pause(1)
        assert not driver.scheduler.has_work
        assert driver.step() is None
        driver.unpause(1)
        driver.run()
        driver.check_answers()
        assert driver.runner.num_tokens_computed_total == 20 + 8


def test_whoever_needs_blocks_takes_those_of_the_paused_first() -> None:
    """A paused request of the highest priority loses its blocks to a lower one that grows; no running one does."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32))
    driver.submit(make_submit(1, range(12), max_tokens=9, priority=100))
    driver.step()
    driver.pause(1)
    for request_id in (2, 3):
        driver.submit(make_submit(request_id, range(10 * request_id, 10 * request_id + 4), max_tokens=12))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == []
    driver.run()
    assert [plan.preempted_seq_ids for plan in driver.plans if plan.preempted_seq_ids] == [[1]]
    driver.unpause(1)
    driver.run()
    driver.check_answers()


def test_a_paused_request_does_not_keep_a_newcomer_out() -> None:
    """One that needs the whole pool is let in at once, at the cost of the paused one's blocks."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32))
    driver.submit(make_submit(1, range(12), max_tokens=9))
    driver.step()
    driver.pause(1)
    driver.submit(make_submit(2, range(100, 130), max_tokens=2))
    driver.step()
    assert scheduled(driver) == {2: 30}
    driver.unpause(1)
    driver.run()
    driver.check_answers()


def test_blocks_of_the_paused_are_not_taken_in_vain() -> None:
    """Where even theirs would not be enough for the first in line, they stay."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32))
    driver.submit(make_submit(1, range(8), max_tokens=9))
    driver.submit(make_submit(2, range(50, 58), max_tokens=20))
    driver.step()
    driver.pause(1)
    driver.submit(make_submit(3, range(100, 130), max_tokens=2))
    driver.step()
    assert driver.plans[-1].preempted_seq_ids == []
    assert driver.scheduler.stats().num_used_kv_blocks == 3 + 3 - 1
    driver.unpause(1)
    driver.run()
    driver.check_answers()


def test_the_abort_of_a_paused_request_frees_all() -> None:
    """Parked, preempted while paused, or never started: nothing is held, and the runner is told."""
    driver = Driver(make_config(num_kv_blocks=8, max_model_len=32))
    driver.submit(make_submit(1, range(12), max_tokens=9))
    driver.submit(make_submit(2, [1], max_tokens=9))
    driver.step()
    driver.pause(1, 2)
    driver.submit(make_submit(3, range(100, 130), max_tokens=1))
    driver.step()
    driver.submit(make_submit(4, [4]))
    driver.pause(4)
    driver.abort(1, 2, 4)
    driver.run()
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    assert driver.scheduler.stats().num_waiting == 0
    driver.submit(make_submit(5, [5]))
    driver.run()
    assert driver.runner.seq_ids <= {3, 5}


def test_sequences_that_wait_for_a_paused_siblings_prompt() -> None:
    """Paused while the first computes the prompt for all, and unpaused, they share it as if nothing had been."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    starts = tuple(SequenceStart(index) for index in range(4))
    driver.submit(replace(make_submit(1, range(22), max_tokens=5, cache_bypass=True), sequences=starts))
    driver.step()
    driver.pause(1)
    assert driver.scheduler.stats().num_running == 0
    driver.submit(make_submit(2, [7], max_tokens=2))
    driver.run()
    driver.unpause(1)
    driver.run()
    driver.check_answers()
    assert driver.runner.num_tokens_computed_total == 20 + 4 * (2 + 4) + 2


def test_pausing_again_and_again_leaves_nothing_behind() -> None:
    """10,000 pauses of a waiting request do not make the line any longer."""
    driver = Driver(make_config(max_num_seqs=1))
    driver.submit(make_submit(1, [1], max_tokens=200))
    driver.submit(make_submit(2, [2]))
    driver.step()
    for _ in range(10_000):
        driver.scheduler.pause([2])
        driver.scheduler.unpause([2])
    waiting = driver.scheduler._waiting
    assert sum(len(line._heap) for line in (waiting.batch, waiting._paused)) < 300
