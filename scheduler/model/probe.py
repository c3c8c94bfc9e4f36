"""Watches a freshly loaded model run once, to learn its attention's shape and to refuse what the engine cannot honour.

What must live here: the probing forward pass and the checks of what it saw. What must not: rules that a configuration
alone decides (`families.py`), or anything that serves.

The engine takes over a model's attention and nothing else. So the probe asks whether that is possible: does every
layer call the registered function exactly once; are all layers of one shape; is the mask the model would have liked
to have the causal one, at every distance that a context can have; does it hand over anything else that would change
the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface

from scheduler.model.families import refuse_narrow_window, text_config, unsupported
from scheduler.model.paged_attention import PROBING, attach, set_implementation

_NUM_PROBE_TOKENS = 5
_HARMLESS_OPTIONS = {
    # What a model passes through to every attention function and no causal one makes use of.
    "cache_position",
    "is_causal",  # checked on the module
    "output_attentions",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of a model, the same in every layer."""

    modules: tuple[nn.Module, ...]
    """The attention modules, in the order in which a forward pass calls them."""
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    options: dict[str, Any]


class _AttentionProbe:
    """Stands in for the engine's attention: writes down each call and answers it densely."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.mask_functions: list[MaskFunction] = []

    def note_mask(self, *, mask_function: MaskFunction, **_: Any) -> None:
        """transformers' mask interface: no mask is made."""
        self.mask_functions.append(mask_function)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `paged_attention.AttendsForModule`."""
        self.calls.append(_Call(module, query.shape[1], key.shape[1], query.shape[2], value.shape[2], dict(options)))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return output[0].transpose(0, 1)


def probe_attention(model: Any, max_model_len: int) -> AttentionShape:
    """Runs the model, loaded with attention implementation PROBING, over one short row; returns what it saw.

    Raises ModelUnsupportedError with the first thing that the engine could not honour.
    """
    config = model.config
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise unsupported(config, "its forward pass cannot be told for which positions to compute logits")
    probe = _AttentionProbe()
    AttentionMaskInterface.register(PROBING, probe.note_mask)
    set_implementation(model, PROBING)
    attach(model, probe)
    positions = torch.arange(min(_NUM_PROBE_TOKENS, max_model_len), device=model.device)[None]
    try:
        with torch.inference_mode():
            model(
                input_ids=positions % model.config.get_text_config(decoder=True).vocab_size,
                position_ids=positions,
                use_cache=False,
            )
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is a reason to refuse it
        message = str(error).splitlines()[0] if str(error) else ""
        raise unsupported(config, f"it cannot run over a flat row ({type(error).__name__}: {message})") from None
    reason = (
        _calls_reason(probe.calls, text_config(config).num_hidden_layers)
        or _options_reason(probe.calls, max_model_len)
        or _masks_reason(probe.mask_functions, max_model_len)
    )
    if reason is not None:
        raise unsupported(config, reason)
    first = probe.calls[0]
    return AttentionShape(
        modules=tuple(call.module for call in probe.calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
    )


def _calls_reason(calls: list[_Call], num_layers: int) -> str | None:
    if not calls:
        return "its attention does not go through transformers' attention interface"
    if len({id(call.module) for call in calls}) != len(calls):
        return "a layer attends more than once in one forward pass"
    if len(calls) != num_layers:
        return f"{len(calls)} of its modules attend, but it has {num_layers} layers"
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        return "its layers differ in their number of heads or the size of a head"
    if any(call.head_dim != call.value_head_dim for call in calls):
        return "its keys and values differ in the size of a head"
    if not all(getattr(call.module, "is_causal", True) for call in calls):
        return "its attention is not causal"
    return None


def _options_reason(calls: list[_Call], max_model_len: int) -> str | None:
    for call in calls:
        for name, value in call.options.items():
            if name in _HARMLESS_OPTIONS or value is None or value is False:
                continue
            if name == "sliding_window":
                reason = refuse_narrow_window(int(value), max_model_len)
                if reason is not None:
                    return reason
                continue
            return f"its attention wants {name}, which the engine does not know"
    return None


def _masks_reason(mask_functions: list[MaskFunction], max_model_len: int) -> str | None:
    """A mask is a function of (batch, head, query position, key position); it must be the causal one."""
    # All short distances, then ever longer ones: a window or a chunk of any size shows at one of them.
    steps = [1 << exponent for exponent in range(max_model_len.bit_length())]
    near = range(min(max_model_len, 16))
    sample = sorted({*near, *(s for s in steps if s < max_model_len), *(s - 1 for s in steps), max_model_len - 1})
    positions = torch.tensor(sample)
    query, key = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.long)
    for mask_function in mask_functions:
        try:
            visible = torch.as_tensor(mask_function(zero, zero, query, key)).expand(len(sample), len(sample))
        except Exception:  # noqa: BLE001 - a mask made of something else than positions
            return "its attention mask depends on more than positions"
        if not torch.equal(visible.bool(), key <= query):
            return "its attention mask is not the causal one"
    return None
