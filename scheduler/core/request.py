"""A request and its sequences: what is known of them, and which moves their lives allow.

What lives here: plain state, the table of legal moves, the order of precedence. What must not: decisions about who
runs (`scheduler.py`), or about blocks (`kv_cache_manager.py`).

A request is what a caller submitted; a sequence is one stream of tokens of it. Those of one request fork after the
prompt that they share; from there on each is a sequence of its own.

**Ageing.** Everybody's place is settled at arrival: a request stands where one of priority 0 would that had arrived
`AGEING_STEPS` steps earlier for each point of its priority. So a higher one goes ahead of what has come in that time,
and of nothing that has waited for longer: with every `AGEING_STEPS` steps that a request waits, newcomers need a point
more to pass it, and none passes it in the end. Nobody's place among those who are here ever changes.

A sequence knows its `token_ids` (prompt, then output; resumed tokens are output) and `num_computed_tokens`, the number
of those whose KV is known to be written. It has no phase: each step lets the second catch up with the first, and a
step that computes the last known token yields the next one. `move_to` is the only way to change `status`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from scheduler.core.packed_logprobs import PackedLogprobs
from scheduler.messages import FinishReason, PromptLogprobs, SamplingParams, StoppingParams, Submit

AGEING_STEPS = 256
"""Steps of waiting that weigh as much as one point of priority."""

Order = tuple[int, int, int]
"""(step of arrival, put back by its priority; arrival; index): the smaller goes first. Total and fixed for life, also
across preemptions."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    """The runner does not know it: it never ran, or the runner was reset since."""
    RUNNING = "running"
    """Holds a seat and the blocks of all its known tokens."""
    PARKED = "parked"
    """Gave its seat up to a pause, and keeps its blocks while nobody else needs them. The runner knows it."""
    PREEMPTED = "preempted"
    """Lost its blocks, and will run again. The runner knows its tokens."""
    FINISHED = "finished"
    """Ended, failed or aborted: holds nothing."""


LEGAL_MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.PARKED, SequenceStatus.PREEMPTED, SequenceStatus.WAITING, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PARKED: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.WAITING, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. Compared by identity."""

    seq_id: int
    request: Request
    index: int
    order: Order
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    is_caught_up: bool = False
    """Running, and from now on each step computes exactly its newest token and samples the next."""
    num_cached_tokens: int = 0
    """Prompt tokens the prefix cache gave when its request first ran; of the sequence alone that was the first to."""
    is_first_output_due: bool = True
    prompt_logprobs: PackedLogprobs | None = None
    """What is known of its prompt's so far; none before the first chunk that brings some, nor once they are told."""
    start_reason: FinishReason | None = None
    """Why it ends without a token: computing the prompt is all that it is here for."""

    # Copies of the request's values, because every step reads them for every sequence.
    request_id: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    num_tokens_max: int = field(init=False)
    num_tokens_alone: int = field(init=False)

    # Owned by `kv_cache_manager.py`.
    block_table: list[int] = field(default_factory=list)
    num_registered_blocks: int = 0
    """Leading blocks of the table that were found in, or offered to, the prefix cache."""
    last_content_id: int | str = ""
    """The prefix cache's name for the content of those blocks."""

    provider: Sequence | None = None
    """The sibling that still has to compute blocks which this one, seated already, begins with."""
    num_shared_tokens: int = 0
    """How far that one has to get."""

    # Owned by `scheduler.py` and `roster.py`.
    is_known: bool = False
    """The runner has its tokens."""
    is_placed: bool = False
    """The runner has its block table."""

    # Owned by `seats.py`.
    growth_batch_step: int = 0
    """The batch step, by number, in which it needs one more block; 0 if none is foreseen."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.stop_ids = self.request.stop_ids
        self.num_tokens_max = self.request.num_tokens_max
        self.num_tokens_alone = self.request.num_tokens_alone

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of its prompt are still to be told."""
        return self.is_first_output_due and self.index == 0 and self.request.sampling.num_prompt_logprobs is not None

    @property
    def num_scored_tokens(self) -> int:
        """Leading tokens of the prompt whose successors' logprobs are known, or are not asked for."""
        if not self.is_scored:
            return self.num_prompt_tokens
        return 0 if self.prompt_logprobs is None else len(self.prompt_logprobs)

    def add_prompt_logprobs(self, following: PackedLogprobs) -> None:
        """Those that a step found; they go on where the last ones ended."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = following
        else:
            self.prompt_logprobs.extend(following)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """All of them, to be told with the first output; None if nobody asked."""
        if not self.is_scored:
            return None
        assert self.num_scored_tokens == self.num_prompt_tokens - 1, "each token but the first is scored, once"
        # A prompt of one token has none.
        packed, self.prompt_logprobs = self.prompt_logprobs or PackedLogprobs(num_top=0), None
        return packed.message()

    @property
    def is_alone(self) -> bool:
        """Whether a step that computes any of it must hold nothing else."""
        return len(self.token_ids) < self.num_tokens_alone

    def move_to(self, status: SequenceStatus) -> None:
        assert status in LEGAL_MOVES[self.status], f"sequence {self.seq_id}: {self.status} may not become {status}"
        self.status = status


@dataclass(slots=True, eq=False)
class Request:
    """What was submitted, and the sequences that answer it."""

    request_id: int
    priority: int
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    cache_salt: str
    cache_bypass: bool
    stop_ids: frozenset[int]
    """EOS ids and the caller's stop tokens: any of them may end a sequence."""
    num_tokens_max: int
    """Prompt + output tokens at which a sequence ends at the latest."""
    num_tokens_alone: int
    """Prompt + output tokens from which on a sequence may share its steps; at most the prompt's length if always."""
    guide: bytes = b""
    sequences: list[Sequence] = field(default_factory=list)
    is_paused: bool = False
    """It gets no steps for now."""
    has_run: bool = False
    """One of its sequences has had a seat; the prompt is in the totals."""

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


def make_request(submit: Submit, *, step_id: int, arrival: int, first_seq_id: int, max_model_len: int) -> Request:
    """Build the request and its sequences. `arrival` counts requests, `step_id` steps; ids from `first_seq_id` on are
    not used again.
    """
    num_prompt_tokens = len(submit.prompt_token_ids)
    request = Request(
        request_id=submit.request_id,
        priority=submit.priority,
        num_prompt_tokens=num_prompt_tokens,
        sampling=submit.sampling,
        stopping=submit.stopping,
        cache_salt=submit.cache_salt,
        cache_bypass=submit.cache_bypass,
        stop_ids=frozenset(submit.stopping.eos_token_ids + submit.stopping.stop_token_ids),
        num_tokens_max=min(num_prompt_tokens + submit.stopping.max_tokens, max_model_len),
        num_tokens_alone=num_prompt_tokens + submit.alone_until,
        guide=submit.guide,
    )
    for seq_id, start in enumerate(submit.sequences, first_seq_id):
        sequence = Sequence(
            seq_id=seq_id,
            request=request,
            index=start.index,
            order=(step_id - AGEING_STEPS * submit.priority, arrival, start.index),
            token_ids=[*submit.prompt_token_ids, *start.resume_token_ids],
        )
        request.sequences.append(sequence)
    return request
