"""Recognises decoder layers whose computation the fused kernels know, and puts them in the layers' place.

What must live here: what a layer must consist of, the checks against the modules that are replaced, the replacement and
its undoing. What must not: kernels and their memory (`fused/`), anything that serves.

What counts is the shape of modules, never a model's name. Structure only proposes: a layer with two norms, an attention
of four projections and a gated MLP may still add something in its code. So whatever a module computes is found out by
running it: a norm's gain by a probe (Gemma's is one more than its weight), an activation by its values, and each whole
layer, once packed, by what it made of the tokens of a check, in the same pages. A layer that differs beyond rounding,
or whose parts are not all accounted for, means that the model runs unfused, with one line in the log that says why.

It is all layers or none: models hand each of their layers something by its number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scheduler.model.attention.base import AttentionBackend, AttentionMetadata, LayerCache
from scheduler.model.attention.cpu import CpuBackend
from scheduler.model.fused.stack import FusedStack, LayerParts, PackedLinear
from scheduler.model.fused.vectors import GELU_TANH, SILU
from scheduler.model.memory import release_file_pages
from scheduler.model.paged_attention import PagedAttention

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference allowed, in standard deviations of what a module adds or gives: far above rounding, far below what
a forgotten factor or another rotation does."""
_PROBE_TOLERANCE = 1e-5
_NUM_PROBE_ROWS = 4

_ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: nn.functional.silu,
    GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
}


class NotFusableError(Exception):
    """Why a model keeps its own modules, in one line."""


@dataclass(slots=True)
class _LayerCall:
    """One call of a decoder layer in an ordinary step."""

    hidden_states: torch.Tensor
    position_embeddings: tuple[torch.Tensor, torch.Tensor]
    output: torch.Tensor


@dataclass(slots=True)
class _Trace:
    """What a step without fusion showed."""

    calls: list[_LayerCall] = field(default_factory=list)
    layer_caches: Sequence[LayerCache] = ()
    metadata: AttentionMetadata | None = None
    error: str | None = None


class Fusion:
    """A model whose layers have been replaced; for a while the old ones are still there."""

    def __init__(self, model: Any, place: _Place, stack: FusedStack, head: PackedLinear | None) -> None:
        self._model = model
        self._place = place
        self._old_head: nn.Module | None = model.get_output_embeddings()
        setattr(place.parent, place.name, nn.ModuleList([stack]))
        self._replaces_head = head is not None
        if head is not None:
            model.set_output_embeddings(head)

    def undo(self) -> None:
        """The model is as it was."""
        setattr(self._place.parent, self._place.name, self._place.layers)
        if self._replaces_head:
            self._model.set_output_embeddings(self._old_head)

    def commit(self) -> None:
        """Gives the old layers' weights back, and the pages of files that they were read from."""
        addresses = [parameter.data_ptr() for parameter in self._place.layers.parameters()]
        for module in self._place.layers.modules():
            module._parameters.clear()  # noqa: SLF001 - attention modules live on as names of layers
        self._old_head = None
        release_file_pages(addresses)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model keeps its decoder layers."""

    parent: nn.Module
    name: str
    layers: nn.ModuleList


def fuse(
    model: Any, attention: PagedAttention, attention_modules: Sequence[nn.Module], run_step: Callable[[], object]
) -> Fusion:
    """Replaces the decoder layers of `model`, and its vocabulary projection where that is a plain linear layer.

    `attention` is attached to the model; `run_step` runs it over some tokens. Raises NotFusableError, the model being
    as it was.
    """
    backend = attention.backend
    if not isinstance(backend, CpuBackend) or backend.dtype != torch.float32:
        raise NotFusableError("only float32 on the cpu backend is fused")
    place = _place_of(model, attention_modules)
    try:
        parts = [_parts_of(layer, module) for layer, module in zip(place.layers, attention_modules, strict=True)]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A model's own code, called in a way that it does not know.
        raise NotFusableError(f"its modules cannot be tried one by one ({type(error).__name__})") from None
    _check_shapes(parts, backend)
    scales = [_scale_of(module, backend.head_dim) for module in attention_modules]
    with torch.inference_mode():
        trace = _traced(place.layers, attention, run_step)
        stack = FusedStack(parts, scales, backend)
        _check_layers(stack, trace)
        head = _packed_head(model.get_output_embeddings(), backend.num_threads)
    for name, value in vars(place.layers[0]).items():
        # What models ask a layer for in passing (`attention_type`).
        if not name.startswith("_") and name not in vars(stack):
            setattr(stack, name, value)
    return Fusion(model, place, stack.eval(), head)


# ---------------------------------------------------------------------------------------------------------- structure


def _place_of(model: Any, attention_modules: Sequence[nn.Module]) -> _Place:
    """The list whose members own the attention modules, in their order."""
    for parent in model.modules():
        for name, layers in parent.named_children():
            if (
                isinstance(layers, nn.ModuleList)
                and len(layers) == len(attention_modules)
                and all(m in set(layer.children()) for m, layer in zip(attention_modules, layers, strict=True))
            ):
                return _Place(parent, name, layers)
    raise NotFusableError("it keeps its layers in no list that the engine recognises")


def _parts_of(layer: nn.Module, attention: nn.Module) -> LayerParts:
    """A layer's parts, all of them found out or accounted for; raises NotFusableError."""
    children = {name: child for name, child in layer.named_children() if _computes(child)}
    (attention_name,) = (name for name, child in children.items() if child is attention)
    expected = {"input_layernorm", "post_attention_layernorm", "mlp", attention_name}
    if set(children) != expected:
        raise NotFusableError(f"a layer of it consists of {', '.join(sorted(children))}")
    mlp = children["mlp"]
    input_gain, input_eps = _probed_norm(children["input_layernorm"], _width(children["input_layernorm"]))
    post_gain, post_eps = _probed_norm(children["post_attention_layernorm"], len(input_gain))
    projections = {name: child for name, child in attention.named_children() if _computes(child)}
    q_gain, k_gain, qk_eps = _probed_head_norms(projections)
    packed = set(projections) == {"qkv_proj", "o_proj"}
    if not packed and set(projections) != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        raise NotFusableError(f"its attention consists of {', '.join(sorted(projections))}")
    qkv = [_linear(projections[name]) for name in (["qkv_proj"] if packed else ["q_proj", "k_proj", "v_proj"])]
    biases: list[Any] = [linear.bias for linear in qkv]  # annotated as never None, and often it is
    qkv_bias = [bias for bias in biases if bias is not None]
    if len(qkv_bias) not in {0, len(qkv)}:
        raise NotFusableError("only some of its q, k and v have a bias")
    (gate, gate_bias), (up, up_bias), down = _mlp_parts(mlp)
    out = _linear(projections["o_proj"])
    parts = LayerParts(
        input_gain=input_gain,
        input_eps=input_eps,
        post_gain=post_gain,
        post_eps=post_eps,
        q_gain=q_gain,
        k_gain=k_gain,
        qk_eps=qk_eps,
        qkv=tuple(linear.weight for linear in qkv),
        qkv_bias=tuple(qkv_bias),
        out=out.weight,
        out_bias=out.bias,
        gate=gate,
        up=up,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down=down.weight,
        down_bias=down.bias,
        activation=_probed_activation(mlp),
    )
    known = {*qkv, out, down, *mlp.children(), *attention.children()}
    known |= {children["input_layernorm"], children["post_attention_layernorm"]}
    accounted = {id(parameter) for module in known for parameter in module.parameters()}
    if any(id(tensor) not in accounted for tensor in [*layer.parameters(), *layer.buffers()]):
        raise NotFusableError("a layer of it has weights besides its projections and norms")
    return parts


def _computes(module: nn.Module) -> bool:
    """Whether a module can change what passes through it: dropout does not where nothing is trained, and what has no
    weights shows in what the whole layer computes.
    """
    return any(True for _ in module.parameters())


def _mlp_parts(mlp: nn.Module) -> tuple[tuple[torch.Tensor, Any], tuple[torch.Tensor, Any], nn.Linear]:
    """(gate, its bias), (up, its bias), down; gate and up may be one projection, in this order."""
    children = {name: child for name, child in mlp.named_children() if _computes(child)}
    if set(children) == {"gate_proj", "up_proj", "down_proj"}:
        gate, up = _linear(children["gate_proj"]), _linear(children["up_proj"])
        biases: list[Any] = [gate.bias, up.bias]
        if biases.count(None) == 1:
            raise NotFusableError("only one of its gate and up projections has a bias")
        return (gate.weight, gate.bias), (up.weight, up.bias), _linear(children["down_proj"])
    if set(children) == {"gate_up_proj", "down_proj"}:
        both = _linear(children["gate_up_proj"])
        gate_weight, up_weight = both.weight.chunk(2)
        bias: Any = both.bias
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        return (gate_weight, gate_bias), (up_weight, up_bias), _linear(children["down_proj"])
    raise NotFusableError(f"its MLP consists of {', '.join(sorted(children))}")


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:  # a subclass computes something else
        raise NotFusableError(f"a projection of it is a {type(module).__name__}")
    return module


def _scale_of(attention: nn.Module, head_dim: int) -> float:
    """Of its scores; where a model keeps it elsewhere, the check of its layers shows."""
    scale = getattr(attention, "scaling", None)
    return float(scale) if isinstance(scale, int | float) else float(head_dim**-0.5)


def _check_shapes(parts: Sequence[LayerParts], backend: AttentionBackend) -> None:
    """Every layer like the first, and the first like its attention."""
    shapes = {
        (
            len(layer.input_gain),
            sum(len(weight) for weight in layer.qkv),
            tuple(layer.out.shape),
            tuple(layer.gate.shape),
            tuple(layer.down.shape),
        )
        for layer in parts
    }
    if len(shapes) > 1:
        raise NotFusableError("its layers differ in size")
    (hidden_size, qkv_size, out_shape, gate_shape, down_shape) = shapes.pop()
    q_size = backend.num_heads * backend.head_dim
    if qkv_size != q_size + 2 * backend.num_kv_heads * backend.head_dim or out_shape != (hidden_size, q_size):
        raise NotFusableError("its projections are not those of its heads")
    if down_shape != gate_shape[::-1] or gate_shape[1] != hidden_size:
        raise NotFusableError("the projections of its MLP do not fit each other")
    for layer in parts:
        for gain in (layer.q_gain, layer.k_gain):
            if gain is not None and (len(gain) != backend.head_dim or backend.head_dim % 16):
                raise NotFusableError("the norms of its queries and keys are not over one head")


# ----------------------------------------------------------------------------------------------------------- probing


def _width(norm: nn.Module) -> int:
    parameters = list(norm.parameters())
    if len(parameters) != 1 or parameters[0].ndim != 1:
        raise NotFusableError(f"a norm of it ({type(norm).__name__}) has other weights than one gain")
    return len(parameters[0])


def _probed_norm(norm: nn.Module, width: int) -> tuple[torch.Tensor, float]:
    """The gain and the epsilon of an RMSNorm, whatever it makes its gain of; raises NotFusableError if it is none."""
    if _width(norm) != width:
        raise NotFusableError("its norms differ in size")
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_PROBE_ROWS, width, generator=generator) + 0.5
    rows *= torch.tensor([[1.0], [30.0], [max(eps, 1e-12) ** 0.5], [1.0]])  # the third one shows epsilon
    with torch.inference_mode():
        output = norm(rows[None])[0]
        scaled = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        gain = output[0] / scaled[0]
        error = (gain * scaled - output).abs().max()
    if not bool(error <= _PROBE_TOLERANCE * output.abs().max()):
        raise NotFusableError(f"a norm of it ({type(norm).__name__}) is no RMSNorm")
    return gain, eps


def _probed_head_norms(projections: dict[str, nn.Module]) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Gains of the norms of queries and keys, which are taken out of `projections`, and their epsilon."""
    names = {"q_norm", "k_norm"} & set(projections)
    if not names:
        return None, None, 0.0
    if len(names) == 1:
        raise NotFusableError("only one of its queries and keys has a norm")
    q_norm, k_norm = projections.pop("q_norm"), projections.pop("k_norm")
    q_gain, q_eps = _probed_norm(q_norm, _width(q_norm))
    k_gain, k_eps = _probed_norm(k_norm, _width(k_norm))
    if q_eps != k_eps:
        raise NotFusableError("the norms of its queries and keys differ")
    return q_gain, k_gain, q_eps


def _probed_activation(mlp: nn.Module) -> int:
    """Which of the known activations an MLP has."""
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    values = torch.linspace(-12, 12, 97)
    if callable(function):
        with torch.inference_mode():
            found = function(values)
        for activation, known in _ACTIVATIONS.items():
            if torch.allclose(found, known(values), rtol=1e-5, atol=1e-6):
                return activation
    raise NotFusableError("the activation of its MLP is not one that the engine fuses")


# ------------------------------------------------------------------------------------------------------------- checks


def _traced(layers: nn.ModuleList, attention: PagedAttention, run_step: Callable[[], object]) -> _Trace:
    """Runs an ordinary step and notes what goes into each layer and what comes out."""
    trace = _Trace()

    def note(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if len(trace.calls) == len(layers):
            return  # a later step
        hidden_states = args[0] if args else None
        cos_and_sin = kwargs.get("position_embeddings")
        if not (isinstance(output, torch.Tensor) and isinstance(hidden_states, torch.Tensor)):
            trace.error = "its layers do not take and give hidden states alone"
        elif not (
            isinstance(cos_and_sin, tuple)
            and len(cos_and_sin) == 2
            and all(t.ndim == 3 and t.shape[:2] == hidden_states.shape[:2] and t.shape[2] % 2 == 0 for t in cos_and_sin)
        ):
            trace.error = "its layers are not handed one rotary embedding"
        elif trace.calls and trace.calls[0].position_embeddings[0] is not cos_and_sin[0]:
            trace.error = "its layers differ in their rotary embedding"
        else:
            trace.layer_caches, trace.metadata = attention.step
            trace.calls.append(_LayerCall(hidden_states.clone(), cos_and_sin, output.clone()))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        run_step()
    finally:
        for hook in hooks:
            hook.remove()
    if trace.error is None and len(trace.calls) != len(layers):
        trace.error = "it does not call each of its layers once"
    if trace.error is not None:
        raise NotFusableError(trace.error)
    return trace


def _check_layers(stack: FusedStack, trace: _Trace) -> None:
    """Each layer by itself, on what it was given in the traced step."""
    assert trace.metadata is not None
    for number, call in enumerate(trace.calls):
        layers = range(number, number + 1)
        output = stack.run(call.hidden_states, call.position_embeddings, trace.layer_caches, trace.metadata, layers)
        _check_same(f"layer {number}", output - call.hidden_states, call.output - call.hidden_states)


def _packed_head(head: nn.Module | None, num_threads: int) -> PackedLinear | None:
    """A faster vocabulary projection, or None where it is not a plain linear layer."""
    if type(head) is not nn.Linear:
        return None
    packed = PackedLinear(head.weight, head.bias, num_threads)
    rows = torch.randn(1, _NUM_PROBE_ROWS, head.in_features, generator=torch.Generator().manual_seed(0))
    _check_same("vocabulary projection", packed(rows), head(rows))
    return packed


def _check_same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference, limit = (ours - theirs).abs().max(), TOLERANCE * theirs.std()
    if not bool(difference <= limit):
        raise NotFusableError(
            f"its {name}, fused, differs from its own by {float(difference):.2g}, where {float(limit):.2g} is rounding"
        )
