"""Fused layers say what the modules they replace say; what is not known is left alone, and told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from scheduler.model import fuse, startup
from scheduler.model.attention.cpu import run_parallel
from scheduler.model.fused import stack
from scheduler.model.fused.stack import FusedStack, PackedLinear
from scheduler.model.model_runner import ModelRunner
from tests.model.tiny import VOCAB_SIZE, Driver, assert_exact, load, random_ids, save_model

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,  # no multiple of a vector, nor are the others
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FUSED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "wide": LlamaConfig(**TINY | {"hidden_size": 256, "num_attention_heads": 4}, head_dim=64),
    "biased": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "scaled_rope": LlamaConfig(**TINY, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "mistral": MistralConfig(**TINY, sliding_window=256),
    "gemma": GemmaConfig(**TINY, head_dim=32),
    "phi3": Phi3Config(**TINY),
}
LEFT_ALONE: dict[str, tuple[PreTrainedConfig, str]] = {
    "granite": (GraniteConfig(**TINY, residual_multiplier=0.7), "layer 0, fused, differs"),
    "olmo2": (Olmo2Config(**TINY), "a layer of it consists of"),
    "cohere": (CohereConfig(**TINY, logit_scale=0.25), "a layer of it consists of"),
    "mixtral": (MixtralConfig(**TINY, num_local_experts=4, sliding_window=None), "its MLP consists of"),
    "gpt_neox": (
        GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
        "other weights than one gain",
    ),
    "relu": (LlamaConfig(**TINY, hidden_act="relu"), "activation"),
}
CUTS = [{1: 25}, {2: 9, 1: 15}, {1: 1, 2: 1}]


def load_fast(directory: str, **flags: Any) -> ModelRunner:
    return load(directory, attention_backend="cpu", **flags)


def is_fused(runner: ModelRunner) -> bool:
    return any(isinstance(module, FusedStack) for module in runner._model.modules())


@contextmanager
def logits_of_steps() -> Iterator[list[torch.Tensor]]:
    """What every step computes from now on."""
    seen: list[torch.Tensor] = []
    compute = ModelRunner.compute_logits

    def note(runner: ModelRunner, inputs: Any) -> torch.Tensor:
        logits = compute(runner, inputs)
        seen.append(logits.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "compute_logits", note)
        yield seen


def run(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits of every step of two sequences: chunks beside each other, then decodes."""
    driver = Driver(runner)
    driver.add(1, random_ids(40, 1))
    driver.add(2, random_ids(9, 2))
    with logits_of_steps() as seen:
        for work in CUTS:
            driver.step(work)
    return seen


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_model_says_what_it_says_unfused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Biases, norms of queries and keys, gains of one more, joint projections, tied embeddings, sizes that fill no
    vector: the same logits within rounding, and tokens that transformers would have chosen."""
    directory = save_model(FUSED[family], tmp_path)
    fused = load_fast(directory)
    assert is_fused(fused)
    assert isinstance(fused._model.get_output_embeddings(), PackedLinear)
    assert not [record for record in caplog.records if "runs with its own modules" in record.message]
    driver = Driver(fused)
    driver.add(7, random_ids(30, 3))
    driver.decode([7], 8)
    assert_exact(directory, driver.tokens[7], 30)
    driver.finish(7)
    ours = run(fused)
    monkeypatch.setattr(startup, "_fuse", lambda *_: False)
    unfused = load_fast(directory)
    assert not is_fused(unfused)
    for our_logits, their_logits in zip(ours[1:], run(unfused)[1:], strict=True):  # the first step samples nothing
        assert (our_logits - their_logits).abs().max() < 1e-4 * their_logits.std()


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_an_unknown_shape_runs_unfused_and_says_so_once(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A factor on the residual, norms elsewhere, experts, other norms, other activations: the model's own modules
    serve, exactly, and one warning names the reason."""
    config, reason = LEFT_ALONE[family]
    directory = save_model(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        runner = load_fast(directory)
    (message,) = [record.message for record in caplog.records if "runs with its own modules" in record.message]
    assert reason in message
    assert config.model_type in message
    assert not is_fused(runner)
    assert type(runner._model.get_output_embeddings()) is nn.Linear
    driver = Driver(runner)
    driver.add(1, random_ids(30, 3))
    driver.decode([1], 8)
    assert_exact(directory, driver.tokens[1], 30)


def test_a_token_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Alone and in a batch, in one chunk and in several, on one thread, two and three: bit for bit the same logits."""
    directory = save_model(FUSED["llama"], tmp_path)
    prompt = random_ids(50, 5)
    last: list[torch.Tensor] = []
    for num_threads, chunks, company in ((1, [50], 0), (2, [50], 3), (3, [13, 1, 36], 1), (2, [49, 1], 0)):
        driver = Driver(load_fast(directory, num_threads=num_threads))
        driver.add(1, prompt)
        for other in range(company):
            driver.add(2 + other, random_ids(4, other))
        with logits_of_steps() as seen:
            for chunk in chunks:
                driver.step({2 + other: 1 for other in range(company)} | {1: chunk})
        last.append(seen[-1][-1])
    for logits in last[1:]:
        assert torch.equal(logits, last[0])


def test_one_step_is_two_parallel_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers in one, the vocabulary in another if anything is sampled, however many layers and tokens there are."""
    driver = Driver(load_fast(save_model(FUSED["llama"], tmp_path), num_threads=2))
    regions: list[int] = []
    monkeypatch.setattr(stack, "run_parallel", lambda f, call, n: (regions.append(n), run_parallel(f, call, n)))
    driver.add(1, random_ids(40, 1))
    driver.add(2, random_ids(9, 2))
    for work, expected in zip(CUTS, [[2], [2, 2], [2, 2]], strict=True):  # the first step samples nothing
        regions.clear()
        driver.step(work)
        assert regions == expected


def test_replaced_weights_are_given_back(tmp_path: Path) -> None:
    """Once the fused layers serve, the modules that they replaced hold no weights."""
    runner = load_fast(save_model(FUSED["llama"], tmp_path))
    names = [name for name, _ in runner._model.named_parameters()]
    assert sorted(names) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert all(not list(module.parameters()) for module in runner._attention._layer_of)


def test_a_row_that_is_no_number_harms_no_other_and_no_later_one(tmp_path: Path) -> None:
    """Not a number, or infinite, in one sequence's embedding: its row is lost, its neighbours' and the next step's rows
    have the same bits as without it."""
    directory = save_model(FUSED["llama"], tmp_path)

    def logits_of(bad: float | None) -> list[torch.Tensor]:
        runner = load_fast(directory)
        if bad is not None:
            runner._model.get_input_embeddings().weight.data[200] = bad
        driver = Driver(runner)
        driver.add(1, [200, 5, 6])
        driver.add(2, [i % 190 for i in random_ids(9, 2)])
        with logits_of_steps() as seen:
            driver.step({1: 3, 2: 9})
            driver.finish(1)
            driver.step({2: 1})
            driver.add(3, [7, 8, 9, 10])
            driver.step({3: 4, 2: 1})
        return seen

    clean = logits_of(None)
    for bad in (float("nan"), float("inf")):
        first, *rest = logits_of(bad)
        assert not bool(first[0].isfinite().all())
        assert torch.equal(first[1], clean[0][1])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, clean[1:], strict=True))


class _Plus(nn.Module):
    """Something that a model's code could do between a layer and its norm."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = inner.weight
        self.eps = inner.variance_epsilon
        self._inner = [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner[0](x) + 0.01


def test_a_norm_is_believed_only_as_it_computes(tmp_path: Path) -> None:
    """A module that looks like an RMSNorm and adds a little is found out, and so is a wrong epsilon."""
    model = AutoModelForCausalLM.from_pretrained(save_model(FUSED["llama"], tmp_path))
    norm = model.model.layers[1].input_layernorm
    gain, eps = fuse._probed_norm(norm, 72)
    assert torch.allclose(gain, norm.weight, atol=1e-5)
    assert eps == norm.variance_epsilon
    with pytest.raises(fuse.NotFusableError, match="no RMSNorm"):
        fuse._probed_norm(_Plus(norm), 72)
    lying = _Plus(norm)
    lying.eps = 0.1
    lying.forward = norm.forward  # type: ignore[method-assign]
    with pytest.raises(fuse.NotFusableError, match="no RMSNorm"):
        fuse._probed_norm(lying, 72)


def test_a_module_that_cannot_be_tried_alone_costs_speed_not_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code of a model that wants other arguments raises whatever it raises: the model runs unfused."""

    def want_more(_norm: nn.Module, _width: int) -> Any:
        raise TypeError("forward() missing 1 required positional argument")

    monkeypatch.setattr(fuse, "_probed_norm", want_more)
    runner = load_fast(save_model(FUSED["llama"], tmp_path))
    assert "its modules cannot be tried one by one (TypeError)" in caplog.text
    assert not is_fused(runner)


def test_a_whole_model_that_comes_out_wrong_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that pass alone but not together are taken out again; the model serves with its own modules."""
    forward = FusedStack.forward
    monkeypatch.setattr(FusedStack, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * 1.01 + 0.1)
    directory = save_model(FUSED["llama"], tmp_path)
    runner = load_fast(directory)
    assert "its logits with its layers replaced are not its own by" in caplog.text
    assert not is_fused(runner)
    driver = Driver(runner)
    driver.add(1, random_ids(30, 3))
    driver.decode([1], 8)
    assert_exact(directory, driver.tokens[1], 30)


@pytest.mark.parametrize("flags", [{"dtype": "bfloat16"}, {"attention_backend": "reference"}])
def test_only_float32_on_the_fast_backend_is_fused(tmp_path: Path, flags: dict[str, str]) -> None:
    """Other precisions, and the oracle of the tests, run the model's own modules."""
    assert not is_fused(load(save_model(FUSED["llama"], tmp_path), **{"attention_backend": "cpu"} | flags))


@pytest.mark.parametrize(("num_rows", "depth", "width"), [(1, 1, 1), (5, 33, 31), (13, 64, 100), (300, 7, 96)])
def test_a_packed_product_is_a_product(num_rows: int, depth: int, width: int) -> None:
    """For any number of rows, of inputs and of outputs, with a bias and without."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(width, depth, generator=generator), torch.randn(width, generator=generator)
    rows = torch.randn(2, num_rows, depth, generator=generator)
    for linear_bias in (bias, None):
        for num_threads in (1, 3):
            ours = PackedLinear(weight, linear_bias, num_threads)(rows)
            assert torch.allclose(ours, nn.functional.linear(rows, weight, linear_bias), atol=1e-4)
    assert PackedLinear(weight, None, 2)(rows[:, :0]).shape == (2, 0, width)


def test_weights_of_several_parts_are_packed_on_top_of_each_other() -> None:
    """As one weight of all their rows would be."""
    parts = [torch.randn(size, 9) for size in (40, 5, 3)]
    together = torch.cat(parts)
    floats = stack._packed_floats([together])
    panels = []
    for weights in (parts, [together]):
        arena = stack._Arena(floats)
        stack._pack(weights, arena, 2)
        panels.append(arena._floats[:floats])
    assert torch.equal(*panels)
