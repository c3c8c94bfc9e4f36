"""What `Scheduler.schedule()` puts out and takes back: plain ints, as changes against the last step.

What must not be here: sampled ids in a plan (the runner keeps those, so that a step can be planned while the one
before it still runs), tensors, text.

The runner keeps, per `seq_id`, the token ids it was given and those it sampled, a block table and
`num_computed_tokens`. A plan changes that state, in this order: `finished_seq_ids` are forgotten; `preempted_seq_ids`
lose their block table and computed tokens but keep their token ids; `new` and `resumed` are (re)placed with the block
table given; `new_block_ids` are appended to the tables of sequences already placed. Then the step computes, for each
`seq_ids[i]`, its next `num_scheduled_tokens[i]` tokens from its `num_computed_tokens` on, and samples one token for
each of `sampled_seq_ids`, appending it to that sequence's token ids.

A runner whose step failed is reset: it forgets every sequence, not its KV blocks. The scheduler has dropped the step by
then, and names whoever runs again as `new`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.packed_logprobs import PackedLogprobs
from scheduler.messages import FailureKind, SamplingParams, StoppingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the runner does not know."""

    seq_id: int
    """The scheduler's own id, never reused."""
    index: int
    """Which of its request's sequences; part of the sampling noise."""
    token_ids: Sequence[int]
    """Prompt and output tokens known so far, in order: resumed ones, and those sampled before the runner was reset."""
    num_prompt_tokens: int
    """How many of them are prompt; the rest count as output."""
    sampling: SamplingParams
    stopping: StoppingParams
    block_ids: Sequence[int]
    """Its block table so far, enough for this step's tokens."""
    num_computed_tokens: int
    """Tokens whose KV is already in these blocks (prefix cache)."""
    num_scored_tokens: int = 0
    """With `num_prompt_logprobs`: leading tokens of the prompt whose successors' logprobs are known from before, or are
    not asked for; at least `num_computed_tokens`, for what is not computed has no logits."""
    guide: bytes = b""
    """Of its `Submit`; its state is a function of the output tokens."""


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """A preempted sequence that runs again, with fresh blocks."""

    seq_id: int
    block_ids: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one forward pass over a flat row of `num_batched_tokens` tokens."""

    step_id: int
    seq_ids: Sequence[int]
    """The batch, in the order of the flat row."""
    num_scheduled_tokens: Sequence[int]
    """Parallel to `seq_ids`; each at least 1."""
    sampled_seq_ids: Sequence[int]
    """Those of `seq_ids` whose last known token is computed in this step, in the same order."""
    num_batched_tokens: int
    """Sum of `num_scheduled_tokens`."""
    new: Sequence[NewSequence] = ()
    resumed: Sequence[ResumedSequence] = ()
    new_block_ids: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """seq_id → blocks appended to its table; only sequences that grew."""
    preempted_seq_ids: Sequence[int] = ()
    finished_seq_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """Why a sequence, and with it its request, cannot go on though its step succeeded."""

    kind: FailureKind
    incident_id: str = ""
    """With INTERNAL: the id under which the cause was logged."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner found."""

    sampled_token_ids: Sequence[int]
    """Parallel to the plan's `sampled_seq_ids`; -1 for a row that was not finite."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """seq_id → logprobs of its sampled token, for those that asked."""
    non_finite_seq_ids: Sequence[int] = ()
    """Sequences whose logits, where they were sampled or scored, held NaN or +inf, or nothing but -inf."""
    prompt_logprobs: Mapping[int, PackedLogprobs] = field(default_factory=dict)
    """seq_id → logprobs of the prompt tokens that follow those scored in this step, for those that asked; they go on
    where the last step's ended, also after a preemption."""
    failures: Mapping[int, SequenceFailure] = field(default_factory=dict)
    """seq_id → why it cannot go on, for sampled sequences; whatever was sampled for them does not count."""
