"""Requests whose prompt is scored: told once, whole, with the first output, whatever happens on the way.

`Driver` holds every first output to it: each prompt token but the first, once, in order. A `FakeRunner` asserts that
what is to be scored is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.core.output import StepPlan
from scheduler.messages import FailureKind, FinishReason, SequenceStart
from tests.core.driver import Driver, make_config
from tests.fakes import make_submit

PROMPT = tuple(range(1, 31))


def told(driver: Driver, request_id: int, index: int = 0) -> list[bool]:
    outputs = driver.answers[request_id].sequences[index].outputs
    return [output.prompt_logprobs is not None for output in outputs]


def test_a_prompt_in_chunks_is_told_whole_with_the_first_output() -> None:
    """Four chunks beside a neighbour make one list; later outputs have none, and the neighbour never."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, PROMPT, num_prompt_logprobs=0))
    driver.submit(make_submit(2, PROMPT[5:]))
    driver.run()
    driver.check_answers()
    assert told(driver, 1) == [True, False, False, False]
    assert not any(told(driver, 2))


def test_it_reads_nothing_from_the_cache_and_writes_to_it() -> None:
    """Cached blocks of the same prompt are passed over; those it computes are found by the next request."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, PROMPT))
    driver.run()
    driver.submit(make_submit(2, PROMPT, num_prompt_logprobs=0))
    driver.submit(make_submit(3, PROMPT[::-1], num_prompt_logprobs=0))
    driver.run()
    driver.submit(make_submit(4, PROMPT[::-1]))
    driver.run()
    assert [driver.answers[request_id].outputs[0].num_cached_tokens for request_id in (2, 3, 4)] == [0, 0, 28]
    driver.check_answers()


def preempt(driver: Driver) -> None:
    """A newcomer of higher priority that needs the whole pool."""
    driver.submit(make_submit(9, [7] * 40, priority=5, max_tokens=1))
    while not driver.answers[9].is_over:
        driver.step()


def fail_step(driver: Driver) -> None:
    assert driver.fail_step()


@pytest.mark.parametrize("disturb", [preempt, fail_step])
@pytest.mark.parametrize("num_steps", [1, 2, 5, 7])
def test_what_was_scored_before_a_disturbance_is_neither_lost_nor_repeated(
    num_steps: int, disturb: Callable[[Driver], None]
) -> None:
    """In mid-prompt, and after the first output was told: then not even the runner is asked again."""
    driver = Driver(make_config(max_num_batched_tokens=8, num_kv_blocks=12))
    driver.submit(make_submit(1, PROMPT, num_prompt_logprobs=0, max_tokens=8))
    for _ in range(num_steps):
        driver.step()
    disturb(driver)
    plans: list[StepPlan | None] = []
    while plans[-1:] != [None]:
        plans.append(driver.step())
    driver.check_answers()
    assert told(driver, 1) == [True] + [False] * 7
    placed = [new for plan in plans if plan is not None for new in plan.new if plan.seq_ids]
    if num_steps > 4:
        assert all(new.num_scored_tokens == len(PROMPT) for new in placed)


def test_after_a_preemption_what_was_scored_may_come_from_the_cache() -> None:
    """Blocks all of whose tokens were scored before are not computed twice."""
    driver = Driver(make_config(max_num_batched_tokens=8, num_kv_blocks=13))
    driver.submit(make_submit(1, PROMPT, num_prompt_logprobs=0))
    driver.step()
    driver.step()
    driver.submit(make_submit(2, [7] * 8, priority=5, max_tokens=2))
    driver.submit(make_submit(3, [8] * 8, priority=5, max_tokens=2))
    while driver.scheduler.stats().num_preemptions_total == 0:
        assert driver.step() is not None
    plans = []
    while (plan := driver.step()) is not None:
        plans.append(plan)
    (resumed,) = [resumed for plan in plans for resumed in plan.resumed]
    assert 0 < resumed.num_computed_tokens <= 16
    driver.check_answers()


def test_without_a_token_to_sample_the_prompt_is_computed_and_told() -> None:
    """max_tokens 0: one output, with no token, MAX_TOKENS, and all of the prompt; its blocks are free again."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, PROMPT, num_prompt_logprobs=0, max_tokens=0))
    driver.run()
    (output,) = driver.answers[1].outputs
    assert output.new_token_ids == ()
    assert output.finish_reason is FinishReason.MAX_TOKENS
    assert output.prompt_logprobs is not None
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    assert not driver.scheduler.has_work


def test_a_prompt_of_one_token_has_none() -> None:
    """Its list is empty, not absent."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, [5], num_prompt_logprobs=0, max_tokens=0))
    driver.run()
    assert told(driver, 1) == [True]


def test_resumed_tokens_that_end_it_do_not_spare_the_prompt() -> None:
    """A sequence that is over before it began still has its prompt scored, and ends for its own reason."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    submit = make_submit(1, PROMPT, num_prompt_logprobs=0, resume_token_ids=(3, 9), eos_token_ids=(9,))
    driver.submit(submit)
    driver.run()
    (output,) = driver.answers[1].outputs
    assert (output.new_token_ids, output.finish_reason) == ((), FinishReason.EOS)
    assert output.prompt_logprobs is not None


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_of_several_sequences_the_first_tells_it_first(max_tokens: int) -> None:
    """Once per request, on sequence 0, before anything of the others; an attempt without it asks nobody."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, PROMPT))
    driver.run()  # the others find the prompt in the cache; the first one does not look
    starts = (SequenceStart(0, (3,)), SequenceStart(1), SequenceStart(2))
    for request_id, sequences in ((2, starts), (3, starts[1:])):
        driver.submit(
            make_submit(request_id, PROMPT, sequences=sequences, num_prompt_logprobs=0, max_tokens=max_tokens)
        )
    driver.run()
    driver.check_answers()
    assert sum(sum(told(driver, 2, index)) for index in range(3)) == 1
    assert not any(told(driver, 3, 1) + told(driver, 3, 2))


def test_a_row_that_is_not_finite_in_mid_prompt_fails_that_request_alone() -> None:
    """Though nothing of it was sampled in that step."""
    driver = Driver(make_config(max_num_batched_tokens=8), poison_token_id=49)
    driver.submit(make_submit(1, PROMPT[:4]))
    driver.submit(make_submit(2, (*PROMPT[:3], 49, *PROMPT), num_prompt_logprobs=0))
    driver.run()
    driver.check_answers()
    assert driver.answers[2].failure is FailureKind.NON_FINITE
    assert driver.answers[2].outputs == []
