"""Guides in the runner: whose they are, what survives preemption, resets and resumption, and who fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.messages import FailureKind, SamplingParams, StoppingParams
from scheduler.model.guided.matcher import GuideMismatchError
from scheduler.model.model_runner import ModelRunner
from tests.model import tiny
from tests.model.tiny import Driver, random_ids

PERIOD = 7
ModelDir = Callable[[str], str]


class Cycle:
    """A guide that is a number: output token i must be that number + i, modulo PERIOD; 255 raises."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.num_followed = 0

    def follow(self, output_ids: np.ndarray) -> None:
        for token_id in output_ids[self.num_followed :].tolist():
            if token_id % PERIOD != (self.offset + self.num_followed) % PERIOD:
                raise GuideMismatchError
            self.num_followed += 1

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        if self.offset == 255:
            raise ValueError("of the library")
        bits = np.zeros(bitmask.shape[1] * 32, dtype=np.uint8)
        bits[(self.offset + self.num_followed) % PERIOD :: PERIOD] = 1
        bitmask[row] = np.packbits(bits, bitorder="little").view(np.int32)


class Cycles:
    def is_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        return True

    def open(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Cycle:
        return Cycle(guide[0])


@pytest.fixture(scope="module")
def runner(model_dir: ModelDir) -> ModelRunner:
    runner = tiny.load(model_dir("llama"))
    runner._batch.guides = Cycles()
    return runner


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    runner.reset()
    return Driver(runner)


def add(driver: Driver, seq_id: int, offset: int, *, temperature: float = 1.0, **fields: Any) -> None:
    driver.add(
        seq_id, random_ids(5 + seq_id, seed=seq_id), SamplingParams(temperature=temperature, seed=seq_id), **fields
    )
    driver._pending_new[seq_id] = replace(driver._pending_new[seq_id], guide=bytes([offset]) if offset else b"")


def follows(output: list[int], offset: int) -> bool:
    return [token_id % PERIOD for token_id in output] == [(offset + i) % PERIOD for i in range(len(output))]


def test_each_sequence_follows_its_own_guide(driver: Driver) -> None:
    """Beside others with another one, or with none, whose tokens are what they are alone."""
    add(driver, 0, 0)
    driver.decode([0], 8)
    alone = driver.output(0)
    driver.finish(0)
    for seq_id, offset in ((1, 3), (2, 5)):
        add(driver, seq_id, offset)
    add(driver, 0, 0)
    driver.decode([1, 0, 2], 8)
    assert follows(driver.output(1), 3)
    assert follows(driver.output(2), 5)
    assert driver.output(0) == alone


def test_preemption_resets_and_resumption_change_nothing(driver: Driver, runner: ModelRunner) -> None:
    """The state is a function of the output: the same tokens, whatever happened between them."""
    add(driver, 1, 3)
    driver.decode([1], 9)
    undisturbed = driver.output(1)
    assert follows(undisturbed, 3)

    driver.finish(1)
    add(driver, 1, 3)
    driver.decode([1], 4)
    driver.preempt(1)
    driver.decode([1], 5)
    assert driver.output(1) == undisturbed

    runner.reset()
    resumed = Driver(runner)
    add(resumed, 1, 3, resumed_output=undisturbed[:5])
    resumed.decode([1], 4)
    assert resumed.output(1) == undisturbed


def test_who_cannot_go_on_fails_alone(driver: Driver) -> None:
    """A dead end, a matcher that raises, resumed tokens that do not follow: each is that sequence's failure, none is
    taken for logits that are no numbers, and the neighbour's tokens stay as they are.
    """
    add(driver, 1, 3)
    driver.decode([1], 4)
    undisturbed = driver.output(1)
    driver.finish(1)

    add(driver, 1, 3)
    add(driver, 2, 255)
    add(driver, 3, 4, resumed_output=[5, 5])
    add(
        driver,
        4,
        7,
        stopping=StoppingParams(max_tokens=9, min_tokens=9, stop_token_ids=tuple(range(0, tiny.VOCAB_SIZE, 7))),
    )
    driver.decode([1, 2, 3, 4], 1)
    result = driver.last_result
    assert {seq_id: failure.kind for seq_id, failure in result.failures.items()} == {
        2: FailureKind.INTERNAL,
        3: FailureKind.BAD_GUIDE,
        4: FailureKind.GUIDE_DEAD_END,
    }
    assert list(result.non_finite_seq_ids) == []
    for seq_id in (2, 3, 4):
        driver.finish(seq_id)
    driver.decode([1], 3)
    assert driver.output(1) == undisturbed


def test_a_prompt_in_chunks_asks_its_guide_once_it_is_sampled(driver: Driver, runner: ModelRunner) -> None:
    """Before that there is nothing to allow."""
    add(driver, 20, 3)
    driver.step({20: 10})
    assert driver.last_result.failures == {}
    driver.decode([20], 3)
    assert follows(driver.output(20), 3)
