"""n sequences through the scheduler and the real runner: each is the single request of its (seed, index)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.core.config import SchedulerConfig
from scheduler.core.scheduler import Scheduler
from scheduler.messages import SamplingParams, SequenceStart, StoppingParams, Submit
from scheduler.model.model_runner import ModelRunner
from tests.model.tiny import load, random_ids

ModelDir = Callable[[str], str]

SEED = 77
GOLDEN = 0x9E3779B97F4A7C15
PROMPT = tuple(random_ids(37, seed=5))


@pytest.fixture(scope="module")
def llama(model_dir: ModelDir) -> ModelRunner:
    return load(model_dir("llama"))


def submit(request_id: int, indexes: tuple[int, ...], **sampling: Any) -> Submit:
    params = SamplingParams(**{"temperature": 1.0, "seed": SEED} | sampling)
    starts = tuple(SequenceStart(index) for index in indexes)
    return Submit(request_id, PROMPT, params, StoppingParams(max_tokens=24), starts)


def run(
    runner: ModelRunner, submits: list[Submit], *, max_num_seqs: int = 8, max_num_batched_tokens: int = 64
) -> dict[tuple[int, int], list[int]]:
    """(request, index) → tokens."""
    runner.reset()
    info = runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, info.max_model_len, info.block_size, info.num_kv_blocks)
    )
    for one in submits:
        scheduler.add_request(one)
    tokens: dict[tuple[int, int], list[int]] = {}
    while (plan := scheduler.schedule()) is not None:
        outputs, failures = scheduler.update_from_output(plan, runner.execute(replace(plan, step_id=0)))
        assert not failures
        for output in outputs:
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
    return tokens


@pytest.mark.parametrize("bounds", [{}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 3}])
def test_four_sequences_are_four_singles(llama: ModelRunner, bounds: dict[str, int]) -> None:
    """Forked from one prompt, in whatever chunks and seats, sequence i has the tokens of a request of that sequence
    alone; and no two are the same."""
    together = run(llama, [submit(1, (0, 1, 2, 3))], **bounds)
    alone = {index: run(llama, [submit(2, (index,))])[2, index] for index in range(4)}
    assert together == {(1, index): alone[index] for index in range(4)}
    assert len({tuple(tokens) for tokens in alone.values()}) == 4


def test_greedy_sequences_are_equal(llama: ModelRunner) -> None:
    """Without noise nothing tells them apart."""
    together = run(llama, [submit(1, (0, 1, 2, 3), temperature=0.0)])
    assert len({tuple(tokens) for tokens in together.values()}) == 1


def test_each_sequence_draws_by_its_own_noise(llama: ModelRunner, model_dir: ModelDir) -> None:
    """Sequence i's tokens are the best of transformers' eight best logits plus Gumbel noise, made here in plain Python
    from (seed, i, position, token) as `noise.py` describes it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32, attn_implementation="eager")
    for (_, index), tokens in run(llama, [submit(1, (0, 2, 5), top_k=8)]).items():
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0].double()
        for position, token_id in enumerate(tokens, len(PROMPT)):
            values, ids = logits[position - 1].topk(8)
            scores = {
                candidate: value + gumbel(index, position, candidate)
                for candidate, value in zip(ids.tolist(), values.tolist(), strict=True)
            }
            assert scores[token_id] > max(scores.values()) - 1e-3


def mix64(value: int) -> int:
    """SplitMix64's output function."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def gumbel(index: int, position: int, token_id: int) -> float:
    """The noise of one candidate; lanes of candidates begin at 2^33."""
    key = mix64(SEED + GOLDEN)
    for counter in (index, position, token_id + 2**33):
        key = mix64(key + (counter + 1) * GOLDEN)
    return -math.log(-math.log(((key >> 11) + 0.5) * 2.0**-53))
