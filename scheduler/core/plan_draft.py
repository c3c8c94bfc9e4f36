"""The plan of one step while it is being made: collects decisions, takes none.

What must not be here: choices, or changes to a sequence; `scheduler.py` makes both. What a plan says is in `output.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.output import NewSequence, ResumedSequence, StepPlan
from scheduler.core.request import Sequence


class Chunk(NamedTuple):
    """What a sequence that has not caught up computes in one step."""

    sequence: Sequence
    num_tokens: int
    is_sampled: bool
    """Whether its last known token is among them."""


@dataclass(slots=True)
class PlanDraft:
    new: list[NewSequence] = field(default_factory=list)
    resumed: list[ResumedSequence] = field(default_factory=list)
    new_block_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    preempted_seq_ids: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    num_chunk_tokens: int = 0

    def add_new(self, sequence: Sequence) -> None:
        self.new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                index=sequence.index,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                stopping=sequence.request.stopping,
                block_ids=tuple(sequence.block_table),
                num_computed_tokens=sequence.num_computed_tokens,
                num_scored_tokens=sequence.num_scored_tokens,
                guide=sequence.request.guide,
            )
        )

    def add_resumed(self, sequence: Sequence) -> None:
        block_ids = tuple(sequence.block_table)
        self.resumed.append(ResumedSequence(sequence.seq_id, block_ids, sequence.num_computed_tokens))

    def add_preempted(self, sequence: Sequence) -> None:
        """Its part in this step so far is at most a new block: victims are chosen before they get tokens."""
        self.new_block_ids.pop(sequence.seq_id, None)
        self.preempted_seq_ids.append(sequence.seq_id)

    def add_chunk(self, sequence: Sequence, num_tokens_max: int) -> None:
        """Compute as many of the sequence's tokens as there are, at most `num_tokens_max`."""
        num_tokens = min(sequence.num_uncomputed_tokens, num_tokens_max)
        self.chunks.append(Chunk(sequence, num_tokens, is_sampled=num_tokens == sequence.num_uncomputed_tokens))
        self.num_chunk_tokens += num_tokens

    def plan(
        self, step_id: int, *, decode_ids: tuple[int, ...], ones: tuple[int, ...], finished_seq_ids: tuple[int, ...]
    ) -> StepPlan:
        """The plan: `decode_ids` first, one token each (`ones`), then the chunks."""
        seq_ids = sampled_seq_ids = decode_ids
        num_scheduled_tokens = ones
        if self.chunks:
            seq_ids += tuple([chunk.sequence.seq_id for chunk in self.chunks])
            sampled_seq_ids += tuple([chunk.sequence.seq_id for chunk in self.chunks if chunk.is_sampled])
            num_scheduled_tokens += tuple([chunk.num_tokens for chunk in self.chunks])
        assert seq_ids, "there is work, but nobody got a token"
        return StepPlan(
            step_id=step_id,
            seq_ids=seq_ids,
            num_scheduled_tokens=num_scheduled_tokens,
            sampled_seq_ids=sampled_seq_ids,
            num_batched_tokens=len(decode_ids) + self.num_chunk_tokens,
            new=self.new,
            resumed=self.resumed,
            new_block_ids=self.new_block_ids,
            preempted_seq_ids=self.preempted_seq_ids,
            finished_seq_ids=finished_seq_ids,
        )
