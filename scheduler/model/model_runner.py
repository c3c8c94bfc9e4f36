"""Executes one plan: changes → inputs → forward → logits → sample → append. Nothing else advances a sequence here.

What must live here: that walk, and nothing it would do only once. What must not: loading and measuring
(`startup.py`), kernels, decisions about who runs.

The model sees one flat row of tokens, whatever sequences they belong to; their positions go in beside them, and
attention, the only place where tokens meet, is ours (`paged_attention.py`). The vocabulary is projected only at the
positions that are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scheduler.core.output import StepPlan, StepResult
from scheduler.model.input_batch import InputBatch, StepInputs
from scheduler.model.kv_cache import PagedKVCache
from scheduler.model.paged_attention import PagedAttention
from scheduler.model.sampler import sample


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the rest of the engine, and the front end by way of READY, must know of a runner."""

    model_type: str
    num_parameters: int
    vocab_size: int
    """Rows of the vocabulary projection: the bound of every token id."""
    dtype: str
    device: str
    attention_backend: str
    block_size: int
    num_kv_blocks: int
    max_model_len: int
    """Effective: never more than the KV pool holds."""
    max_num_seqs: int
    max_num_batched_tokens: int


class ModelRunner:
    """One model, one KV pool, and the sequences in it."""

    def __init__(
        self, *, model: Any, attention: PagedAttention, kv_cache: PagedKVCache, batch: InputBatch, info: RunnerInfo
    ) -> None:
        """`model`: a causal language model whose modules `attention` is attached to."""
        self.info = info
        self._model = model
        self._attention = attention
        self._kv_cache = kv_cache
        self._batch = batch
        self._device = torch.device(info.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step; `StepPlan` says what it changes and what it computes.

        A plan that breaks the protocol is our bug and raises AssertionError or KeyError before anything is computed.
        """
        self._batch.apply(plan)
        if not plan.seq_ids:
            return StepResult(())
        inputs = self._batch.build(plan)
        logits = self.compute_logits(inputs)
        if len(inputs.sampled) == 0:
            self._batch.commit(inputs, ())
            return StepResult(())
        with _single_threaded():
            sampled = sample(logits, self._batch.sampling_rows(inputs))
        self._batch.commit(inputs, sampled.token_ids)
        seq_ids = plan.sampled_seq_ids
        return StepResult(
            sampled_token_ids=sampled.token_ids,
            logprobs={seq_ids[row]: logprobs for row, logprobs in sampled.logprobs.items()},
            non_finite_seq_ids=[seq_ids[row] for row, token_id in enumerate(sampled.token_ids) if token_id < 0],
        )

    @torch.inference_mode()
    def compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        """One forward pass: writes the step's keys and values, returns float32 logits [S, V] of the sampled rows."""
        self._attention.begin_step(
            self._kv_cache.layers,
            self._attention.backend.build_metadata(
                query_lens=inputs.query_lens,
                context_lens=inputs.context_lens,
                block_table=inputs.block_table,
                slot_mapping=inputs.slot_mapping,
            ),
        )
        # One copy to the device for all three; on a CPU these are views.
        packed = torch.from_numpy(np.concatenate([inputs.token_ids, inputs.positions, inputs.sampled_rows]))
        packed = packed.to(self._device)
        num_tokens = len(inputs.token_ids)
        output = self._model(
            input_ids=packed[None, :num_tokens],
            position_ids=packed[None, num_tokens : 2 * num_tokens],
            logits_to_keep=packed[2 * num_tokens :],
            use_cache=False,
        )
        return output.logits[0].float()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """One thread for many small operations.

    A team gains them little, and loses 8 ms in each whenever its other core is taken: its threads spin at barriers.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
