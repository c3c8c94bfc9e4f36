"""The runner executes plans exactly: whatever the chunks, neighbours, blocks and preemptions, transformers agrees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler.core.output import NewSequence, StepPlan
from scheduler.messages import SamplingParams, StoppingParams
from scheduler.model.model_runner import ModelRunner, UnhealthyRunnerError
from tests.model.tiny import GREEDY, SUPPORTED, Driver, assert_exact, load, random_ids

ModelDir = Callable[[str], str]
SEEDED = SamplingParams(temperature=1.0, seed=2**64 - 1)


@pytest.fixture(scope="module")
def llama(model_dir: ModelDir) -> ModelRunner:
    return load(model_dir("llama"))


@pytest.fixture
def driver(llama: ModelRunner) -> Driver:
    known = list(llama._batch._slot_of)
    llama.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=known))
    return Driver(llama)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_every_family_is_exact_in_mixed_batches(model_dir: ModelDir, family: str, backend: str) -> None:
    """Chunked prompts beside decodes, of any supported family and without code for it, give transformers' tokens."""
    directory = model_dir(family)
    driver = Driver(load(directory, attention_backend=backend))
    prompts = {1: random_ids(1, 1), 2: random_ids(37, 2), 3: random_ids(100, 3), 4: random_ids(16, 4)}
    for seq_id in (1, 2, 3):
        driver.add(seq_id, prompts[seq_id])
    driver.step({1: 1, 2: 20, 3: 33})
    driver.step({2: 17, 1: 1, 3: 30})
    driver.add(4, prompts[4])
    driver.step({3: 37, 1: 1, 4: 16, 2: 1})
    driver.decode([4, 3, 2, 1], 12)
    driver.finish(2)
    driver.decode([1, 3, 4], 8)
    for seq_id, prompt in prompts.items():
        assert len(driver.output(seq_id)) > 10
        assert_exact(directory, driver.tokens[seq_id], len(prompt))


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(driver: Driver, model_dir: ModelDir) -> None:
    """After preemption, sampled tokens are recomputed from the runner's memory and the stream stays the same."""
    prompt, neighbour = random_ids(30, 5), random_ids(20, 6)
    driver.add(1, prompt)
    driver.add(2, prompt, SEEDED)
    driver.add(3, neighbour)
    driver.decode([1, 2, 3], 6)
    driver.preempt(1)
    driver.preempt(2)
    driver.decode([3], 3)
    driver.step({2: 20, 3: 1})
    driver.step({2: len(driver.tokens[2]) - 20, 1: 7})
    driver.decode([1, 2, 3], 6)
    assert_exact(model_dir("llama"), driver.tokens[1], len(prompt))
    assert_exact(model_dir("llama"), driver.tokens[3], len(neighbour))
    driver.add(12, prompt, SEEDED)
    driver.decode([12], len(driver.output(2)))
    assert driver.output(12) == driver.output(2)


def test_a_shared_prefix_is_read_and_not_written(driver: Driver, model_dir: ModelDir) -> None:
    """A sequence that begins with another's blocks computes only the rest, and both are exact."""
    prefix = random_ids(32, 8)
    first, second = [*prefix, *random_ids(5, 9)], [*prefix, *random_ids(21, 10)]
    driver.add(1, first)
    driver.decode([1], 2)
    driver.add(2, second, shared_blocks=driver.blocks[1][:2])
    driver.step({1: 1, 2: 10})
    driver.step({2: 11, 1: 1})
    driver.decode([1, 2], 8)
    assert_exact(model_dir("llama"), driver.tokens[1], len(first))
    assert_exact(model_dir("llama"), driver.tokens[2], len(second))


def test_seeded_tokens_do_not_depend_on_company(driver: Driver) -> None:
    """The same request draws the same tokens alone, in a crowd, and cut into other chunks."""
    prompt = random_ids(40, 11)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=100, seed=77, repetition_penalty=1.1)
    driver.add(1, prompt, sampling)
    driver.decode([1], 20)
    for seq_id in range(2, 7):
        driver.add(seq_id, random_ids(3 * seq_id, seq_id), SamplingParams(temperature=1.0, seed=seq_id))
    driver.decode(range(2, 7), 2)
    driver.add(7, prompt, sampling)
    driver.step({2: 1, 7: 13, 3: 1})
    driver.step({7: 27})
    driver.decode([6, 7, 5, 4, 3, 2], 19)
    assert driver.output(7) == driver.output(1)


def test_index_and_seed_change_the_noise(driver: Driver) -> None:
    """Sequences of one request, and requests of other seeds, draw other tokens."""
    prompt = random_ids(10, 12)
    driver.add(1, prompt, SEEDED)
    driver.add(2, prompt, SEEDED, index=1)
    driver.add(3, prompt, SamplingParams(temperature=1.0, seed=0))
    driver.decode([1, 2, 3], 12)
    assert len({tuple(driver.output(seq_id)) for seq_id in (1, 2, 3)}) == 3


def test_a_resumed_request_draws_what_it_would_have_drawn(driver: Driver) -> None:
    """Resumed tokens count as output: noise, penalties and min_tokens go on where they were."""
    prompt = random_ids(10, 13)
    sampling = SamplingParams(temperature=1.2, seed=5, frequency_penalty=0.7, presence_penalty=0.3)
    stopping = StoppingParams(max_tokens=100, min_tokens=14, stop_token_ids=tuple(range(0, 320, 2)))
    driver.add(1, prompt, sampling, stopping=stopping)
    driver.decode([1], 20)
    whole = driver.output(1)
    driver.add(2, prompt, sampling, stopping=stopping, resumed_output=whole[:9])
    driver.decode([2], 11)
    assert driver.output(2) == whole
    assert all(token_id % 2 == 1 or token_id >= 320 for token_id in whole[:14])
    assert any(token_id % 2 == 0 for token_id in whole[14:])


def test_golden_tokens(driver: Driver) -> None:
    """The tokens of a fixed tiny model are these, greedy and drawn; a change of them is a change of the product."""
    prompt = random_ids(12, 14)
    driver.add(1, prompt)
    driver.add(2, prompt, SamplingParams(temperature=0.8, seed=42))
    driver.add(3, prompt, SamplingParams(temperature=0.8, seed=42, top_p=0.9, top_k=50, min_p=0.01))
    driver.decode([1, 2, 3], 12)
    assert {seq_id: driver.output(seq_id) for seq_id in (1, 2, 3)} == GOLDEN


GOLDEN = {
    1: [308, 122, 105, 138, 162, 123, 197, 189, 286, 84, 160, 216],
    2: [308, 215, 246, 236, 200, 204, 319, 307, 238, 26, 56, 306],
    3: [239, 88, 119, 13, 302, 226, 93, 282, 215, 311, 186, 252],
}


def test_logprobs_are_those_of_the_model(driver: Driver, model_dir: ModelDir) -> None:
    """Logprob, rank and best tokens are taken from the raw logits, whatever sampling did to them."""
    prompt = random_ids(9, 15)
    sampling = SamplingParams(temperature=2.0, seed=3, num_logprobs=4, logit_bias=((5, 3.0), (6, -100.0)))
    driver.add(1, prompt, sampling)
    driver.add(2, prompt)
    result = driver.step({2: 9, 1: 9})
    assert set(result.logprobs) == {1}
    logprobs, token_id = result.logprobs[1], driver.output(1)[0]
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - only here

    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert logprobs.logprob == pytest.approx(expected[token_id].item(), abs=1e-4)
    assert logprobs.rank == 1 + int((expected > expected[token_id]).sum())
    assert list(logprobs.top_token_ids) == expected.topk(4).indices.tolist()
    assert list(logprobs.top_logprobs) == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)


def test_a_row_that_is_not_finite_harms_only_itself(driver: Driver, model_dir: ModelDir) -> None:
    """A sequence whose logits are NaN is named; its neighbours' tokens are those they would have had."""
    prompt = random_ids(9, 16)
    driver.add(1, prompt)
    driver.add(2, [3, 4, 5])
    driver.add(3, prompt, SEEDED)
    embedding = driver.runner._model.get_input_embeddings().weight
    poisoned = embedding.data[4].clone()
    embedding.data[4] = torch.nan
    try:
        result = driver.step({1: 9, 2: 3, 3: 9})
    finally:
        embedding.data[4] = poisoned
    assert list(result.non_finite_seq_ids) == [2]
    assert result.sampled_token_ids[1] == -1
    assert driver.runner._batch.token_ids(2) == [3, 4, 5]
    driver.finish(2)
    driver.decode([1, 3], 5)
    assert_exact(model_dir("llama"), driver.tokens[1], 9)
    driver.add(4, prompt, SEEDED)
    driver.decode([4], 6)
    assert driver.output(4) == driver.output(3)


def test_more_sequences_than_seats_are_remembered(driver: Driver, model_dir: ModelDir) -> None:
    """Preempted sequences beyond max_num_seqs keep their tokens, and finished ones are forgotten."""
    prompts = {seq_id: random_ids(5 + seq_id, seq_id) for seq_id in range(20)}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt)
        driver.decode([seq_id], 2)
        driver.preempt(seq_id)
    for seq_id, prompt in prompts.items():
        driver.decode([seq_id], 2)
        driver.finish(seq_id)
        assert_exact(model_dir("llama"), driver.tokens[seq_id], len(prompt))
    driver.add(99, [3])
    driver.decode([99], 1)
    assert len(driver.runner._batch._slot_of) == 1


def test_a_sequence_may_fill_its_whole_context(driver: Driver, model_dir: ModelDir) -> None:
    """The last position of max_model_len is computed and sampled like any other."""
    limit = driver.runner.info.max_model_len
    prompt = random_ids(limit - 3, 17)
    driver.add(1, prompt)
    while driver.computed[1] < len(prompt):
        driver.step({1: min(64, len(prompt) - driver.computed[1])})
    driver.decode([1], 3)
    assert len(driver.tokens[1]) == limit + 1
    assert_exact(model_dir("llama"), driver.tokens[1][:limit], len(prompt))


def test_a_plan_that_breaks_the_protocol_is_our_bug(llama: ModelRunner) -> None:
    """Tokens without blocks, unknown tokens, wrong sums and wrong samples are refused before anything is computed."""
    new = NewSequence(500, 0, (3, 4, 5), 3, GREEDY, StoppingParams(5), (1,), 0)
    good = {"seq_ids": (500,), "num_scheduled_tokens": (3,), "sampled_seq_ids": (500,), "num_batched_tokens": 3}
    wrong = [
        {"num_scheduled_tokens": (4,), "num_batched_tokens": 4},
        {"num_scheduled_tokens": (0,), "num_batched_tokens": 0},
        {"num_batched_tokens": 2},
        {"sampled_seq_ids": ()},
    ]
    for changes in wrong:
        with pytest.raises(AssertionError):
            llama.execute(StepPlan(0, **(good | changes), new=(new,)))
        llama.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=(500,)))
    blockless = NewSequence(500, 0, (3, 4, 5), 3, GREEDY, StoppingParams(5), (), 0)
    with pytest.raises(AssertionError):
        llama.execute(StepPlan(0, **good, new=(blockless,)))
    llama.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=(500,)))
    llama.execute(StepPlan(0, **good, new=(new,)))
    preempted = {"seq_ids": (500,), "num_scheduled_tokens": (1,), "sampled_seq_ids": (500,), "num_batched_tokens": 1}
    with pytest.raises(AssertionError):  # it has no blocks until it is resumed
        llama.execute(StepPlan(0, **preempted, preempted_seq_ids=(500,)))
    llama.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=(500,)))


def test_an_empty_step_only_changes_state(driver: Driver) -> None:
    """A plan without tokens computes nothing and forgets what it says is finished."""
    driver.add(1, [3, 4])
    driver.decode([1], 1)
    driver.finish(1)
    result = driver.step({})
    assert list(result.sampled_token_ids) == []
    assert len(driver.runner._batch._slot_of) == 0


def test_two_runners_share_nothing(model_dir: ModelDir) -> None:
    """Two models in one process, stepped in turn, each stay exact."""
    directories = [model_dir("llama"), model_dir("gpt_neox")]
    drivers = [Driver(load(directory)) for directory in directories]
    for driver in drivers:
        driver.add(1, random_ids(20, 18))
    for _ in range(6):
        for driver in drivers:
            driver.decode([1], 1)
    for driver, directory in zip(drivers, directories, strict=True):
        assert_exact(directory, driver.tokens[1], 20)


# -------------------------------------------------------------------------------------------------- reset and probe


def pool_of(runner: ModelRunner) -> list[torch.Tensor]:
    return [tensor.clone() for layer in runner._kv_cache.layers for tensor in layer]


def test_a_reset_forgets_every_sequence_and_keeps_the_pool(driver: Driver, model_dir: ModelDir) -> None:
    """Ids and seats are free again; blocks filled before hold what they held, so that a prefix hit on them is exact."""
    runner, prompt = driver.runner, random_ids(40, 3)
    driver.add(1, prompt)
    driver.add(2, random_ids(20, 4), SamplingParams(temperature=1.0, frequency_penalty=1.0))
    driver.decode([1, 2], 3)
    full_blocks = driver.blocks[1][:2]
    before = pool_of(runner)
    runner.reset()
    assert all(torch.equal(now, was) for now, was in zip(pool_of(runner), before, strict=True))
    assert len(runner._batch._slot_of) == 0
    num_seats = len(runner._batch._state)
    again = Driver(runner)
    again._free = [block for block in again._free if block not in full_blocks]
    for seq_id in range(1, 9):  # every seat, the old ids among them
        again.add(seq_id, prompt, shared_blocks=full_blocks)
    again.decode(range(1, 9), 5)
    assert len(runner._batch._state) == num_seats
    for seq_id in range(1, 9):
        assert_exact(model_dir("llama"), again.tokens[seq_id], len(prompt))


def test_after_a_step_that_raised_a_reset_makes_the_runner_good_again(
    driver: Driver, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it raises: in attention, in the sampler, or when half of the plan has been applied."""
    runner, prompt = driver.runner, random_ids(20, 9)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault made by a test")

    num_threads = torch.get_num_threads()
    for place in ("forward", "sample", "apply"):
        with monkeypatch.context() as patch:
            if place == "forward":
                patch.setattr(runner._attention.backend, "forward", fail)
            elif place == "sample":
                patch.setattr("scheduler.model.model_runner.sample", fail)
            else:
                patch.setattr(runner._batch, "_append_blocks", fail)
            broken = Driver(runner)
            broken.add(1, prompt)
            with pytest.raises(RuntimeError, match="a fault made by a test"):
                broken.decode([1], 1)
        runner.reset()
        again = Driver(runner)
        again.add(1, prompt)
        again.decode([1], 4)
        again.finish(1)
        again.step({})
        assert_exact(model_dir("llama"), again.tokens[1], len(prompt))
        assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(
    "flags", [{}, {"attention_backend": "cpu"}, {"max_model_len": 1}, {"block_size": 1}, {"num_kv_blocks": 1}]
)
def test_a_probe_disturbs_nobody(model_dir: ModelDir, flags: dict[str, Any]) -> None:
    """It computes in a block that is no sequence's, leaves none behind, and needs no free seat."""
    runner = load(model_dir("llama"), max_num_seqs=1, **flags)
    num_blocks = runner.info.num_kv_blocks
    driver = Driver(runner)
    driver.add(1, [5])
    driver.decode([1], 1)
    before = pool_of(runner)
    runner.probe()
    assert list(runner._batch._slot_of) == [1]
    for now, was in zip(pool_of(runner), before, strict=True):
        assert now.shape[0] == num_blocks + 1
        assert torch.equal(now[:num_blocks], was[:num_blocks])


def test_a_probe_writes_to_the_scratch_block(llama: ModelRunner) -> None:
    """It is a real step: keys and values appear in the block after the last one."""
    for layer in llama._kv_cache.layers:
        layer.key.zero_()
        layer.value.zero_()
    llama.probe()
    for layer in llama._kv_cache.layers:
        assert layer.key[-1].any()
        assert layer.value[-1].any()
        assert not layer.key[:-1].any()


def test_a_probe_that_finds_the_runner_broken_says_so(llama: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step raises comes out as it is; logits that are not finite are an error of their own."""
    with monkeypatch.context() as patch:
        patch.setattr(llama._attention.backend, "forward", lambda query, *_: query * float("nan"))
        with pytest.raises(UnhealthyRunnerError, match="not finite"):
            llama.probe()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(llama._attention.backend, "forward", fail)
        with pytest.raises(ZeroDivisionError):
            llama.probe()
    llama.probe()


SHORT_OF_MEMORY = """
import resource, sys, traceback
from pathlib import Path
from scheduler.engine.containment import Cause, cause_of
from tests.model.tiny import Driver, load, random_ids

limits = {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "num_kv_blocks": 256}
runner = load(sys.argv[1], attention_backend=sys.argv[2], **limits)
driver = Driver(runner)
for seq_id in range(1, 17):
    driver.add(seq_id, random_ids(200, seq_id))
size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_bytes, -1))
try:
    held = []
    while True:
        held.append(bytearray(1 << 16))
except MemoryError:
    pass
try:
    driver.step({seq_id: 200 for seq_id in range(1, 17)})
except Exception as error:
    causes = [cause_of(error)]
    held.clear()
    runner.reset()
    runner.probe()
    del error
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    again = Driver(runner)
    again.add(1, random_ids(200, 1))
    again.decode([1], 2)
    print(causes == [Cause.OUT_OF_MEMORY], len(again.output(1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_without_memory_is_known_as_such(model_dir: ModelDir, backend: str) -> None:
    """Where the process may get no more, a step raises what containment takes for a lack of memory; a reset makes the
    runner good again.
    """
    result = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, model_dir("llama"), backend],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.stdout == "True 2\n", result.stderr
