"""Submissions, aborts, pauses, steps, failed steps, confinements and limits in any order.

The pools are so small that preemption and prefix hits are common, and a failed step spoils all KV that it could.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.messages import SequenceStart, Submit
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


def build_submit(
    prompt: tuple[int, ...], is_poisoned: bool, max_tokens: int, num_prompt_logprobs: int | None, **options: Any
) -> Submit:
    """Without a single token to sample only where the prompt is scored."""
    return make_submit(
        0,
        prompt + (POISON_ID,) * is_poisoned,
        max_tokens=max_tokens if num_prompt_logprobs is not None else max(max_tokens, 1),
        num_prompt_logprobs=num_prompt_logprobs,
        **options,
    )


resumed = st.sampled_from([(), (), (), (3,), (3, 1, 4), (3, EOS_ID)])
sequences = st.one_of(
    st.builds(lambda token_ids: (SequenceStart(0, token_ids),), resumed),
    st.builds(lambda n: tuple(SequenceStart(index) for index in range(n)), st.integers(2, 5)),
    st.dictionaries(st.integers(0, 5), resumed, min_size=2, max_size=4).map(
        lambda starts: tuple(SequenceStart(index, starts[index]) for index in sorted(starts))
    ),
)
submits = st.builds(
    build_submit,
    prompt=prompts,
    is_poisoned=st.sampled_from([False] * 15 + [True]),
    max_tokens=st.integers(0, 24),
    min_tokens=st.integers(0, 24),
    eos_token_ids=st.sampled_from([(), (), (EOS_ID,)]),
    stop_token_ids=st.sampled_from([(), (), (STOP_ID, EOS_ID)]),
    sequences=sequences,
    priority=priorities,
    cache_salt=st.sampled_from(["", "", "salt"]),
    cache_bypass=st.sampled_from([False, False, False, True]),
    num_logprobs=st.sampled_from([None, None, 0]),
    num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
# Of the output tokens: none, the first few, or all of them.
alone_untils = st.sampled_from([0, 0, 0, 0, 1, 3, 2**31])


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

    @rule(submits=st.lists(st.tuples(submits, alone_untils), min_size=1, max_size=4))
    def submit(self, submits: list[tuple[Submit, int]]) -> None:
        for submit, alone_until in submits:
            try:
                self.driver.submit(replace(submit, request_id=self.next_request_id, alone_until=alone_until))
            except RequestNeverFitsError:
                num_resumed = max(len(start.resume_token_ids) for start in submit.sequences)
                assert len(submit.prompt_token_ids) + num_resumed + 1 > self.driver.max_model_len
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

    @rule(num_steps_before=st.integers(0, 3), prompt=st.none() | prompts)
    def step_fails(self, num_steps_before: int, prompt: tuple[int, ...] | None) -> None:
        def while_in_flight() -> None:
            if prompt is not None and len(prompt) < self.driver.max_model_len:
                self.driver.submit(make_submit(self.next_request_id, prompt))
                self.next_request_id += 1

        for _ in range(num_steps_before):
            self.driver.step()
        self.driver.fail_step(while_in_flight)

    @rule(positions=st.lists(st.integers(-1, 8), min_size=1, max_size=4), is_failure=st.booleans())
    def confine(self, positions: list[int], is_failure: bool) -> None:
        if is_failure:
            self.driver.fail_step()
        self.driver.vacate()
        self.driver.confine(self.next_request_id - position for position in positions)

    @rule(position=st.integers(-1, 8), indexes=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def end_sequences(self, position: int, indexes: list[int]) -> None:
        self.driver.end_sequences(*((self.next_request_id - position, index) for index in indexes))

    @rule(positions=st.lists(st.integers(-1, 8), min_size=1, max_size=4))
    def pause(self, positions: list[int]) -> None:
        self.driver.pause(*(self.next_request_id - position for position in positions))

    @rule(positions=st.lists(st.integers(-1, 8), min_size=1, max_size=4))
    def unpause(self, positions: list[int]) -> None:
        self.driver.unpause(*(self.next_request_id - position for position in positions))

    @rule()
    def unconfine(self) -> None:
        self.driver.unconfine()

    @rule(max_num_seqs=st.integers(1, 6), budget_extra=st.integers(0, 12))
    def limit(self, max_num_seqs: int, budget_extra: int) -> None:
        self.driver.vacate()
        self.driver.scheduler.limit(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + budget_extra)

    @rule()
    def raise_limit(self) -> None:
        scheduler = self.driver.scheduler
        scheduler.limit(
            max_num_seqs=2 * scheduler.max_num_seqs, max_num_batched_tokens=2 * scheduler.max_num_batched_tokens
        )

    def teardown(self) -> None:
        """Whatever happened: what is left ends in a bounded number of steps, as it would have alone."""
        if not hasattr(self, "driver"):
            return
        self.driver.unconfine()
        self.driver.unpause(*self.driver.paused)
        num_steps_max = 0
        for answer in self.driver.answers.values():
            if not answer.is_over:
                num_tokens = len(answer.submit.prompt_token_ids) + answer.submit.stopping.max_tokens
                # As the first in precedence of those who run a sequence gets a token in every step.
                num_steps_max += num_tokens * len(answer.num_output_tokens)
        if self.driver.may_overtake:
            # It may be in every other step only, and lose its place to an earlier one that waited, and begin anew.
            num_steps_max *= 4
        self.driver.run(num_steps_max + 1)
        self.driver.check_answers()
        assert self.driver.scheduler.stats().num_used_kv_blocks == 0


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
