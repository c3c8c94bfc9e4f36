"""Before READY everything is checked, measured and warm; what the runner tells of itself is what it holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler.config import EngineConfig
from scheduler.core.output import StepPlan
from scheduler.errors import ConfigurationError, ModelUnsupportedError, StartupError
from scheduler.model import loader, startup
from scheduler.model.attention.cpu import compiled_kernels
from scheduler.model.attention.reference import ReferenceBackend
from scheduler.model.kv_cache import NUM_SCRATCH_BLOCKS, PagedKVCache, num_bytes_per_block
from scheduler.model.model_runner import ModelRunner
from tests.model.tiny import VOCAB_SIZE, Driver, load, load_model_runner, random_ids

ModelDir = Callable[[str], str]
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
"""Of the tiny llama: keys and values, layers, tokens, KV heads, their size, float32."""


def test_the_runner_tells_what_it_holds(model_dir: ModelDir) -> None:
    """`info` gives the effective limits; nothing of the start is left behind in the batch."""
    runner = load(model_dir("llama"), attention_backend="cpu", max_model_len=200)
    info = runner.info
    assert (info.model_type, info.dtype, info.device, info.attention_backend) == ("llama", "float32", "cpu", "cpu")
    assert (info.block_size, info.num_kv_blocks, info.max_model_len) == (16, 64, 200)
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (8, 64)
    assert len(runner._batch._slot_of) == 0


def test_every_stage_is_announced_as_it_begins(model_dir: ModelDir) -> None:
    """Loading shows progress, in the order of the stages."""
    stages: list[str] = []
    config = EngineConfig(model=model_dir("llama"), num_threads=1, num_kv_blocks=4, attention_backend="reference")
    load_model_runner(config, stages.append)
    assert stages == ["weights", "compilation", "self-check", "memory profile", "warm-up", "kv pool"]


def test_on_a_cpu_a_standby_lacks_nothing_but_its_pool(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages but the pool's are over before it is activated, and what they computed in is given back."""
    stages: list[str] = []
    pools: list[weakref.ref[torch.Tensor]] = []
    make = PagedKVCache.__init__

    def count(self: PagedKVCache, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        pools.extend(weakref.ref(tensor) for layer in self.layers for tensor in layer)

    monkeypatch.setattr(PagedKVCache, "__init__", count)
    config = EngineConfig(
        model=model_dir("llama"), num_threads=1, num_kv_blocks=4, attention_backend="reference", standby=True
    )
    prepared = startup.prepare(config, stages.append)
    gc.collect()
    assert stages == ["weights", "compilation", "self-check", "memory profile", "warm-up"]
    assert pools
    assert [pool() for pool in pools] == [None] * len(pools)
    stages.clear()
    runner = prepared.activate(None, stages.append)
    assert stages == ["kv pool"]
    assert runner.info.num_kv_blocks == 4


def test_for_a_gpu_a_standby_only_reads_the_weights(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that could make a context on a device happens before it is activated, and then on the GPU it is told."""
    stages: list[str] = []
    asked: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a standby touches the GPU"))

    def no_gpu_after_all(_device_type: str, device_index: int | None) -> torch.device:
        asked.append(device_index)
        return torch.device("cpu")

    monkeypatch.setattr(loader, "resolve_device", no_gpu_after_all)
    config = EngineConfig(
        model=model_dir("llama"),
        num_threads=1,
        num_kv_blocks=4,
        attention_backend="reference",
        dtype="float32",
        standby=True,
    )
    prepared = startup.prepare(config, stages.append)
    assert (stages, asked) == (["weights"], [])
    runner = prepared.activate(3, stages.append)
    assert stages == ["weights", "compilation", "self-check", "memory profile", "warm-up", "kv pool"]
    assert asked == [3]
    runner.probe()


def test_memory_is_looked_at_when_a_standby_takes_over(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was free while it waited does not count: the engine it stands in for held its pool then."""
    config = EngineConfig(model=model_dir("llama"), num_threads=1, attention_backend="reference", max_num_seqs=64)
    monkeypatch.setattr(startup, "pool_budget_bytes", lambda *_: 0)
    prepared = startup.prepare(config, lambda _: None)
    monkeypatch.setattr(startup, "pool_budget_bytes", lambda *_: 10 * BLOCK_BYTES + 1)
    assert prepared.activate(None, lambda _: None).info.num_kv_blocks == 10 - NUM_SCRATCH_BLOCKS
    monkeypatch.setattr(startup, "pool_budget_bytes", lambda *_: BLOCK_BYTES)
    with pytest.raises(StartupError, match="not enough memory"):
        prepared.activate(None, lambda _: None)


def test_everything_a_default_start_needs_is_imported_ahead() -> None:
    """A process in reserve has the default backend imported and its kernels loaded."""
    compiled_kernels.cache_clear()
    startup.import_ahead()
    assert compiled_kernels.cache_info().currsize == (0 if torch.cuda.is_available() else 1)
    compiled_kernels(torch.float32)
    assert compiled_kernels.cache_info().hits == 1


def test_the_context_is_never_more_than_the_pool_holds(model_dir: ModelDir) -> None:
    """Two blocks of 16 tokens make a context of 32 tokens, and it can be filled."""
    runner = load(model_dir("llama"), num_kv_blocks=2)
    assert runner.info.max_model_len == 32
    driver = Driver(runner)
    driver.add(1, random_ids(30))
    driver.decode([1], 3)
    assert len(driver.output(1)) == 3


@pytest.mark.parametrize("flags", [{"num_kv_blocks": 1, "max_num_seqs": 8}, {"max_model_len": 1}, {"block_size": 1}])
def test_the_smallest_limits_start(model_dir: ModelDir, flags: dict[str, int]) -> None:
    """One block for eight seats, a context of one token, blocks of one token: all start and serve."""
    driver = Driver(load(model_dir("llama"), **flags))
    driver.add(1, [5])
    driver.decode([1], 1)
    assert len(driver.output(1)) == 1


def test_the_pool_follows_its_flags(model_dir: ModelDir) -> None:
    """--kv-cache-memory is spent to the block, the one for checks included; the measured default holds every seat's
    longest context, if it can.
    """
    directory = model_dir("llama")
    runner = load(directory, num_kv_blocks=None, kv_cache_memory_bytes=1_000_000)
    num_bytes = num_bytes_per_block(runner._attention.backend, 2)
    assert runner.info.num_kv_blocks == 1_000_000 // num_bytes - NUM_SCRATCH_BLOCKS
    runner = load(directory, num_kv_blocks=None)
    assert runner.info.num_kv_blocks == 8 * 256 // 16


def test_limits_that_cannot_be_served_are_refused(model_dir: ModelDir) -> None:
    """Contradictory or empty limits are configuration errors."""
    for flags in (
        {"num_kv_blocks": 0},
        {"num_kv_blocks": None, "kv_cache_memory_bytes": 100},
        {"attention_backend": "none of these"},
        {"max_model_len": 257},
    ):
        with pytest.raises(ConfigurationError):
            load(model_dir("llama"), **flags)


def test_too_little_memory_is_a_failure_to_start(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine leaves no room for a block, or the pool cannot be had, one line says so."""
    monkeypatch.setattr(startup, "pool_budget_bytes", lambda *_: 10)
    with pytest.raises(StartupError, match="not enough memory for a KV pool"):
        load(model_dir("llama"), num_kv_blocks=None)
    with pytest.raises(StartupError, match="does not fit into memory"):
        load(model_dir("llama"), num_kv_blocks=2**40)


@pytest.mark.parametrize("flags", [{"num_kv_blocks": 64}, {"num_kv_blocks": None, "kv_cache_memory_bytes": 400_000}])
def test_a_flag_cannot_ask_for_memory_that_is_not_there(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, flags: dict[str, int]
) -> None:
    """A pool that the flags size is held against what is free before it is claimed: pages come only when they are used,
    so the allocation itself would succeed and the engine be killed later."""
    monkeypatch.setattr(startup, "available_device_bytes", lambda *_: 300_000)
    with pytest.raises(StartupError, match="does not fit into memory"):
        load(model_dir("llama"), **flags)
    monkeypatch.setattr(startup, "available_device_bytes", lambda *_: None)
    load(model_dir("llama"), **flags)


def test_the_measured_step_asks_for_all_there_is(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seat has long filters and the most logprobs, some lists of the whole vocabulary; the others are counted."""
    plans: list[StepPlan] = []
    peaks: list[int] = []
    monkeypatch.setattr(startup, "LIST_ENTRIES_MAX", 3 * VOCAB_SIZE)
    execute, budget = ModelRunner.execute, startup.pool_budget_bytes
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    monkeypatch.setattr(startup, "measure_peak_bytes", lambda step, _: (step(), 1000)[1])
    monkeypatch.setattr(startup, "pool_budget_bytes", lambda *rest: peaks.append(rest[-1]) or budget(*rest))
    load(model_dir("llama"))
    sampling = [new.sampling for new in plans[0].new]
    assert len(sampling) == 8
    assert {(s.temperature, s.top_k, s.top_p, s.num_logprobs) for s in sampling} == {(100, VOCAB_SIZE - 1, 0.999, 20)}
    assert [len(s.logit_bias) for s in sampling] == [VOCAB_SIZE] * 3 + [0] * 5
    assert [len(s.allowed_token_ids) for s in sampling] == [VOCAB_SIZE] * 3 + [0] * 5
    assert peaks == [1000 + 5 * VOCAB_SIZE * startup.LIST_ENTRY_BYTES["cpu"]]


class _ForgetfulBackend(ReferenceBackend):
    """Never sees the first token of a context."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
        return super().forward(query, key * (torch.arange(len(key)) > 0)[:, None, None], value, *rest)  # type: ignore[arg-type]


class _NosyBackend(ReferenceBackend):
    """Lets the second sequence of a step read a little of the first one's output."""

    def forward(self, *arguments: object) -> torch.Tensor:
        output = super().forward(*arguments)  # type: ignore[arg-type]
        output[-1] += 0.01 * output[0]
        return output


@pytest.mark.parametrize("backend", [_ForgetfulBackend, _NosyBackend])
def test_the_self_check_refuses_wrong_attention(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, backend: type[ReferenceBackend]
) -> None:
    """If our logits are not the model's own, the engine does not start; the message tells both differences."""
    monkeypatch.setattr(startup, "choose_backend", lambda *_, **__: backend)
    with pytest.raises(ModelUnsupportedError, match="its logits under paged attention differ"):
        load(model_dir("llama"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_self_check(model_dir: ModelDir, dtype: str) -> None:
    """Rounding in 16 bits is not mistaken for an error."""
    driver = Driver(load(model_dir("llama"), dtype=dtype))
    assert driver.runner.info.dtype == dtype
    driver.add(1, random_ids(20))
    driver.decode([1], 3)
    assert len(driver.output(1)) == 3
