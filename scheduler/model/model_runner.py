"""Executes one plan: changes → inputs → forward → logits → sample → append. Nothing else advances a sequence here.

What must live here: that walk, and nothing it would do only once. What must not: loading and measuring
(`startup.py`), kernels, decisions about who runs.

The model sees one flat row of tokens, whatever sequences they belong to; their positions go in beside them, and
attention, the only place where tokens meet, is ours (`paged_attention.py`). The vocabulary is projected only at the
positions that are sampled, and afterwards, some rows at a time, at those of prompts that are to be scored.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scheduler.core.output import NewSequence, SequenceFailure, StepPlan, StepResult
from scheduler.messages import FailureKind, SamplingParams, StoppingParams
from scheduler.model.input_batch import InputBatch, ScoredRows, StepInputs
from scheduler.model.kv_cache import PagedKVCache
from scheduler.model.paged_attention import PagedAttention
from scheduler.model.projection import Projection
from scheduler.model.prompt_scores import ScoredPrompts, score_prompts
from scheduler.model.sampler import GuideMask, SampledTokens, sample
from scheduler.model.threads import single_threaded

PROBE_SEQ_ID = -1
"""No sequence of a scheduler has it."""
PROBE_TOKENS_MAX = 8


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
    step_s_per_token: float = 0.0
    """Duration of the largest step over its tokens, as it was once measured."""


class UnhealthyRunnerError(Exception):
    """A step known to be harmless gave no usable result."""


def _failures(guide: GuideMask | None, sampled: SampledTokens) -> dict[int, SequenceFailure]:
    """row → why its guide ends it."""
    if guide is None:
        return {}
    dead_ends = set(sampled.emptied).intersection(guide.rows.tolist())
    return dict.fromkeys(dead_ends, SequenceFailure(FailureKind.GUIDE_DEAD_END)) | guide.failures


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
        self._projection = Projection(model)
        self._device = torch.device(info.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step; `StepPlan` says what it changes and what it computes.

        A plan that breaks the protocol is our bug and raises AssertionError or KeyError before anything is computed.
        After any exception what is known of the sequences may be half of a step's: `reset`, and tell them again.
        """
        batch = self._batch
        batch.apply(plan)
        if not plan.seq_ids:
            return StepResult(())
        inputs = batch.build(plan)
        with self._projection.keeping() if inputs.scored is not None else nullcontext():
            logits = self.compute_logits(inputs)
        sampled, guide = SampledTokens([]), None
        if len(inputs.sampled):
            with single_threaded():
                rows = batch.sampling_rows(inputs)
                sampled, guide = sample(logits, rows), rows.guide
        del logits  # those of the prompts come in their place
        scored = ScoredPrompts() if inputs.scored is None else self._score(inputs.scored)
        batch.commit(inputs, sampled.token_ids)
        seq_ids = plan.sampled_seq_ids
        failures = _failures(guide, sampled)
        non_finite = [
            seq_ids[row] for row, token_id in enumerate(sampled.token_ids) if token_id < 0 and row not in failures
        ]
        non_finite += [plan.seq_ids[sequence] for sequence in scored.non_finite]
        return StepResult(
            sampled_token_ids=sampled.token_ids,
            logprobs={seq_ids[row]: logprobs for row, logprobs in sampled.logprobs.items()},
            non_finite_seq_ids=list(dict.fromkeys(non_finite)),
            failures={seq_ids[row]: failure for row, failure in failures.items()},
            prompt_logprobs={plan.seq_ids[sequence]: packed for sequence, packed in scored.logprobs.items()},
        )

    def _score(self, rows: ScoredRows) -> ScoredPrompts:
        try:
            return score_prompts(self._projection.project, rows, vocab_size=self.info.vocab_size, device=self._device)
        finally:
            self._projection.drop()

    def is_guide_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether a sequence with this guide would make no step wait; if not, what it takes has begun."""
        return self._batch.guides.is_ready(guide, eos_token_ids)

    def reset(self) -> None:
        """Forgets every sequence. The pools keep their contents: what earlier steps computed stays good."""
        self._batch.reset()
        self._projection.drop()  # of a step that failed half-way
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what a step that ran out of memory left may be in pieces of the wrong size

    def probe(self) -> None:
        """Runs a step known to be harmless, in the scratch block: does this process still compute at all?

        It goes the way of every step, so that what breaks them all breaks it, too; sequences are not touched. Raises
        UnhealthyRunnerError if the result is no number, and whatever the step raises.
        """
        num_tokens = min(PROBE_TOKENS_MAX, self._kv_cache.block_size, self.info.max_model_len)
        sequence = NewSequence(
            seq_id=PROBE_SEQ_ID,
            index=0,
            token_ids=[token_id % self.info.vocab_size for token_id in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_tokens=1),
            block_ids=(self._kv_cache.scratch_block_id,),
            num_computed_tokens=0,
        )
        plan = StepPlan(
            step_id=0,
            seq_ids=(PROBE_SEQ_ID,),
            num_scheduled_tokens=(num_tokens,),
            sampled_seq_ids=(PROBE_SEQ_ID,),
            num_batched_tokens=num_tokens,
            new=(sequence,),
        )
        try:
            result = self.execute(plan)
        finally:
            self._batch.apply(StepPlan(0, (), (), (), 0, finished_seq_ids=(PROBE_SEQ_ID,)))
        if result.non_finite_seq_ids:
            raise UnhealthyRunnerError("the logits of a step known to be harmless are not finite")

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
        try:
            output = self._model(
                input_ids=packed[None, :num_tokens],
                position_ids=packed[None, num_tokens : 2 * num_tokens],
                logits_to_keep=packed[2 * num_tokens :],
                use_cache=False,
            )
        finally:
            self._attention.end_step()
        return output.logits[0].float()

    @torch.inference_mode()
    def compute_all_logits(self, inputs: StepInputs) -> torch.Tensor:
        """One forward pass, then float32 logits [T, V] of all its rows, by the way of scored prompts."""
        with self._projection.keeping():
            self.compute_logits(inputs)
        try:
            return self._projection.project(torch.arange(len(inputs.token_ids), device=self._device))
        finally:
            self._projection.drop()
