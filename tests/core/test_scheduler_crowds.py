"""Crowds of requests with several sequences each, from a seed: shared beginnings, scored prompts, failed steps.

What `Driver` and `FakeRunner` hold each step to is all the claim there is: right blocks, right contents, right tokens,
whatever meets whatever. The seeds beyond NUM_SEEDS are those that once found something.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.messages import SequenceStart
from tests.core.driver import Driver, make_config
from tests.fakes import make_submit

NUM_SEEDS = 30


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("seed", [*range(NUM_SEEDS), 34, 191, 501, 554, 783, 810, 895, 977, 1045, 1381])
def test_a_crowd_of_siblings_ends_as_each_would_alone(seed: int, is_scored: bool) -> None:
    """Eight requests of up to four sequences that begin alike, in a small pool; with every other seed steps fail."""
    choices = random.Random(seed)
    driver = Driver(
        make_config(
            max_num_seqs=choices.choice([2, 4, 8]),
            max_num_batched_tokens=choices.choice([8, 12, 16]),
            num_kv_blocks=choices.choice([24, 40]),
            max_model_len=80,
        )
    )
    beginning = [choices.randrange(1, 40) for _ in range(40)]
    for request_id in range(1, 9):
        num_sequences = choices.choice([1, 1, 2, 4])
        num_prompt_tokens = choices.randrange(1, 40)
        num_prompt_logprobs = choices.choice([None, 0])
        driver.submit(
            make_submit(
                request_id,
                beginning[:num_prompt_tokens],
                sequences=tuple(SequenceStart(index) for index in range(num_sequences)),
                num_prompt_logprobs=num_prompt_logprobs if is_scored else None,
                max_tokens=choices.randrange(1, 12),
                priority=0 if seed % 4 < 2 else choices.choice([0, 0, 3]),
            )
        )
        for _ in range(choices.randrange(6)):
            driver.step()
        if seed % 2 and choices.random() < 0.15:
            driver.fail_step()
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("seed", [*range(NUM_SEEDS), 10_989, 11_767, 11_982, 12_347])
def test_whatever_befalls_a_crowd(seed: int) -> None:
    """The same with resumed tokens, steps alone, aborts and pauses, and pools in which most are preempted."""
    choices = random.Random(seed)
    driver = Driver(
        make_config(
            max_num_seqs=choices.choice([1, 2, 4, 8]),
            max_num_batched_tokens=choices.choice([8, 12, 16]),
            num_kv_blocks=choices.choice([12, 24, 40]),
            block_size=choices.choice([1, 2, 4]),
            max_model_len=60,
        )
    )
    beginning = [choices.randrange(1, 40) for _ in range(40)]
    for request_id in range(1, 10):
        num_sequences = choices.choice([1, 1, 2, 4])
        submit = make_submit(
            request_id,
            beginning[: choices.randrange(1, 30)],
            sequences=tuple(
                SequenceStart(index, tuple(beginning[5 : 5 + choices.randrange(3)])) for index in range(num_sequences)
            ),
            num_prompt_logprobs=choices.choice([None, 0]),
            max_tokens=choices.randrange(1, 12),
            priority=choices.choice([0, 0, 3]),
            cache_bypass=choices.random() < 0.1,
        )
        with contextlib.suppress(RequestNeverFitsError):
            driver.submit(replace(submit, alone_until=choices.choice([0, 0, 0, 0, 2, 100])))
        for _ in range(choices.randrange(6)):
            driver.step()
        event = choices.random()
        live = [request_id for request_id, answer in driver.answers.items() if not answer.is_over]
        if event < 0.1:
            driver.fail_step()
        elif event < 0.2 and live:
            driver.abort(choices.choice(live))
        elif event < 0.35 and live:
            paused = choices.choice(live)
            driver.pause(paused)
            driver.step()
            driver.unpause(paused)
    driver.run()
    driver.check_answers()
