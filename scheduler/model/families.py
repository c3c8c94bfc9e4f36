"""Which model families the engine refuses, told by the configuration alone, before any weights are read.

What must live here: one rule per reason, each a pure function of a configuration, and its sentence. What must not:
names of models. A rule asks for the property that the engine cannot honour, so that a family of tomorrow is judged by
the same table; what no rule foresees is caught by `probe.py`, which watches the model run.

The engine computes causal attention over everything a sequence has said, from keys and values that are written once.
Whatever deviates from that, or depends on what else is in the batch, cannot be exact here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from scheduler.errors import ConfigurationError, ModelUnsupportedError

_PLAIN_LAYER_TYPES = {"full_attention", "attention", "sliding_attention"}  # the last one only if its window is wide
_MOVING_ROPE_TYPES = {"dynamic", "longrope"}


def effective_max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    """Tokens one sequence may have: the model's own limit, or less if `requested`.

    Raises ConfigurationError if more is requested than the model was made for, or if nobody knows a limit.
    """
    own = getattr(text_config(config), "max_position_embeddings", None)
    if requested is not None and requested < 1:
        raise ConfigurationError(f"--max-model-len must be at least 1, not {requested}")
    if own is None and requested is None:
        raise ConfigurationError(f"model {config.model_type} tells no maximum length; set --max-model-len")
    if own is None or requested is None:
        return int(own or requested or 0)
    if requested > own:
        raise ConfigurationError(f"--max-model-len {requested} is more than the {own} tokens the model was made for")
    return requested


def refuse_unsupported(config: PreTrainedConfig, requested_max_model_len: int | None) -> None:
    """Raises ModelUnsupportedError, naming the family and the reason, if a rule forbids the model."""
    own = getattr(text_config(config), "max_position_embeddings", None)
    max_model_len = requested_max_model_len or own or sys.maxsize
    for rule in _RULES:
        reason = rule(text_config(config), max_model_len)
        if reason is not None:
            raise unsupported(config, reason)


def unsupported(config: PreTrainedConfig, reason: str) -> ModelUnsupportedError:
    """The error for a model of this family and this reason."""
    return ModelUnsupportedError(f"model family {config.model_type} is not supported: {reason}")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def refuse_narrow_window(window: int, max_model_len: int) -> str | None:
    """The reason against a sliding window, if sequences can grow longer than it."""
    if window >= max_model_len:
        return None
    return (
        f"its attention slides over a window of {window} tokens, less than the context of {max_model_len}; "
        f"--max-model-len {window} or less makes it servable"
    )


def _encoder_decoder(config: PreTrainedConfig, _: int) -> str | None:
    return "it is an encoder–decoder" if getattr(config, "is_encoder_decoder", False) else None


def _recurrent(config: PreTrainedConfig, _: int) -> str | None:
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return None  # code of the model's own, or no language model at all; loading tells
    if getattr(model_class, "_is_stateful", False):
        return "it has recurrent layers, whose state cannot be cut into blocks"
    return None


def _other_layers(config: PreTrainedConfig, _: int) -> str | None:
    other = [kind for kind in dict.fromkeys(_layer_types(config)) if kind not in _PLAIN_LAYER_TYPES]
    if other:
        return f"its layers include {', '.join(other)}, which is not causal attention over the whole context"
    return None


def _sliding_window(config: PreTrainedConfig, max_model_len: int) -> str | None:
    window = getattr(config, "sliding_window", None)
    if not window:
        return None
    layer_types = _layer_types(config)
    used = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    return refuse_narrow_window(window, max_model_len) if used else None


def _attention_soft_cap(config: PreTrainedConfig, _: int) -> str | None:
    cap = getattr(config, "attn_logit_softcapping", None)
    return f"its attention scores are soft-capped at {cap}" if cap else None


def _moving_rope(config: PreTrainedConfig, _: int) -> str | None:
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _MOVING_ROPE_TYPES:
            return f"its RoPE ({rope_type}) depends on the longest position in the batch"
    return None


def _position_bias(config: PreTrainedConfig, _: int) -> str | None:
    alibi = getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi"
    return "its attention adds a bias by distance (ALiBi)" if alibi else None


def _latent_attention(config: PreTrainedConfig, _: int) -> str | None:
    return "it has multi-head latent attention" if getattr(config, "kv_lora_rank", None) else None


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])


def _rope_types(rope_parameters: Any) -> Iterator[str]:
    """Of a flat table, or of one table per layer type."""
    if not isinstance(rope_parameters, dict):
        return
    if "rope_type" in rope_parameters:
        yield rope_parameters["rope_type"]
    for value in rope_parameters.values():
        yield from _rope_types(value)


_RULES: tuple[Callable[[PreTrainedConfig, int], str | None], ...] = (
    _encoder_decoder,
    _recurrent,
    _other_layers,
    _latent_attention,
    _attention_soft_cap,
    _sliding_window,
    _moving_rope,
    _position_bias,
)
