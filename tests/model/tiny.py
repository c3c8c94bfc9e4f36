"""Tiny models with random weights, made on the spot; plans by hand; and transformers' own word on what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from scheduler.config import EngineConfig
from scheduler.core.output import NewSequence, ResumedSequence, StepPlan, StepResult
from scheduler.messages import SamplingParams, StoppingParams
from scheduler.model import startup
from scheduler.model.model_runner import ModelRunner
from scheduler.model.noise import mix64

VOCAB_SIZE = 323
"""Not a multiple of anything."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SUPPORTED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, num_key_value_heads=2, head_dim=16),
    "qwen2": Qwen2Config(**_COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma": GemmaConfig(**_COMMON, num_key_value_heads=1, head_dim=32),
    "gpt_neox": GPTNeoXConfig(**_COMMON, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
}
GREEDY = SamplingParams(temperature=0.0)


def fill_weights(model: torch.nn.Module) -> None:
    """Weights that depend on nothing but their place: hashes, not a generator that a new version may change."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        counters = np.arange(parameter.numel(), dtype=np.uint64) + np.uint64(number << 32)
        uniform = ((mix64(counters) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5) * 12**0.5
        # Large enough that attention matters: such a model does not say the same token over and over.
        scale = 0.1 if parameter.ndim == 1 else 1.0 if "embed" in name else 2.0 * parameter.shape[-1] ** -0.5
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        values = torch.from_numpy(uniform * scale + offset).to(parameter.dtype).reshape(parameter.shape)
        parameter.data.copy_(values)


def save_model(config: PreTrainedConfig, directory: Path) -> str:
    """Writes a model of this configuration; returns its directory."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill_weights(model)
    model.save_pretrained(directory)
    return str(directory)


def load(directory: str, **flags: Any) -> ModelRunner:
    """A runner with small limits; the reference backend unless `flags` say otherwise."""
    limits: dict[str, Any] = {
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 64,
        "block_size": 16,
        "attention_backend": "reference",
    }
    return load_model_runner(EngineConfig(model=directory, **(limits | flags)), lambda _stage: None)


def load_model_runner(config: EngineConfig, on_progress: Callable[[str], None]) -> ModelRunner:
    """Both parts of a start at once."""
    return startup.prepare(config, on_progress).activate(config.device_index, on_progress)


def random_ids(num: int, seed: int = 0) -> list[int]:
    """`num` token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, size=num).tolist()


class Driver:
    """Writes plans by hand: who runs, how many tokens each, in which blocks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.block_size = runner.info.block_size
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.last_result = StepResult(())
        self._pending_new: dict[int, NewSequence] = {}
        self._pending_resumed: set[int] = set()
        self._preempted: list[int] = []
        self._finished: list[int] = []
        # Handed out from the end and not in order, as a pool that has been used for a while would.
        self._free = np.random.default_rng(7).permutation(runner.info.num_kv_blocks).tolist()
        self._step_id = 0

    def add(
        self,
        seq_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        stopping: StoppingParams | None = None,
        index: int = 0,
        resumed_output: Sequence[int] = (),
        shared_blocks: Sequence[int] = (),
        num_scored_tokens: int = 0,
    ) -> None:
        """A sequence that joins with its next step; `shared_blocks` already hold the KV of its first tokens."""
        self.tokens[seq_id] = [*prompt, *resumed_output]
        self.num_prompt[seq_id] = len(prompt)
        self.computed[seq_id] = len(shared_blocks) * self.block_size
        self.blocks[seq_id] = list(shared_blocks)
        self._pending_new[seq_id] = NewSequence(
            seq_id=seq_id,
            index=index,
            token_ids=tuple(self.tokens[seq_id]),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            stopping=stopping or StoppingParams(max_tokens=1000),
            block_ids=(),
            num_computed_tokens=self.computed[seq_id],
            num_scored_tokens=num_scored_tokens,
        )

    def preempt(self, seq_id: int) -> None:
        """It loses its blocks; a later step resumes it."""
        self._free.extend(self.blocks[seq_id])
        self.blocks[seq_id], self.computed[seq_id] = [], 0
        self._preempted.append(seq_id)
        self._pending_resumed.add(seq_id)

    def finish(self, seq_id: int) -> None:
        """The next step forgets it."""
        self._free.extend(self.blocks.pop(seq_id))
        self._finished.append(seq_id)

    def output(self, seq_id: int) -> list[int]:
        """What it has sampled or was resumed with."""
        return self.tokens[seq_id][self.num_prompt[seq_id] :]

    def step(self, work: dict[int, int]) -> StepResult:
        """Computes `work[seq_id]` tokens of each; samples those that catch up."""
        new, resumed, grown = [], [], {}
        for seq_id, num_tokens in work.items():
            blocks = self._blocks_for(seq_id, self.computed[seq_id] + num_tokens)
            if seq_id in self._pending_new:
                whole_table = (*self.blocks[seq_id], *blocks)
                new.append(replace(self._pending_new.pop(seq_id), block_ids=whole_table))
            elif seq_id in self._pending_resumed:
                self._pending_resumed.remove(seq_id)
                resumed.append(ResumedSequence(seq_id, blocks, 0))
            elif blocks:
                grown[seq_id] = blocks
            self.blocks[seq_id].extend(blocks)
        caught_up = [s for s, num in work.items() if self.computed[s] + num == len(self.tokens[s])]
        plan = StepPlan(
            step_id=self._step_id,
            seq_ids=tuple(work),
            num_scheduled_tokens=tuple(work.values()),
            sampled_seq_ids=tuple(caught_up),
            num_batched_tokens=sum(work.values()),
            new=new,
            resumed=resumed,
            new_block_ids=grown,
            preempted_seq_ids=tuple(self._preempted),
            finished_seq_ids=tuple(self._finished),
        )
        self._step_id += 1
        self._preempted, self._finished = [], []
        result = self.runner.execute(plan)
        for seq_id, num_tokens in work.items():
            self.computed[seq_id] += num_tokens
        for seq_id, token_id in zip(caught_up, result.sampled_token_ids, strict=True):
            if token_id >= 0:
                self.tokens[seq_id].append(token_id)
        return result

    def decode(self, seq_ids: Iterable[int], num_steps: int) -> None:
        """So many steps of one token each; those not yet computed catch up in the first."""
        for _ in range(num_steps):
            self.last_result = self.step({s: len(self.tokens[s]) - self.computed[s] for s in seq_ids})

    def _blocks_for(self, seq_id: int, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self.block_size) - len(self.blocks[seq_id])
        return [self._free.pop() for _ in range(missing)]


def assert_exact(directory: str, tokens: Sequence[int], num_prompt: int) -> None:
    """What the design calls exact: one teacher-forced pass of transformers would have chosen each output token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, num_prompt - 1 : -1]
    output = torch.tensor(tokens[num_prompt:])
    chosen = logits.gather(1, output[:, None])[:, 0]
    best, second = logits.topk(2, dim=-1).values.T
    clear = best - second > 1e-3
    assert torch.equal(chosen[clear], best[clear])
    assert bool((best - chosen <= 1e-3).all())
