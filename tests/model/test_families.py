"""What the engine cannot run exactly is refused at start, by name, with the reason; what it can needs no code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    T5Config,
)

from scheduler.config import EngineConfig
from scheduler.errors import ConfigurationError, ModelUnsupportedError
from scheduler.model import families, probe
from scheduler.model.families import effective_max_model_len, refuse_unsupported
from scheduler.model.loader import examine, load_weights
from scheduler.model.probe import _masks_reason
from tests.model.tiny import VOCAB_SIZE, Driver, assert_exact, load, random_ids, save_model

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MISTRAL = MistralConfig(**TINY, sliding_window=100)
REFUSED_BY_CONFIGURATION: dict[str, tuple[PreTrainedConfig, str]] = {
    "mistral": (MISTRAL, "window of 100 tokens, less than the context of 256; --max-model-len 100"),
    "qwen2": (Qwen2Config(**TINY, use_sliding_window=True, sliding_window=64, max_window_layers=1), "window of 64"),
    "gemma2": (Gemma2Config(**TINY, head_dim=16), "soft-capped at 50"),
    "gemma3_text": (Gemma3TextConfig(**TINY, head_dim=16, sliding_window=32), "window of 32"),
    "gpt_oss": (GptOssConfig(**TINY, sliding_window=128), "window of 128"),
    "mamba": (MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2), "recurrent"),
    "t5": (T5Config(vocab_size=VOCAB_SIZE), "encoder–decoder"),
    "deepseek_v3": (DeepseekV3Config(**TINY), "latent attention"),
    "falcon": (FalconConfig(vocab_size=VOCAB_SIZE, alibi=True), "ALiBi"),
    "llama": (LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "RoPE (dynamic)"),
}
REFUSED_BY_PROBE: dict[str, tuple[PreTrainedConfig, str]] = {
    "bloom": (BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4), "attention interface"),
    "bert": (BertConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}), "not causal"),
}
NEVER_SEEN: dict[str, PreTrainedConfig] = {
    "cohere": CohereConfig(**TINY, logit_scale=0.25),
    "granite": GraniteConfig(**TINY, logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.7),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "opt": OPTConfig(
        **{k: v for k, v in TINY.items() if k != "num_key_value_heads"}, ffn_dim=96, word_embed_proj_dim=64
    ),
    "stablelm": StableLmConfig(**TINY),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, sliding_window=None),
    "yarn": LlamaConfig(**TINY, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    "wide_window": MistralConfig(**TINY, sliding_window=256),
}


@pytest.mark.parametrize("family", REFUSED_BY_CONFIGURATION)
def test_a_configuration_is_enough_to_refuse(family: str, tmp_path: Path) -> None:
    """Before any weights are read, the error names the family and the reason."""
    config, reason = REFUSED_BY_CONFIGURATION[family]
    config.save_pretrained(tmp_path)  # no weights beside it
    with pytest.raises(ModelUnsupportedError, match=f"model family {family} is not supported") as caught:
        examine(load_weights(EngineConfig(model=str(tmp_path))), None)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", REFUSED_BY_PROBE)
def test_a_probe_refuses_what_no_rule_foresees(family: str, tmp_path: Path) -> None:
    """A model that does not attend through us, or not causally, is refused after one look at it running."""
    config, reason = REFUSED_BY_PROBE[family]
    directory = save_model(config, tmp_path)
    with pytest.raises(ModelUnsupportedError, match=f"model family {family} is not supported") as caught:
        examine(load_weights(EngineConfig(model=directory, max_model_len=64)), None)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mistral", "window of 100"),
        ("gemma2", "wants softcap"),
        ("gemma3_text", "window of 32"),
        ("gpt_oss", "window of 128"),
        ("mamba", "attention interface"),
        ("deepseek_v3", "keys and values differ"),
    ],
)
def test_the_probe_alone_would_have_refused(
    family: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a rule missing, as it will be for a family of tomorrow, the probe sees what the model hands over."""
    monkeypatch.setattr(families, "_RULES", ())
    config = copy.deepcopy(REFUSED_BY_CONFIGURATION[family][0])
    if family == "gemma2":
        config.sliding_window = 256
    directory = save_model(config, tmp_path)
    with pytest.raises(ModelUnsupportedError, match=reason):
        examine(load_weights(EngineConfig(model=directory, max_model_len=200)), None)


def test_a_window_that_only_the_mask_knows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is not handed to the attention function shows in the mask that the model asks for."""
    monkeypatch.setattr(families, "_RULES", ())
    monkeypatch.setattr(probe, "_options_reason", lambda *_: None)
    directory = save_model(MISTRAL, tmp_path)
    with pytest.raises(ModelUnsupportedError, match="mask is not the causal one"):
        examine(load_weights(EngineConfig(model=directory)), None)
    examine(load_weights(EngineConfig(model=directory, max_model_len=100)), None)


@pytest.mark.parametrize("family", NEVER_SEEN)
def test_other_families_run_without_new_code(family: str, tmp_path: Path) -> None:
    """Logit scaling, learned positions, interleaved heads, experts, static RoPE scaling: all exact."""
    directory = save_model(NEVER_SEEN[family], tmp_path)
    driver = Driver(load(directory))
    prompts = {1: random_ids(40, 1), 2: random_ids(9, 2)}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt)
    driver.step({1: 25})
    driver.step({2: 9, 1: 15})
    driver.decode([1, 2], 8)
    for seq_id, prompt in prompts.items():
        assert_exact(directory, driver.tokens[seq_id], len(prompt))


def test_a_window_as_wide_as_the_context_is_no_window() -> None:
    """A sliding-window model is served where the context is cut to the window."""
    refuse_unsupported(MISTRAL, 100)
    with pytest.raises(ModelUnsupportedError):
        refuse_unsupported(MISTRAL, 101)


def test_the_context_is_the_models_own_or_less() -> None:
    """--max-model-len can shorten the context, never lengthen it; without any limit it must be given."""
    config = LlamaConfig(**TINY)
    assert effective_max_model_len(config, None) == 256
    assert effective_max_model_len(config, 100) == 100
    for requested in (257, 0):
        with pytest.raises(ConfigurationError, match="--max-model-len"):
            effective_max_model_len(config, requested)
    with pytest.raises(ConfigurationError, match="set --max-model-len"):
        effective_max_model_len(MambaConfig(), None)


def window_of(width: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (query - key < width)


def chunks_of(width: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (query // width == key // width)


@pytest.mark.parametrize("make", [window_of, chunks_of])
@pytest.mark.parametrize("width", [1, 3, 16, 17, 100, 1000, 4095])
def test_masks_of_any_width_show(make: Callable[[int], Callable[..., torch.Tensor]], width: int) -> None:
    """A mask that hides anything causal from a context of 4,096 tokens is seen, though the probe runs over five."""
    assert _masks_reason([make(width)], 4096) is not None
    assert _masks_reason([make(4096)], 4096) is None


def test_a_mask_that_sees_the_future_shows() -> None:
    """A mask that shows a token what follows it is not causal; one made of other things than positions is refused."""
    assert _masks_reason([lambda batch, head, query, key: key <= query + 1], 64) is not None
    table = torch.ones(5, 5, dtype=torch.bool)
    assert _masks_reason([lambda batch, head, query, key: table[query, key]], 64) is not None
