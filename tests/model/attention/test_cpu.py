"""The cpu backend: same bits in any company, calls that do not grow with the batch, compilation that is kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.model.attention import cpu, cpu_kernel
from scheduler.model.attention.cpu import CpuBackend
from tests.model.attention.steps import Step, make_step
from tests.model.attention.tracing import trace

SHAPE = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
CPU = torch.device("cpu")


def make_cpu(dtype: torch.dtype = torch.float32, **options: Any) -> CpuBackend:
    return CpuBackend(**(SHAPE | options), dtype=dtype, device=CPU)


def one_sequence(step: Step, seq: int) -> Step:
    """The step with that sequence alone."""
    starts = np.cumsum([0, *step.query_lens])
    rows = slice(int(starts[seq]), int(starts[seq + 1]))
    return Step(
        query_lens=step.query_lens[seq : seq + 1],
        context_lens=step.context_lens[seq : seq + 1],
        block_table=step.block_table[seq : seq + 1],
        slots=step.slots[rows],
        num_blocks=step.num_blocks,
        block_size=step.block_size,
        query=step.query[rows],
        key=step.key[rows],
        value=step.value[rows],
        pool_keys=step.pool_keys,
        pool_values=step.pool_values,
        scale=step.scale,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    """Whatever else is in the batch, and on one thread, two or three."""
    lens = [(1, 700), (33, 100), (1, 1), (64, 64), (1, 257), (5, 300)] * 3
    step = make_step(lens, **SHAPE, dtype=dtype, block_size=16)
    together = [step.run(make_cpu(dtype, num_threads=n))[0] for n in (1, 2, 3)]
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    starts = np.cumsum([0, *step.query_lens])
    backend = make_cpu(dtype)
    for seq in range(6):
        alone, _ = one_sequence(step, seq).run(backend)
        assert torch.equal(alone, together[0][starts[seq] : starts[seq + 1]])


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(block_size: int) -> None:
    """A prompt in one chunk, in chunks of any size, and token by token, in blocks of any size: the same bits. So does
    a sequence that was preempted and computed again."""
    whole = make_step([(150, 150)], **SHAPE, dtype=torch.float32, block_size=block_size)
    expected, _ = make_step([(150, 150)], **SHAPE, dtype=torch.float32, block_size=16).run(make_cpu())
    backend = make_cpu(block_size=block_size)
    for sizes in ([150], [50, 50, 50], [1] * 150, [64, 1, 85], [149, 1]):
        cache = backend.allocate_layer(whole.num_blocks)
        done, outputs = 0, []
        for size in sizes:
            rows = slice(done, done + size)
            done += size
            metadata = backend.build_metadata(
                query_lens=np.array([size], dtype=np.int32),
                context_lens=np.array([done], dtype=np.int32),
                block_table=whole.block_table,
                slot_mapping=whole.slots[rows],
            )
            tensors = (tensor[rows] for tensor in (whole.query, whole.key, whole.value))
            outputs.append(backend.forward(*tensors, cache, metadata, whole.scale))
        assert torch.equal(torch.cat(outputs), expected), sizes


@pytest.mark.parametrize("query_len", [1, 20])
def test_calls_do_not_grow_with_the_batch(query_len: int) -> None:
    """A layer of 64 sequences runs exactly the operators and functions that a layer of 2 runs, in which the compiled
    kernels are entered twice: once to write keys and values, once to attend. There is no loop over sequences."""
    backend = make_cpu()
    traces = []
    for batch in (2, 64):
        step = make_step([(query_len, 100)] * batch, **SHAPE, dtype=torch.float32, block_size=16)
        cache, metadata = step.prepare(backend)
        traces.append(
            trace(lambda s=step, c=cache, m=metadata: backend.forward(s.query, s.key, s.value, c, m, s.scale))
        )
    assert traces[0] == traces[1]
    operators, functions = traces[0]
    assert [name for name in operators if name.startswith("aten::")] == ["aten::empty"]
    assert functions.count("run_parallel") == 2


def test_threads_are_those_of_torch() -> None:
    """The parallel region is entered in the library that torch loaded, and torch's number of threads stays as it is."""
    before = torch.get_num_threads()
    make_cpu(num_threads=3).warm_up()
    assert torch.get_num_threads() == before
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
        assert len(loaded) == 1, loaded


def test_every_item_is_done_once_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's OpenMP library the work is done on one thread, with the same result."""
    step = make_step([(1, 700), (70, 100)], **SHAPE, dtype=torch.float32, block_size=16)
    expected, _ = step.run(make_cpu(num_threads=2))
    monkeypatch.setattr(cpu, "_gomp_parallel", lambda: None)
    output, _ = step.run(make_cpu(num_threads=2))
    assert torch.equal(output, expected)


def test_work_items_cover_each_query_once() -> None:
    """For every KV head the items of a sequence are its queries, cut without gap or overlap, the dearest first."""
    backend = make_cpu()
    query_lens = np.array([1, 33, 16, 100], dtype=np.int32)
    context_lens = np.array([900, 33, 500, 164], dtype=np.int32)
    items, num_scores = backend._cut(query_lens, context_lens)
    seen = {(seq, head, first + i) for seq, head, first, count in items.tolist() for i in range(count)}
    assert seen == {(s, h, q) for s, length in enumerate(query_lens) for h in range(3) for q in range(length)}
    assert items[:, 3].sum() == 3 * query_lens.sum()
    costs = items[:, 3] * (context_lens - query_lens)[items[:, 0]] + items[:, 3] * (items[:, 2] + items[:, 3])
    assert list(costs) == sorted(costs, reverse=True)
    assert num_scores * 3 == costs.sum()
    assert items[:, 3].max() * 3 <= cpu_kernel.ITEM_ROWS_MAX


def test_kernels_are_kept_and_a_damaged_cache_is_thrown_away(empty_kernel_cache: Path) -> None:
    """A second start takes the machine code from the cache folder, numba compiles nothing. Files cut short by a crash
    or a full disk cost a compilation, not a start."""
    cpu.compiled_kernels(torch.float32)
    kept = [*empty_kernel_cache.rglob("*.nbc"), *empty_kernel_cache.rglob("*.nbi")]
    assert len(kept) == 4
    cpu.compiled_kernels.cache_clear()
    kernels = cpu.compiled_kernels(torch.float32)
    assert [function.cache_hits for function in kernels.compiled] == [1, 1]

    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    cpu.compiled_kernels.cache_clear()
    step = make_step([(1, 20)], **SHAPE, dtype=torch.float32, block_size=16)
    output, _ = step.run(make_cpu())
    assert bool(output.isfinite().all())
    assert not list(empty_kernel_cache.rglob("*.nb?"))


def test_an_unwritable_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder cannot be made, kernels are compiled without a cache."""
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("EMBERLINE_CACHE", str(blocked))
    assert cpu._cache_directory() is None
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
        assert cpu._cache_directory() is None


def test_float16_needs_a_processor_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without F16C the compiled code would crash: it is refused; float32 and bfloat16 are not."""
    monkeypatch.setattr(cpu, "get_host_cpu_features", dict)
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    reasons = {d: CpuBackend.unsupported_reason(device=CPU, dtype=d, head_dim=64) for d in cpu.POOL_KINDS}
    assert "F16C" in (reasons.pop(torch.float16) or "")
    assert set(reasons.values()) == {None}


def test_importing_the_registry_imports_no_kernel_library() -> None:
    """numba and flash-attn are imported when their backend is chosen, not before."""
    code = (
        "import sys, scheduler.model.attention.registry, scheduler.model.kv_cache;"
        "print([m for m in ('numba', 'flash_attn', 'llvmlite') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
