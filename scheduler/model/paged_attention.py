"""The joint between transformers' attention modules and an attention backend.

What must live here: the function registered as their attention implementation, and `PagedAttention`, the object it
finds on a module when serving (`probe.py` has another, for a freshly loaded model). What must not: kernels, and any
state that two runners of one process would share.

transformers calls one registered function for every layer of every model. Each module of a loaded model therefore
carries its own runner's object (`attach`), and that object knows the module's layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from scheduler.model.attention.base import AttentionBackend, AttentionMetadata, LayerCache

SERVING = "emberline"
"""Attention implementation of a model that serves. It has no mask function, so transformers builds no mask at all."""
PROBING = "emberline_probe"
"""The same, but `probe.py` registers a mask function, to see which mask a model asks for."""
_ATTRIBUTE = "emberline_attention"


class AttendsForModule(Protocol):
    """What `attach` puts on a model's modules."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """`query` [T, H, D], `key` and `value` [T, KVH, D], strided → [T, H, D]."""


def attach(model: nn.Module, attention: AttendsForModule) -> None:
    """From now on the model's attention modules ask this object."""
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = attention


def attached(module: nn.Module) -> AttendsForModule:
    """What `attach` put on a module."""
    attention: AttendsForModule = getattr(module, _ATTRIBUTE)
    return attention


def set_implementation(model: Any, name: str) -> None:
    """Switches a loaded model to another attention implementation; all modules read it from the shared config."""
    model.config._attn_implementation = name  # noqa: SLF001 - set_attn_implementation() refuses families that do work


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: [1, heads, T, D] each in, [1, T, heads, D] out."""
    attention = attached(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None or dropout:
        options |= {"attention_mask": attention_mask, "dropout": dropout or None}
    output = attention.attend(
        module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale, options
    )
    return output[None], None


AttentionInterface.register(SERVING, _attention_forward)
AttentionInterface.register(PROBING, _attention_forward)


class PagedAttention:
    """Serves: gives each layer's queries, keys and values to the backend, with that layer's pools."""

    def __init__(self, backend: AttentionBackend, modules: Sequence[nn.Module]) -> None:
        """`modules`: the attention modules in the order in which a forward pass calls them."""
        self.backend = backend
        self._layer_of = {module: layer for layer, module in enumerate(modules)}
        self._layer_caches: Sequence[LayerCache] = ()
        self._metadata: AttentionMetadata | None = None

    def begin_step(self, layer_caches: Sequence[LayerCache], metadata: AttentionMetadata) -> None:
        """The pools and the step of the next forward pass."""
        self._layer_caches = layer_caches
        self._metadata = metadata

    def end_step(self) -> None:
        """Holds on to nothing: pools are freed by letting go of their runner."""
        self._layer_caches = ()
        self._metadata = None

    @property
    def step(self) -> tuple[Sequence[LayerCache], AttentionMetadata]:
        """What `begin_step` was given, for a module that attends for several layers at once."""
        assert self._metadata is not None, "a forward pass outside a step"
        return self._layer_caches, self._metadata

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        options: dict[str, Any],  # noqa: ARG002 - the probe has seen that none of them matters
    ) -> torch.Tensor:
        """See `AttendsForModule`."""
        layer_caches, metadata = self.step
        return self.backend.forward(query, key, value, layer_caches[self._layer_of[module]], metadata, scale)
