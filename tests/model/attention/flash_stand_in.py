"""Stand-ins for flash-attn's and torch's varlen kernels: real signatures, every documented limit, right on a CPU.

The signature and the texts of the limits come from flash-attn's source distribution (`flash_attn_signatures.json`) and
from the installed torch; a call that the real function would refuse is refused here with the real function's words.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import varlen

FLASH_ATTN = json.loads(Path(__file__).with_name("flash_attn_signatures.json").read_text())


def signature_of(name: str) -> inspect.Signature:
    """The signature of a function of the pinned flash-attn."""
    parameters = []
    for parameter in FLASH_ATTN["signatures"][name]:
        default = ast.literal_eval(parameter["default"]) if "default" in parameter else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(parameter["name"], kind, default=default))
    return inspect.Signature(parameters)


class RefusedError(RuntimeError):
    """What the real function would have raised."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RefusedError(message)


def documented(condition: bool, message: str) -> None:
    """A limit that flash-attn's own source states in these words."""
    assert message in FLASH_ATTN["checks"], f"flash-attn {FLASH_ATTN['version']} says nothing like {message!r}"
    check(condition, message)


class FlashAttnStandIn:
    """Stands for `flash_attn_varlen_func` of flash-attn 2 and counts its calls."""

    def __init__(self) -> None:
        self.signature = signature_of("flash_attn_varlen_func")
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        assert a["dropout_p"] == 0.0, "inference drops nothing"
        assert a["softcap"] == 0.0
        assert a["alibi_slopes"] is None
        assert a["return_attn_probs"] is False
        assert a["causal"] is True, "the default is not causal"
        assert a["window_size"] == (-1, -1)
        assert a["block_table"] is not None
        assert isinstance(a["softmax_scale"], float)
        check_inputs(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], a["block_table"])
        context_lens = a["cu_seqlens_k"].diff()
        check_lengths(a["cu_seqlens_q"], context_lens, a["max_seqlen_q"], a["max_seqlen_k"], a["block_table"], a["k"])
        return attend(a["q"], a["k"], a["v"], a["cu_seqlens_q"], context_lens, a["block_table"], a["softmax_scale"])


class TorchVarlenStandIn:
    """Stands for `torch.nn.attention.varlen.varlen_attn` and counts its calls."""

    def __init__(self) -> None:
        self.signature = inspect.signature(varlen.varlen_attn)
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        assert a["return_aux"] is None
        assert a["window_size"] == (-1, 0), "(-1, 0) is causal; the default is not"
        assert a["num_splits"] == 1, "more splits make a result depend on its neighbours"
        check(a["block_table"] is not None and a["seqused_k"] is not None, "block_table requires seqused_k")
        num_heads, num_kv_heads = a["query"].shape[1], a["key"].shape[2]
        check(num_heads == num_kv_heads or a["enable_gqa"], "Try setting enable_gqa=True for GQA.")
        check_inputs(a["query"], a["key"], a["value"], a["cu_seq_q"], a["cu_seq_k"], a["block_table"])
        check(a["seqused_k"].dtype == torch.int32, "seqused_k must have dtype int32")
        check(a["seqused_k"].is_contiguous(), "seqused_k must be contiguous")
        check(a["seqused_k"].shape == (a["cu_seq_q"].numel() - 1,), "seqused_k has one entry per sequence")
        check_lengths(a["cu_seq_q"], a["seqused_k"], a["max_q"], a["max_k"], a["block_table"], a["key"])
        return attend(
            a["query"], a["key"], a["value"], a["cu_seq_q"], a["seqused_k"], a["block_table"], float(a["scale"])
        )


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Dtypes, strides and shapes, in the order in which the kernel checks them."""
    documented(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    documented(k.dtype == q.dtype, "query and key must have the same dtype")
    documented(v.dtype == q.dtype, "query and value must have the same dtype")
    documented(cu_seqlens_q.dtype == torch.int32, "cu_seqlens_q must have dtype int32")
    documented(cu_seqlens_k.dtype == torch.int32, "cu_seqlens_k must have dtype int32")
    documented(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    documented(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    for tensor in (q, k, v):
        documented(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous(), "cu_seqlens must be contiguous")
    check(q.dim() == 3 and k.dim() == 4 and v.shape == k.shape, "q is (total_q, heads, dim), k and v are pools")
    num_blocks, block_size, num_kv_heads, head_dim = k.shape
    documented(block_size % 256 == 0, "Paged KV cache block size must be divisible by 256")
    batch_size = cu_seqlens_q.numel() - 1
    documented(batch_size > 0, "batch size must be positive")
    documented(head_dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    documented(head_dim % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    documented(q.shape[1] % num_kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    check(q.shape[2] == head_dim, "q and k have one head_dim")
    check(cu_seqlens_k.shape == (batch_size + 1,), "cu_seqlens_k must have shape (batch_size + 1)")
    check(block_table.dim() == 2 and block_table.shape[0] == batch_size, "block_table has a row per sequence")
    check(bool(((block_table >= 0) & (block_table < num_blocks)).all()), "a kernel may load any entry of its table")


def check_lengths(
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    block_table: torch.Tensor,
    k: torch.Tensor,
) -> None:
    """What no kernel checks and every kernel relies on."""
    query_lens = cu_seqlens_q.diff()
    assert int(cu_seqlens_q[0]) == 0
    assert bool((query_lens > 0).all())
    assert bool((context_lens >= query_lens).all())
    assert type(max_query_len) is int
    assert type(max_context_len) is int
    assert max_query_len == int(query_lens.max()), "the grid is sized by it"
    assert max_context_len == int(context_lens.max())
    assert block_table.shape[1] * k.shape[1] >= max_context_len


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """torch's own attention in float32, a sequence at a time; the mask is aligned to the bottom right."""
    assert int(cu_seqlens_q[-1]) == q.shape[0]
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    for seq, context_len in enumerate(context_lens.tolist()):
        rows = slice(int(cu_seqlens_q[seq]), int(cu_seqlens_q[seq + 1]))
        block_ids = block_table[seq, : -(-context_len // k.shape[1])].long()
        keys = k[block_ids].flatten(0, 1)[:context_len].float().transpose(0, 1)
        values = v[block_ids].flatten(0, 1)[:context_len].float().transpose(0, 1)
        num_queries = rows.stop - rows.start
        mask = torch.ones(num_queries, context_len, dtype=torch.bool).tril(context_len - num_queries)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[rows].float().transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        output[rows] = attended[0].transpose(0, 1).to(q.dtype)
    return output
