"""The flash backend's calls, checked against the real signatures by stand-ins; no GPU takes part in this file."""

from __future__ import annotations

import inspect
import json
import subprocess

import pytest
import torch
from torch.nn.attention import varlen

from scheduler.model.attention import flash
from scheduler.model.attention.flash import FlashBackend, FlashMetadata
from tests.model.attention.conftest import MakeBackend
from tests.model.attention.flash_stand_in import (
    FLASH_ATTN,
    FlashAttnStandIn,
    RefusedError,
    TorchVarlenStandIn,
)
from tests.model.attention.make_flash_attn_signatures import OUTPUT, VERSION, read_signatures
from tests.model.attention.steps import make_step
from tests.model.attention.tracing import trace

SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
BF16 = torch.bfloat16


@pytest.mark.slow
def test_signatures_are_those_of_the_pinned_source_distribution() -> None:
    """The committed signatures are what the generator reads from flash-attn's source today."""
    try:
        fresh = read_signatures()
    except subprocess.SubprocessError as error:
        pytest.skip(f"flash-attn's source distribution cannot be had: {error}")
    assert json.loads(OUTPUT.read_text()) == fresh


def test_signatures_name_the_release_they_are_from() -> None:
    """The generator was run after its version was last changed."""
    assert FLASH_ATTN["version"] == VERSION


@pytest.mark.parametrize("which", ["flash_attn_stand_in", "torch_varlen_stand_in"])
def test_a_layer_is_one_attention_call_and_two_writes(
    which: str, request: pytest.FixtureRequest, make_flash: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch, a layer runs the same operators and functions; attention itself is one call."""
    stand_in: FlashAttnStandIn | TorchVarlenStandIn = request.getfixturevalue(which)
    backend = make_flash(**SHAPE, dtype=BF16)
    traces = []
    for batch in (2, 64):
        step = make_step([(1, 300)] * batch, **SHAPE, dtype=BF16, block_size=256)
        cache, metadata = step.prepare(backend)
        calls_before = stand_in.num_calls
        backend.forward(step.query, step.key, step.value, cache, metadata, step.scale)
        assert stand_in.num_calls == calls_before + 1
        with monkeypatch.context() as patch:  # the stand-in loops over sequences; the kernels it stands for do not
            patch.setattr(type(stand_in), "__call__", lambda self, *args, **kwargs: args[0])
            traces.append(
                trace(lambda s=step, c=cache, m=metadata: backend.forward(s.query, s.key, s.value, c, m, s.scale))
            )
    assert traces[0] == traces[1]
    assert traces[0][0].count("aten::index_copy_") == 2


def test_metadata_makes_no_kernel_read_past_a_context(make_flash: MakeBackend) -> None:
    """Entries of a block table past the context are 0, whatever the caller left there."""
    step = make_step([(1, 300), (2, 2), (1, 256)], **SHAPE, dtype=BF16, block_size=256)
    _, metadata = step.prepare(make_flash(**SHAPE, dtype=BF16))
    assert isinstance(metadata, FlashMetadata)
    used = torch.tensor([[True, True, False, False], [True, False, False, False], [True, False, False, False]])
    assert torch.equal(metadata.block_table == torch.from_numpy(step.block_table), used)
    assert bool((metadata.block_table[~used] == 0).all())
    assert metadata.key_start_loc.tolist() == [0, 300, 302, 558]


def test_warm_up_runs_a_decode_and_a_chunk(make_flash: MakeBackend, flash_attn_stand_in: FlashAttnStandIn) -> None:
    make_flash(**SHAPE, dtype=BF16).warm_up()
    assert flash_attn_stand_in.num_calls == 2


def test_limits_of_the_kernels_are_known_before_the_first_step(make_flash: MakeBackend) -> None:
    """What flash-attn would refuse in a step is refused when the backend is made."""
    for options in (
        {"dtype": torch.float32},
        {"dtype": BF16, "head_dim": 264},
        {"dtype": BF16, "head_dim": 60},
        {"dtype": BF16, "block_size": 16},
        {"dtype": BF16, "block_size": 0},
        {"dtype": BF16, "num_heads": 5},
    ):
        with pytest.raises(ValueError, match=r"needs|share"):
            make_flash(**(SHAPE | options))


def test_a_gpu_is_needed() -> None:
    reason = FlashBackend.unsupported_reason(device=torch.device("cpu"), dtype=BF16, head_dim=64)
    assert reason == "needs a CUDA device, not cpu"


def test_a_kernel_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_attn_varlen_func", None)
    monkeypatch.setattr(flash, "varlen", None)
    reason = FlashBackend.unsupported_reason(device=torch.device("cuda"), dtype=BF16, head_dim=64)
    assert reason is not None
    assert "flash-attn" in reason


def test_the_stand_ins_refuse_what_the_kernels_refuse(
    make_flash: MakeBackend, flash_attn_stand_in: FlashAttnStandIn
) -> None:
    """Each broken call fails with the real function's words, or for its name: the stand-in is no rubber stamp."""
    step = make_step([(1, 300), (3, 3)], **SHAPE, dtype=BF16, block_size=256)
    cache, metadata = step.prepare(make_flash(**SHAPE, dtype=BF16))
    assert isinstance(metadata, FlashMetadata)
    good = {
        "q": step.query,
        "k": cache.key,
        "v": cache.value,
        "cu_seqlens_q": metadata.query_start_loc,
        "cu_seqlens_k": metadata.key_start_loc,
        "max_seqlen_q": 3,
        "max_seqlen_k": 300,
        "softmax_scale": 0.1,
        "causal": True,
        "block_table": metadata.block_table,
    }
    flash_attn_stand_in(**good)
    for change, message in (
        ({"q": step.query.float()}, "fp16 and bf16"),
        ({"cu_seqlens_q": metadata.query_start_loc.long()}, "cu_seqlens_q must have dtype int32"),
        ({"block_table": metadata.block_table.long()}, "block_table must have dtype"),
        ({"block_table": metadata.block_table.t().contiguous().t()}, "contiguous last dimension"),
        ({"k": cache.key[:, :16], "v": cache.value[:, :16]}, "divisible by 256"),
        ({"block_table": metadata.block_table + 10_000}, "may load any entry"),
    ):
        with pytest.raises(RefusedError, match=message):
            flash_attn_stand_in(**(good | change))
    with pytest.raises(TypeError, match="seqused_k"):
        flash_attn_stand_in(**good, seqused_k=metadata.context_lens)
    with pytest.raises(AssertionError, match="not causal"):
        flash_attn_stand_in(**(good | {"causal": False}))


def test_torch_still_has_the_call_we_make() -> None:
    """The installed torch's varlen_attn takes every argument that the backend hands it."""
    parameters = inspect.signature(varlen.varlen_attn).parameters
    assert {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"} <= set(parameters)
