"""n sequences of one request: one prompt, shared by reference count, and a life of its own for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.messages import FailureKind, FinishReason, RequestFailure, SequenceStart, Submit
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import make_submit, reference_output


def several(request_id: int, prompt: range | list[int], n: int, **options: int | bool | str) -> Submit:
    submit = make_submit(request_id, prompt, **options)  # type: ignore[arg-type]
    return replace(submit, sequences=tuple(SequenceStart(index) for index in range(n)))


def tables(driver: Driver) -> list[list[int]]:
    """The block tables of those who run, in order of precedence."""
    return [list(sequence.block_table) for sequence in driver.scheduler._seats.sequences]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("cache_bypass", [True, False])
def test_the_prompt_is_computed_once(enable_prefix_caching: bool, cache_bypass: bool) -> None:
    """Four sequences compute the prompt's full blocks once, and each the rest of it; with and without the cache."""
    driver = Driver(make_config(enable_prefix_caching=enable_prefix_caching))
    driver.submit(several(1, range(22), 4, max_tokens=6, cache_bypass=cache_bypass))
    driver.step()
    assert scheduled(driver) == {1: 22}
    driver.step()
    assert scheduled(driver) == {1: 1, 2: 2, 3: 2, 4: 2}
    shared = {tuple(table[:5]) for table in tables(driver)}
    assert len(shared) == 1
    assert driver.scheduler.stats().num_used_kv_blocks == 5 + 4
    driver.run()
    driver.check_answers()
    assert driver.runner.num_tokens_computed_total == 20 + 4 * (2 + 5)
    assert driver.scheduler.stats().num_used_kv_blocks == 0


def test_sequences_wait_for_a_prompt_that_takes_several_steps() -> None:
    """They have their seats and the prompt's blocks meanwhile, and the runner hears of them when they can begin."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(several(1, range(20), 3, max_tokens=3))
    for _ in range(2):
        driver.step()
        assert scheduled(driver) == {1: 8}
        assert driver.scheduler.stats().num_running == 3
        assert driver.runner.seq_ids == {1}
    driver.step()
    assert scheduled(driver) == {1: 4, 2: 4}, "the last token of a prompt is computed by each, and with it its block"
    driver.step()
    assert scheduled(driver) == {1: 1, 2: 1, 3: 4}
    driver.run()
    driver.check_answers()


def test_a_first_sequence_that_ends_at_once_leaves_its_blocks_to_the_others() -> None:
    """With one token to come, the first is over before the second begins; nothing is computed twice all the same."""
    driver = Driver(make_config())
    driver.submit(several(1, range(22), 3, max_tokens=1, cache_bypass=True))
    driver.run()
    driver.check_answers()
    assert driver.runner.num_tokens_computed_total == 22 + 2 * 2


def test_what_the_sequences_share_is_no_hit_of_the_cache() -> None:
    """num_cached_tokens and the totals tell of the cache alone, once per request."""
    driver = Driver(make_config())
    first = driver.submit(several(1, range(22), 3, max_tokens=2))
    driver.run()
    assert [answer.outputs[0].num_cached_tokens for answer in first.sequences.values()] == [0, 0, 0]
    second = driver.submit(several(2, range(22), 3, max_tokens=2))
    driver.run()
    assert [answer.outputs[0].num_cached_tokens for answer in second.sequences.values()] == [20, 0, 0]
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens_total, stats.num_cached_tokens_total) == (44, 20)


def test_nobody_else_is_given_the_blocks_of_a_request_that_bypasses_the_cache() -> None:
    """Its sequences share with each other; another request of the same prompt computes it all."""
    driver = Driver(make_config())
    driver.submit(several(1, range(22), 2, max_tokens=9, cache_bypass=True))
    for _ in range(3):
        driver.step()
    other = driver.submit(make_submit(2, range(22), max_tokens=1))
    driver.run()
    assert other.outputs[0].num_cached_tokens == 0
    driver.check_answers()


def test_each_is_resumed_behind_its_own_tokens() -> None:
    """A later attempt names the unfinished ones; they go on as they would have, under the indexes that they had."""
    whole = several(1, range(9), 4, max_tokens=8)
    expected = {index: reference_output(whole, index, vocab_size=50, max_model_len=256)[0] for index in range(4)}
    starts = (SequenceStart(0, expected[0][:3]), SequenceStart(2, expected[2][:7]), SequenceStart(3))
    driver = Driver(make_config())
    answer = driver.submit(replace(whole, sequences=starts))
    driver.run()
    for start in starts:
        tokens = tuple(answer.sequences[start.index].token_ids)
        assert start.resume_token_ids + tokens == expected[start.index]


def test_those_that_are_over_are_told_and_the_others_run() -> None:
    """Of three sequences one comes with all its tokens: its end is the answer to the submission, the rest follows."""
    driver = Driver(make_config())
    starts = (SequenceStart(0), SequenceStart(1, (5, 6)), SequenceStart(2, (5,)))
    answer = driver.submit(replace(make_submit(1, range(9), max_tokens=2), sequences=starts))
    assert answer.sequences[1].end is FinishReason.MAX_TOKENS
    assert not answer.is_over
    driver.run()
    driver.check_answers()


def test_fewer_seats_than_sequences() -> None:
    """With two seats for five sequences each gets its turn, and the prompt is computed once while one of them runs."""
    driver = Driver(make_config(max_num_seqs=2))
    driver.submit(several(1, range(21), 5, max_tokens=6, cache_bypass=True))
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats().num_used_kv_blocks == 0


def test_a_preempted_sequence_comes_back_to_what_its_siblings_hold() -> None:
    """When blocks run out the last sequence gives way; back again it computes its own tokens, and not the prompt."""
    driver = Driver(make_config(num_kv_blocks=10, max_model_len=40))
    starts = (SequenceStart(0, (1, 2, 3, 4, 5, 6)), SequenceStart(1), SequenceStart(2))
    driver.submit(replace(make_submit(1, range(20), max_tokens=9, cache_bypass=True), sequences=starts))
    driver.run()
    driver.check_answers()
    assert {seq_id for plan in driver.plans for seq_id in plan.preempted_seq_ids} == {3}
    assert {resumed.num_computed_tokens for plan in driver.plans for resumed in plan.resumed} == {20}


def test_an_abort_ends_all() -> None:
    """Of a request whose prompt is half computed, with sequences that wait for it, nothing is left."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(several(1, range(30), 4, max_tokens=6))
    driver.step()
    driver.abort(1)
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    assert not driver.scheduler.has_work
    driver.submit(make_submit(2, [1]))
    driver.run()
    assert driver.runner.seq_ids <= {5}


def test_one_sequence_may_be_forgotten_while_the_others_go_on() -> None:
    """Its blocks are free at once, the shared ones stay; whoever waited for what it was computing does so itself."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    answer = driver.submit(several(1, range(22), 3, max_tokens=6, cache_bypass=True))
    driver.step()
    driver.end_sequences((1, 0), (1, 7), (9, 0))
    assert driver.scheduler.num_output_tokens(1) == {1: 0, 2: 0}
    for _ in range(4):
        driver.step()
    num_used = driver.scheduler.stats().num_used_kv_blocks
    driver.end_sequences((1, 2))
    assert driver.scheduler.stats().num_used_kv_blocks == num_used - 1
    driver.run()
    driver.check_answers()
    assert len(answer.sequences[1].token_ids) == 6
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    assert not driver.scheduler.has_work


def test_a_failure_of_one_is_the_failure_of_all() -> None:
    """Where one sequence's logits are no numbers the request fails once, and what they computed is found by nobody."""
    poison = 49
    driver = Driver(make_config(), poison_token_id=poison)
    starts = (SequenceStart(0), SequenceStart(1, (poison,)), SequenceStart(2))
    driver.submit(replace(make_submit(1, range(21), max_tokens=30), sequences=starts))
    failures: list[RequestFailure] = []
    update = driver.scheduler.update_from_output

    def keep(*arguments: object) -> object:
        told = update(*arguments)  # type: ignore[arg-type]
        failures.extend(told[1])
        return told

    driver.scheduler.update_from_output = keep  # type: ignore[assignment, method-assign]
    driver.run()
    assert failures == [RequestFailure(1, FailureKind.NON_FINITE)]
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    later = driver.submit(make_submit(2, range(21), max_tokens=1))
    driver.run()
    assert later.outputs[0].num_cached_tokens == 0


def test_all_sequences_of_a_suspect_run_alone() -> None:
    """Each has its first tokens in steps that hold nothing else, one after another, while the batch goes on."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=30))
    driver.submit(replace(several(2, range(9), 3, max_tokens=5), alone_until=2))
    driver.run()  # the driver holds every plan to it
    driver.check_answers()
    alone = [plan.seq_ids for plan in driver.plans if len(plan.seq_ids) == 1 and plan.seq_ids != (1,)]
    assert alone == [(2,), (2,), (3,), (3,), (4,), (4,)]


def test_a_failed_step_costs_no_sequence_a_token() -> None:
    """After a step is dropped in the middle of the shared prompt, and once more later, all end as they would have."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(several(1, range(21), 4, max_tokens=6))
    driver.step()
    driver.fail_step()
    for _ in range(5):
        driver.step()
    driver.fail_step()
    driver.run()
    driver.check_answers()


def test_a_confined_request_runs_with_all_its_sequences() -> None:
    """Confinement names requests: all sequences of this one run, nobody else does."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [1], max_tokens=9))
    driver.submit(several(2, range(9), 3, max_tokens=9))
    driver.vacate()
    driver.confine([2])
    for _ in range(3):
        driver.step()
    assert driver.scheduler.step_request_ids == (2, 2, 2)
    driver.unconfine()
    driver.run()
    driver.check_answers()
