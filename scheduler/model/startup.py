"""From an `EngineConfig` to a runner that serves: everything that happens once, before READY.

What must live here: the order of starting up, and the steps run only to check, to measure and to warm up. What must
not: anything a served step does (`model_runner.py`).

The order: weights; the backend's compilation; the self-check, which compares our logits, computed in chunks beside a
neighbour from paged memory, with those of the same modules under transformers' own attention; the memory profile,
which is the largest step really run, or what is remembered of it; a warm-up of the shapes that serving begins with; the
KV pool from what is left; a probe of the whole.

It is cut in two, for a standby waits in the middle. `prepare` does what may be done beside a serving engine: on a CPU
all but the pool, on a GPU the reading of weights into host memory, for a standby there must hold no device memory.
`PreparedModel.activate` does the rest. How much memory is free is asked there, at the last moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from scheduler.config import EngineConfig
from scheduler.core.output import NewSequence, StepPlan
from scheduler.errors import StartupError
from scheduler.messages import SamplingParams, StoppingParams
from scheduler.model.attention.base import AttentionBackend
from scheduler.model.attention.registry import choose_backend, preload_backend
from scheduler.model.families import unsupported
from scheduler.model.guided.matcher import CompiledGuides, Guides
from scheduler.model.input_batch import InputBatch
from scheduler.model.kv_cache import PagedKVCache, num_bytes_per_block
from scheduler.model.loader import HostModel, LoadedModel, examine, load_weights, use_threads
from scheduler.model.memory import (
    PoolRequest,
    available_device_bytes,
    decide_num_kv_blocks,
    measure_peak_bytes,
    pool_budget_bytes,
)
from scheduler.model.memory_profile import MemoryProfile, key_of, remembered
from scheduler.model.model_runner import ModelRunner, RunnerInfo
from scheduler.model.paged_attention import SERVING, PagedAttention, attach, set_implementation
from scheduler.model.sampler import LIST_ENTRIES_MAX

logger = logging.getLogger(__name__)

SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
"""Largest difference of a logit allowed, in standard deviations of the logits: far above rounding (1e-5 in float32),
far below what a wrong mask, position or neighbour does (about 1)."""

LIST_ENTRY_BYTES = {"cpu": 64, "cuda": 20}
"""What a token in both lists of a request (allowed tokens and bias) takes of a device's memory: on a CPU its entries
and the step's copy of them, on a GPU their indices and logits while they are applied."""

WARM_UP_SEQS_MAX = 8

_SELF_CHECK_CHUNKS = ((16, 10), (8, 6))
"""Tokens of two sequences in two steps: chunks, neighbours and pages that begin and end inside a step."""


def import_ahead() -> None:
    """Loads what a start with default flags will need and what does not depend on them, beyond this module's imports.

    Starts no threads of OpenMP and makes no context on a GPU.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    preload_backend(device_type)
    if device_type == "cpu":
        from scheduler.model.fused.stack import compiled_functions  # noqa: PLC0415 - brings numba

        compiled_functions()


def prepare(engine_config: EngineConfig, on_progress: Callable[[str], None]) -> PreparedModel:
    """Loads what may be held while another engine serves; `on_progress` hears the name of each stage as it begins.

    Raises ConfigurationError (ModelUnsupportedError among them) or StartupError, each with one clear line.
    """
    num_threads = use_threads(engine_config.num_threads)
    on_progress("weights")
    host_model = load_weights(engine_config)
    prepared = PreparedModel(engine_config, host_model, num_threads)
    if host_model.device_type == "cpu":
        prepared.settle(None, on_progress)
    return prepared


class PreparedModel:
    """A model that lacks its KV pool, and on a GPU everything else that is on the device."""

    def __init__(self, engine_config: EngineConfig, host_model: HostModel, num_threads: int) -> None:
        self._config = engine_config
        self._host_model = host_model
        self._num_threads = num_threads
        self._settled: tuple[_Assembly, MemoryProfile] | None = None

    def activate(self, device_index: int | None, on_progress: Callable[[str], None]) -> ModelRunner:
        """Does what is left: a runner that serves. `device_index`: which GPU, None for the first.

        Raises as `prepare` does.
        """
        assembly, profile = self._settled or self.settle(device_index, on_progress)
        on_progress("kv pool")
        num_kv_blocks = _num_kv_blocks(assembly, profile.step_peak_bytes)
        try:
            runner = assembly.runner(
                num_kv_blocks,
                assembly.loaded.max_model_len,
                profile.step_s_per_token,
                CompiledGuides(self._config.model, self._config.revision, assembly.loaded.vocab_size),
            )
        except (RuntimeError, MemoryError):  # torch's out-of-memory errors are RuntimeErrors
            raise StartupError(f"the KV pool of {num_kv_blocks} blocks does not fit into memory") from None
        runner.probe()
        return runner

    def settle(self, device_index: int | None, on_progress: Callable[[str], None]) -> tuple[_Assembly, MemoryProfile]:
        """Everything on the model's device but the pool."""
        loaded = examine(self._host_model, device_index)
        on_progress("compilation")
        backend = _make_backend(self._config, loaded, self._num_threads)
        backend.warm_up()
        assembly = _Assembly(self._config, loaded, backend, PagedAttention(backend, loaded.attention.modules))
        on_progress("self-check")
        _self_check(assembly)
        on_progress("memory profile")
        lengths = _largest_step(self._config, loaded.max_model_len)
        scratch = assembly.runner(sum(-(-length // backend.block_size) for length in lengths), loaded.max_model_len)
        profile = remembered(key_of(self._config, loaded, backend), lambda: _measured_profile(scratch, lengths, loaded))
        on_progress("warm-up")
        scratch.reset()
        _warm_up(scratch)
        self._settled = assembly, profile
        return self._settled


@dataclass(frozen=True, slots=True)
class _Assembly:
    """The parts of a runner that do not depend on the size of its pool."""

    config: EngineConfig
    loaded: LoadedModel
    backend: AttentionBackend
    attention: PagedAttention

    def runner(
        self,
        num_kv_blocks: int,
        max_model_len: int,
        step_s_per_token: float = 0.0,
        guides: Guides | None = None,
    ) -> ModelRunner:
        """A runner with a pool and a batch of its own; weights and attention are shared. Without `guides` all allow
        every token.
        """
        loaded, backend = self.loaded, self.backend
        max_model_len = min(max_model_len, num_kv_blocks * backend.block_size)
        attach(loaded.model, self.attention)
        set_implementation(loaded.model, SERVING)
        return ModelRunner(
            model=loaded.model,
            attention=self.attention,
            kv_cache=PagedKVCache(backend, num_layers=len(loaded.attention.modules), num_blocks=num_kv_blocks),
            batch=InputBatch(
                max_num_seqs=self.config.max_num_seqs,
                max_model_len=max_model_len,
                block_size=backend.block_size,
                vocab_size=loaded.vocab_size,
                guides=guides,
            ),
            info=RunnerInfo(
                model_type=loaded.model_type,
                num_parameters=loaded.num_parameters,
                vocab_size=loaded.vocab_size,
                dtype=str(loaded.dtype).removeprefix("torch."),
                device=str(loaded.device),
                attention_backend=backend.name,
                block_size=backend.block_size,
                num_kv_blocks=num_kv_blocks,
                max_model_len=max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                step_s_per_token=step_s_per_token,
            ),
        )


def _make_backend(config: EngineConfig, loaded: LoadedModel, num_threads: int) -> AttentionBackend:
    shape = loaded.attention
    backend_class = choose_backend(
        config.attention_backend,
        device=loaded.device,
        dtype=loaded.dtype,
        head_dim=shape.head_dim,
        block_size=config.block_size,
    )
    return backend_class(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
        block_size=config.block_size,
        num_threads=num_threads,
    )


# ------------------------------------------------------------------------------------------------------- self-check


def _self_check(assembly: _Assembly) -> None:
    """Raises ModelUnsupportedError if our logits are not those of the model under its own attention.

    Then its layers are replaced by faster ones if they are known (`fuse.py`), and the whole is compared once more.
    """
    loaded, block_size = assembly.loaded, assembly.backend.block_size
    chunks = [
        [min(length, loaded.max_model_len // len(_SELF_CHECK_CHUNKS)) for length in lengths]
        for lengths in _SELF_CHECK_CHUNKS
    ]
    if min(min(lengths) for lengths in chunks) < 1:
        return  # a context of one token has nothing to get wrong
    generator = np.random.default_rng(0)
    token_ids = [generator.integers(loaded.vocab_size, size=sum(lengths)) for lengths in zip(*chunks, strict=True)]
    num_blocks = [-(-len(ids) // block_size) for ids in token_ids]

    def chunked() -> list[torch.Tensor]:
        runner = assembly.runner(sum(num_blocks), loaded.max_model_len)
        return _chunked_logits(runner, token_ids, num_blocks, chunks)

    set_implementation(loaded.model, "eager")
    with torch.inference_mode():
        theirs = [
            loaded.model(input_ids=torch.from_numpy(ids)[None].to(loaded.device), use_cache=False).logits[0].float()
            for ids in token_ids
        ]

    def check() -> None:
        reason = _difference(chunked(), theirs, loaded.dtype)
        if reason is not None:
            raise unsupported(loaded.model.config, f"its logits under paged attention differ from its own {reason}")

    is_fusable = assembly.backend.name == "cpu" and loaded.dtype == torch.float32
    if not (is_fusable and _fuse(assembly, check, lambda: _difference(chunked(), theirs, loaded.dtype))):
        check()


def _fuse(assembly: _Assembly, run_step: Callable[[], None], difference: Callable[[], str | None]) -> bool:
    """Replaces the model's layers if each of them is known, and if the whole model says the same afterwards.

    `run_step` runs the model, and raises what ends the start; `difference` runs it, too, and tells by how much it is
    wrong, if it is. Returns whether the layers were replaced, which implies that `run_step` was called.
    """
    from scheduler.model.fuse import NotFusableError, fuse  # noqa: PLC0415 - brings numba

    loaded = assembly.loaded
    try:
        fusion = fuse(loaded.model, assembly.attention, loaded.attention.modules, run_step)
    except NotFusableError as error:
        reason: str | None = str(error)
    else:
        try:
            reason = difference()
        except Exception as error:  # noqa: BLE001 - a model's own code, which misses something of its layers
            reason = f"({type(error).__name__})"
        if reason is None:
            fusion.commit()
            return True
        fusion.undo()
        reason = f"its logits with its layers replaced are not its own {reason}"
    logger.warning("model family %s runs with its own modules, slower: %s", loaded.model_type, reason)
    return False


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], dtype: torch.dtype) -> str | None:
    """By how much the logits differ, if that is more than rounding."""
    for our_logits, their_logits in zip(ours, theirs, strict=True):
        finite = their_logits.isfinite()
        difference = (our_logits - their_logits)[finite].abs().max()
        limit = SELF_CHECK_TOLERANCE[dtype] * their_logits[finite].std().clamp(min=1e-6)
        if not bool(difference <= limit):
            return f"by {float(difference):.2g}, where {float(limit):.2g} is rounding"
    return None


def _chunked_logits(
    runner: ModelRunner, token_ids: Sequence[np.ndarray], num_blocks: Sequence[int], chunks: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits [tokens, V] of each sequence, computed side by side in the given chunks from shared pages."""
    batch = runner._batch  # noqa: SLF001 - startup is the runner's own first step
    blocks = iter(reversed(range(sum(num_blocks))))  # neither in order nor from 0
    new = [
        _new_sequence(seq_id, ids.tolist(), [next(blocks) for _ in range(count)], _typical_sampling(seq_id))
        for seq_id, (ids, count) in enumerate(zip(token_ids, num_blocks, strict=True))
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in token_ids]
    for step, lengths in enumerate(chunks):
        last = step == len(chunks) - 1
        seq_ids = range(len(token_ids))
        plan = StepPlan(
            step_id=step,
            seq_ids=seq_ids,
            num_scheduled_tokens=lengths,
            sampled_seq_ids=seq_ids if last else (),
            num_batched_tokens=sum(lengths),
            new=new if step == 0 else (),
        )
        batch.apply(plan)
        inputs = batch.build(plan)
        rows = np.arange(sum(lengths))
        # The last step's logits come the way of scored prompts, those before it the way of sampled tokens.
        row = runner.compute_all_logits(inputs) if last else runner.compute_logits(replace(inputs, sampled_rows=rows))
        for parts, part in zip(logits, row.split(list(lengths)), strict=True):
            parts.append(part)
        batch.commit(inputs, [-1] * len(inputs.sampled))
    return [torch.cat(parts) for parts in logits]


# --------------------------------------------------------------------------------------------------- memory profile


def _num_kv_blocks(assembly: _Assembly, step_peak_bytes: int) -> int:
    """Asks how much memory there is, and lets `memory.py` decide."""
    config, loaded, backend = assembly.config, assembly.loaded, assembly.backend
    blocks_per_seq_max = -(-loaded.max_model_len // backend.block_size)
    request = PoolRequest(
        num_bytes_per_block=num_bytes_per_block(backend, len(loaded.attention.modules)),
        num_blocks_useful_max=config.max_num_seqs * blocks_per_seq_max,
        budget_bytes=pool_budget_bytes(config, loaded.device, step_peak_bytes),
        available_bytes=available_device_bytes(loaded.device, step_peak_bytes),
    )
    return decide_num_kv_blocks(config, request)


def _measured_profile(scratch: ModelRunner, lengths: Sequence[int], loaded: LoadedModel) -> MemoryProfile:
    """Runs the largest step, over sequences of these `lengths`, in a runner whose pool holds them.

    Every sequence asks for what takes most memory. Lists over the whole vocabulary are given to as many as keeps the
    start short, and counted for the others.
    """
    listed = max(1, LIST_ENTRIES_MAX // loaded.vocab_size)
    dearest = _dearest_sampling(loaded.vocab_size)
    unlisted = replace(dearest, logit_bias=(), allowed_token_ids=())
    plan = _prefill_plan(
        lengths, scratch.info.block_size, lambda seq: dearest if seq < listed else unlisted, guide=b"any"
    )
    duration_s = 0.0

    def step() -> None:
        nonlocal duration_s
        begun_s = time.perf_counter()
        scratch.execute(plan)
        duration_s = time.perf_counter() - begun_s

    peak_bytes = measure_peak_bytes(step, loaded.device)
    num_unlisted = max(0, len(lengths) - listed)
    return MemoryProfile(
        step_peak_bytes=peak_bytes + num_unlisted * loaded.vocab_size * LIST_ENTRY_BYTES[loaded.device.type],
        step_s_per_token=duration_s / plan.num_batched_tokens,
    )


def _dearest_sampling(vocab_size: int) -> SamplingParams:
    """The options that make the sampler take most memory: each there is, over as many tokens as it can have."""
    return SamplingParams(
        temperature=100.0,
        top_p=0.999,
        top_k=max(1, vocab_size - 1),
        repetition_penalty=1.1,
        logit_bias=tuple((token_id, 1.0) for token_id in range(vocab_size)),
        allowed_token_ids=tuple(range(vocab_size)),
        num_logprobs=20,
        num_prompt_logprobs=20,
    )


def _largest_step(config: EngineConfig, max_model_len: int) -> list[int]:
    """Query lengths of a step with all the tokens and all the sequences that a step can have: few long, many short."""
    lengths = [1] * config.max_num_seqs
    left = config.max_num_batched_tokens - config.max_num_seqs
    for seq in range(config.max_num_seqs):
        added = min(left, max_model_len - 1)
        lengths[seq] += added
        left -= added
    return lengths


def _warm_up(runner: ModelRunner) -> None:
    """A prefill and a decode, of one sequence and of several, so that no first request pays for first times."""
    info = runner.info
    if info.max_model_len < 2:
        return
    # On a GPU kernels depend on the batch's size, and the allocator grows with it; on a CPU a few sequences do.
    num_seqs_max = info.max_num_seqs if info.device.startswith("cuda") else min(WARM_UP_SEQS_MAX, info.max_num_seqs)
    for num_seqs in {1, num_seqs_max}:
        seq_ids = range(num_seqs)
        runner.execute(_prefill_plan([1] * num_seqs, info.block_size))
        runner.execute(
            StepPlan(
                step_id=0,
                seq_ids=seq_ids,
                num_scheduled_tokens=[1] * num_seqs,
                sampled_seq_ids=seq_ids,
                num_batched_tokens=num_seqs,
                new_block_ids={} if info.block_size > 1 else {seq: [seq] for seq in seq_ids},
            )
        )
        runner.execute(StepPlan(0, (), (), (), 0, finished_seq_ids=seq_ids))


def _typical_sampling(_seq: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=1)


def _prefill_plan(
    lengths: Sequence[int],
    block_size: int,
    sampling_of: Callable[[int], SamplingParams] = _typical_sampling,
    guide: bytes = b"",
) -> StepPlan:
    """Sequences of these lengths at once, all of them sampled."""
    ends = np.cumsum([-(-length // block_size) for length in lengths]).tolist()
    return StepPlan(
        step_id=0,
        seq_ids=range(len(lengths)),
        num_scheduled_tokens=lengths,
        sampled_seq_ids=range(len(lengths)),
        num_batched_tokens=sum(lengths),
        new=[
            _new_sequence(seq, [0] * length, range(start, end), sampling_of(seq), guide)
            for seq, (length, start, end) in enumerate(zip(lengths, [0, *ends], ends, strict=False))
        ],
    )


def _new_sequence(
    seq_id: int, token_ids: Sequence[int], block_ids: Sequence[int], sampling: SamplingParams, guide: bytes = b""
) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        stopping=StoppingParams(max_tokens=1),
        block_ids=block_ids,
        num_computed_tokens=0,
        guide=guide,
    )
