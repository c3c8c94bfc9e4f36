"""Scored prompts: transformers' own log-probabilities of every prompt token, however the prompt was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedConfig,
)

from scheduler.core.output import StepPlan
from scheduler.core.packed_logprobs import PackedLogprobs
from scheduler.errors import ModelUnsupportedError
from scheduler.messages import SamplingParams, TokenLogprobs
from scheduler.model import prompt_scores
from scheduler.model.input_batch import ScoredRows
from scheduler.model.model_runner import ModelRunner
from scheduler.model.projection import Projection
from tests.model.tiny import _COMMON, GREEDY, SUPPORTED, VOCAB_SIZE, Driver, assert_exact, load, random_ids, save_model

ModelDir = Callable[[str], str]

TOLERANCE = 1e-3
# Families that do something of their own between the last hidden state and the logits, or keep their decoder elsewhere.
PECULIAR: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(**_COMMON, num_key_value_heads=2, logits_scaling=8.0),
    "cohere": CohereConfig(**_COMMON, num_key_value_heads=2, logit_scale=0.0625),
    "opt": OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=2,
    ),
}


def scoring(num_top: int, sampling: SamplingParams = GREEDY) -> SamplingParams:
    return replace(sampling, num_prompt_logprobs=num_top)


@pytest.fixture(scope="module")
def llama(model_dir: ModelDir) -> ModelRunner:
    return load(model_dir("llama"))


@pytest.fixture
def driver(llama: ModelRunner) -> Driver:
    llama.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=list(llama._batch._slot_of)))
    return Driver(llama)


def unpack(packed: PackedLogprobs) -> list[TokenLogprobs]:
    """What it holds of each position."""
    num, top = len(packed), packed.num_top
    assert len(packed.ranks) == num
    assert len(packed.top_token_ids) == len(packed.top_logprobs) == num * top
    return [
        TokenLogprobs(
            packed.logprobs[place],
            packed.ranks[place],
            tuple(packed.top_token_ids[place * top : (place + 1) * top]),
            tuple(packed.top_logprobs[place * top : (place + 1) * top]),
        )
        for place in range(num)
    ]


class Collector:
    """Steps a driver and strings together what the steps say of each prompt."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.packed: dict[int, PackedLogprobs] = {}

    def step(self, work: dict[int, int]) -> None:
        for seq_id, part in self.driver.step(work).prompt_logprobs.items():
            if seq_id in self.packed:
                self.packed[seq_id].extend(part)
            else:
                self.packed[seq_id] = part

    def scores(self, seq_id: int) -> list[TokenLogprobs]:
        return unpack(self.packed[seq_id])


def assert_scores(directory: str, prompt: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int) -> None:
    """One teacher-forced pass of transformers gives every token but the first the same log-probability and rank."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].log_softmax(dim=-1)
    assert len(scores) == len(prompt) - 1
    for row, token_id, score in zip(expected[:-1], prompt[1:], scores, strict=True):
        assert score.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        above = int((row > row[token_id] + TOLERANCE).sum()), int((row > row[token_id] - TOLERANCE).sum())
        assert above[0] < score.rank <= max(1, above[1])
        best = row.topk(num_top)
        assert list(score.top_logprobs) == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert row[list(score.top_token_ids)].tolist() == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert len(set(score.top_token_ids)) == num_top


@pytest.mark.parametrize("family", sorted({**SUPPORTED, **PECULIAR}))
def test_every_family_scores_prompts_exactly_in_chunks_and_company(
    model_dir: ModelDir, family: str, tmp_path: Path
) -> None:
    """Prompts in chunks, beside others that are scored, that are not, and that decode, have transformers' scores."""
    directory = save_model(PECULIAR[family], tmp_path) if family in PECULIAR else model_dir(family)
    collector = Collector(Driver(load(directory)))
    prompts = {1: random_ids(1, 1), 2: random_ids(37, 2), 3: random_ids(100, 3), 4: random_ids(16, 4)}
    wishes = {1: 3, 2: None, 3: 5, 4: 0}
    for seq_id, prompt in prompts.items():
        num_top = wishes[seq_id]
        collector.driver.add(seq_id, prompt, GREEDY if num_top is None else scoring(num_top))
    collector.step({1: 1, 2: 20, 3: 33})
    collector.step({2: 17, 1: 1, 3: 30})
    collector.step({3: 36, 1: 1, 4: 16, 2: 1})
    collector.step({4: 1, 3: 1})
    collector.driver.decode([4, 3, 2, 1], 6)
    assert set(collector.packed) == {3, 4}  # the first has nothing before its only token
    for seq_id in (3, 4):
        assert_scores(directory, prompts[seq_id], collector.scores(seq_id), wishes[seq_id] or 0)
    for seq_id, prompt in prompts.items():
        assert_exact(directory, collector.driver.tokens[seq_id], len(prompt))


def test_preemption_neither_loses_nor_repeats_a_score(driver: Driver, model_dir: ModelDir) -> None:
    """Whether in mid-prompt or in the output: what is computed again is not told again, and all is told."""
    collector, prompt = Collector(driver), random_ids(50, 5)
    driver.add(1, prompt, scoring(2))
    collector.step({1: 20})
    assert len(collector.packed[1]) == 20
    driver.preempt(1)
    collector.step({1: 12})
    assert len(collector.packed[1]) == 20
    collector.step({1: 38})
    assert_scores(model_dir("llama"), prompt, collector.scores(1), 2)
    driver.preempt(1)
    collector.step({1: 51})
    assert len(collector.packed[1]) == 49


def test_after_a_reset_it_goes_on_where_the_scheduler_says(driver: Driver, model_dir: ModelDir) -> None:
    """`num_scored_tokens` of a sequence that is new again: only what follows them is scored; they may be cached."""
    prompt = random_ids(50, 6)
    first = Collector(driver)
    driver.add(1, prompt, scoring(1))
    first.step({1: 33})
    blocks = driver.blocks[1][:2]
    driver.runner.reset()
    again = Collector(Driver(driver.runner))
    again.driver._free = [block for block in again.driver._free if block not in blocks]
    again.driver.add(1, prompt, scoring(1), num_scored_tokens=33, shared_blocks=blocks)
    again.step({1: 18})
    assert_scores(model_dir("llama"), prompt, [*first.scores(1), *again.scores(1)], 1)


def test_a_token_that_is_not_computed_is_not_scored(driver: Driver) -> None:
    """A plan that takes from the cache what is to be scored is our bug."""
    driver.add(1, random_ids(50, 7))
    driver.step({1: 50})
    driver.add(2, driver.tokens[1][:50], scoring(1), shared_blocks=driver.blocks[1][:2])
    with pytest.raises(AssertionError, match="cache"):
        driver.step({2: 18})
    driver.runner.reset()


def test_output_is_not_scored(driver: Driver, model_dir: ModelDir) -> None:
    """Resumed tokens are output: scores end with the prompt."""
    collector, prompt = Collector(driver), random_ids(10, 8)
    driver.add(1, prompt, scoring(1), resumed_output=random_ids(20, 9))
    collector.step({1: 30})
    collector.step({1: 1})
    assert_scores(model_dir("llama"), prompt, collector.scores(1), 1)


def test_few_logits_are_held_at_once_and_calls_do_not_grow_with_requests(
    driver: Driver, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all prompts are projected in slices of a bounded size, which run over the requests' borders."""
    sizes: list[int] = []
    project = Projection.project

    def counted(self: Projection, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return project(self, rows)

    monkeypatch.setattr(Projection, "project", counted)
    monkeypatch.setattr(prompt_scores, "PROMPT_LOGITS_MAX", 7 * VOCAB_SIZE + 1)
    collector = Collector(driver)
    prompts = {seq_id: random_ids(10 + seq_id, seq_id) for seq_id in range(1, 5)}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt, scoring(3))
    collector.step({seq_id: len(prompt) for seq_id, prompt in prompts.items()})
    assert sizes == [7] * 6 + [4]  # 10 + 11 + 12 + 13 rows
    for seq_id, prompt in prompts.items():
        assert_scores(model_dir("llama"), prompt, collector.scores(seq_id), 3)


def test_a_row_that_is_not_finite_fails_its_own_request(model_dir: ModelDir) -> None:
    """Whether its last row is finite or not even sampled: the sequence is told, and its neighbours are exact."""
    runner = load(model_dir("llama"))
    runner._model.get_input_embeddings().weight.data[4] = torch.nan
    driver = Driver(runner)
    prompts = {1: random_ids(20, 1), 2: [*random_ids(5, 2), 4, *random_ids(14, 3)], 3: random_ids(20, 4)}
    prompts = {seq_id: [token if token != 4 or seq_id == 2 else 5 for token in ids] for seq_id, ids in prompts.items()}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt, scoring(2))
    result = driver.step({1: 20, 2: 10, 3: 20})
    assert list(result.non_finite_seq_ids) == [2]
    assert set(result.prompt_logprobs) == {1, 3}
    for seq_id in (1, 3):
        assert_scores(model_dir("llama"), prompts[seq_id], unpack(result.prompt_logprobs[seq_id]), 2)


def test_a_step_that_fails_while_it_is_scored_leaves_nothing_behind(
    driver: Driver, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset the same prompt is scored from its beginning, and the hidden states of the failed step are gone."""
    prompt = random_ids(30, 3)
    driver.add(1, prompt, scoring(1))
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no memory")

        patch.setattr("scheduler.model.model_runner.sample", fail)
        with pytest.raises(RuntimeError):
            driver.step({1: 30})
    runner = driver.runner
    runner.reset()
    assert runner._projection._output is None
    collector = Collector(Driver(runner))
    collector.driver.add(1, prompt, scoring(1))
    collector.step({1: 30})
    assert_scores(model_dir("llama"), prompt, collector.scores(1), 1)


def test_the_way_of_scored_prompts_is_checked_at_start(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose logits do not come out the same way twice is refused by name before it serves."""
    project = Projection.project
    monkeypatch.setattr(Projection, "project", lambda self, rows: project(self, rows) * 1.1)
    with pytest.raises(ModelUnsupportedError, match="llama"):
        load(model_dir("llama"))


@pytest.mark.parametrize("decoder", ["itself", "none", "of another kind"])
def test_a_model_that_is_not_made_of_two_parts_is_refused(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    """By name at the start, whichever way it differs; nothing is left to fail in a step."""
    find = LlamaForCausalLM.get_decoder
    others: dict[str, Callable[[LlamaForCausalLM], Any]] = {
        "itself": lambda model: model,
        "none": lambda _: None,
        "of another kind": lambda model: find(model).layers[0],
    }
    monkeypatch.setattr(LlamaForCausalLM, "get_decoder", others[decoder])
    with pytest.raises(ModelUnsupportedError, match="llama"):
        load(model_dir("llama"))


def test_more_best_tokens_than_there_are_tokens_are_all_of_them(driver: Driver) -> None:
    """A vocabulary smaller than the wish gives each position the whole of it."""
    driver.add(1, random_ids(3, 3), scoring(10**6))
    (packed,) = driver.step({1: 3}).prompt_logprobs.values()
    assert [len(score.top_token_ids) for score in unpack(packed)] == [VOCAB_SIZE] * 2


def test_the_largest_step_is_measured_with_scored_prompts(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory and the time of scoring are in what is set aside for a step, and allowed for it."""
    num_rows: list[int] = []

    def counted(project: Any, rows: ScoredRows, **options: Any) -> prompt_scores.ScoredPrompts:
        num_rows.append(len(rows.rows))
        assert rows.num_top.max() == 20
        return prompt_scores.score_prompts(project, rows, **options)

    monkeypatch.setattr("scheduler.model.model_runner.score_prompts", counted)
    load(model_dir("llama"), max_num_seqs=8, max_num_batched_tokens=64)
    assert max(num_rows) == 64 - 8
