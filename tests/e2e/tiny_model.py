"""A model of a few megabytes with the default model's tokenizer, for servers that must start soon and step fast.

Its weights are seeded noise, so what it says is nonsense, but always the same nonsense. One token is poisoned: its
embedding is NaN, as a bad checkpoint's or an overflowing activation's would be, and so is every logit after it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.e2e.harness import default_model_dir

VOCAB_SIZE = 49_152
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
CONTEXT = 8192
POISON = 40_001
"""The token whose embedding is not finite."""


def make(directory: Path) -> Path:
    """Write the model; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(default_model_dir() / name, directory / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(20_261)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (noise.standard_normal(shape) * scale).astype(np.float32)

    embeddings = normal(VOCAB_SIZE, HIDDEN, scale=1.0)
    embeddings[POISON] = np.nan
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": normal(VOCAB_SIZE, HIDDEN, scale=HIDDEN**-0.5),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape, scale=2.0 * shape[1] ** -0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights
