"""Submissions, aborts and steps in any order, on pools so small that preemption and prefix hits are common."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from scheduler.core.scheduler import RequestNeverFitsError
from scheduler.messages import Submit
from tests.core.driver import Driver, make_config
from tests.fakes import make_submit

VOCAB_SIZE = 12
EOS_ID, STOP_ID, POISON_ID = 9, 10, 11

# Prompts begin with one of few token ids repeated, so that they share prefixes of any length.
prompts = st.builds(
    lambda common_id, num_common, tail: (common_id,) * num_common + tuple(tail),
    st.sampled_from([1, 2]),
    st.integers(0, 20),
    st.lists(st.integers(0, POISON_ID - 1), min_size=1, max_size=6),
)
priorities = st.sampled_from([0, 0, 0, -1, 5])
submits = st.builds(
    lambda prompt, is_poisoned, **options: make_submit(0, prompt + (POISON_ID,) * is_poisoned, **options),
    prompt=prompts,
    is_poisoned=st.sampled_from([False] * 15 + [True]),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 24),
    eos_token_ids=st.sampled_from([(), (), (EOS_ID,)]),
    stop_token_ids=st.sampled_from([(), (), (STOP_ID, EOS_ID)]),
    resume_token_ids=st.sampled_from([(), (), (), (3,), (3, 1, 4), (3, EOS_ID)]),
    priority=priorities,
    cache_salt=st.sampled_from(["", "", "salt"]),
    cache_bypass=st.sampled_from([False, False, False, True]),
    num_logprobs=st.sampled_from([None, None, 0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(
        max_num_seqs=st.integers(1, 6),
        budget_extra=st.integers(0, 12),
        block_size=st.integers(1, 5),
        num_kv_blocks=st.integers(2, 20),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self,
        max_num_seqs: int,
        budget_extra: int,
        block_size: int,
        num_kv_blocks: int,
        enable_prefix_caching: bool,
    ) -> None:
        config = make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget_extra,
            max_model_len=40,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.driver = Driver(config, vocab_size=VOCAB_SIZE, poison_token_id=POISON_ID)
        self.next_request_id = 1

    @rule(submits=st.lists(submits, min_size=1, max_size=4))
    def submit(self, submits: list[Submit]) -> None:
        for submit in submits:
            try:
                self.driver.submit(replace(submit, request_id=self.next_request_id))
            except RequestNeverFitsError:
                num_tokens = len(submit.prompt_token_ids) + len(submit.resume_token_ids)
                assert num_tokens + 1 > self.driver.max_model_len
            self.next_request_id += 1

    @rule(positions=st.lists(st.integers(0, 12), min_size=1, max_size=2))
    def abort(self, positions: list[int]) -> None:
        self.driver.abort(*(self.next_request_id - position for position in positions))

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @rule(prompt=prompts, num_aborted=st.integers(0, 3), priority=priorities)
    def step_with_arrival_and_aborts_in_flight(self, prompt: tuple[int, ...], num_aborted: int, priority: int) -> None:
        def while_in_flight() -> None:
            live = [request_id for request_id, answer in self.driver.answers.items() if not answer.is_over]
            self.driver.abort(*live[:num_aborted])
            if len(prompt) < self.driver.max_model_len:
                self.driver.submit(make_submit(self.next_request_id, prompt, priority=priority))
                self.next_request_id += 1

        self.driver.step(while_in_flight)

    def teardown(self) -> None:
        """Whatever happened: what is left ends in a bounded number of steps, as it would have alone."""
        if not hasattr(self, "driver"):
            return
        num_steps_max = 0
        for answer in self.driver.answers.values():
            if not answer.is_over:
                num_tokens = len(answer.submit.prompt_token_ids) + answer.submit.stopping.max_tokens
                num_steps_max += num_tokens  # as the first in precedence it gets one in every step
        self.driver.run(num_steps_max + 1)
        self.driver.check_answers()
        assert self.driver.scheduler.stats().num_used_kv_blocks == 0


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
