"""The vocabulary between the front end and an engine, and between the rings of the engine.

What lives here: frozen, slotted dataclasses of plain values. What must not: behaviour, tensors, imports beyond the
standard library. Everything that crosses the engine's socket is one of `ToEngine` or `FromEngine`; `codec.py` turns
them into bytes. Ids are the server's own integers: a caller's `request_id` never reaches an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GREEDY_TEMPERATURE = 1e-5
"""Below this a sequence is greedy: its distribution could not be told from the argmax in float32."""


class FinishReason(IntEnum):
    """Why a sequence ended well. The numbers are those of `emberline.v1.FinishReason`; an error is never one."""

    EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    TIME_LIMIT = 6


class FailureKind(IntEnum):
    """Why one request failed while its engine lives on."""

    NON_FINITE = 1
    """Its row of logits held NaN or an infinity where a number must be."""
    NEVER_FITS = 2
    """It could not finish even with the whole KV pool to itself."""
    STEP_FAILED = 3
    """A step raised with it alone in the batch; without it, steps do not."""
    OUT_OF_MEMORY = 4
    """Memory ran out in a step that held it alone, in the smallest chunks."""
    QUEUE_TIMEOUT = 6
    """`Submit.queue_timeout_s` passed before its first step."""
    BAD_GUIDE = 7
    """The output tokens that it came with do not follow its guide."""
    GUIDE_DEAD_END = 8
    """Guide, `allowed_token_ids` and `min_tokens` together leave no token to sample."""
    GUIDE_TOO_SLOW = 9
    """To tell which tokens its guide allows next took longer than it may."""
    INTERNAL = 5
    """Our own code raised over this one request; the engine's log has the traceback under `incident_id`."""


class Phase(IntEnum):
    """Where the engine's loop is. Written to the flight recorder, read by the front end's hang watch."""

    LOADING = 0
    IDLE = 1
    DRAIN = 2
    SCHEDULE = 3
    EXECUTE = 4
    UPDATE = 5
    SEND = 6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Every value is effective: defaults were settled by the front end.

    The order of operations on a row of logits is: the guide, `allowed_token_ids`, `logit_bias`, the mask of
    `min_tokens`, repetition, then frequency and presence penalty, temperature, `top_k`, `top_p`, `min_p`.
    """

    temperature: float = 1.0
    """0 is greedy. The front end maps anything below `GREEDY_TEMPERATURE` to 0."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Number of best tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Least probability relative to the best token's, in [0, 1]; 0 keeps all."""
    presence_penalty: float = 0.0
    """Subtracted once from each token already in the output (resumed tokens included)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output (resumed tokens included)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019)."""
    seed: int = 0
    """64 unsigned bits. Noise is a function of (seed, index, absolute position) alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value added to its logit), ids distinct."""
    allowed_token_ids: tuple[int, ...] = ()
    """If not empty, no other token can be sampled."""
    num_logprobs: int | None = None
    """None: no logprobs. 0: the sampled token's own. k: also the k best of the step.

    Log-probabilities are those of the model: log-softmax of the raw logits, before any option above.
    """
    num_prompt_logprobs: int | None = None
    """The same for every position of the prompt but its first, which nothing comes before; of sequence 0 alone, which
    takes nothing from the prefix cache that it has no logprobs of: a position that is not computed has no logits."""


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a sequence ends. Stop strings are the front end's business: an engine knows no text."""

    max_tokens: int
    """Upper bound of output tokens, resumed ones included; at least 1, or 0 with `num_prompt_logprobs`: then the prompt
    is computed, and the sequence ends without a token."""
    min_tokens: int = 0
    """Until this many output tokens exist (resumed included), stop tokens and EOS have probability 0."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids; empty if the caller ignores EOS."""
    stop_token_ids: tuple[int, ...] = ()
    """The caller's own stop tokens."""


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """One of a request's sequences, and where it begins."""

    index: int = 0
    """Tells it from its siblings, in outputs and in the sampling noise; ascending and distinct within a request."""
    resume_token_ids: tuple[int, ...] = ()
    """Output tokens that it has already had: they count as output but are not sent again."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request. Sent once per request and attempt."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    """At least one id, each in [0, vocab_size)."""
    sampling: SamplingParams
    stopping: StoppingParams
    sequences: tuple[SequenceStart, ...] = (SequenceStart(),)
    """Forked after the shared prompt; at least one. A later attempt names those alone that have not finished."""
    priority: int = 0
    """Higher is served sooner."""
    queue_timeout_s: float | None = None
    """Seconds, from its arrival in the engine, within which its first step must begin; else it fails (QUEUE_TIMEOUT)
    without one."""
    guide: bytes = b""
    """A compiled grammar that the output follows, as `scheduler.model.guided` reads it; empty: none. Its state is a
    function of the output tokens, resumed ones included."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of equal salt."""
    cache_bypass: bool = False
    """Neither read from nor write to the prefix cache."""
    alone_until: int = 0
    """Until it has this many output tokens (resumed ones included), each step that computes any of a sequence holds
    nothing else: a request that was in a step that killed an engine is sent so, and a second death then tells who it
    was."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these. Idempotent; unknown ones are ignored. Overtakes queued Submits."""

    request_ids: tuple[int, ...]
    sequences: tuple[tuple[int, int], ...] = ()
    """(request, index) of single sequences: they have reached what only the front end can tell, and their siblings go
    on."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Give these requests no more steps until `Unpause`: their readers are slow. They keep their blocks unless others
    need them. Idempotent; unknown ids are ignored.
    """

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpause:
    """Go on with these. Idempotent; unknown ids are ignored."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the process with status 0, at once; what still runs is dropped."""


@dataclass(frozen=True, slots=True)
class Activate:
    """To an engine that was started with `EngineConfig.standby`: finish loading and serve."""

    device_index: int | None = None
    """In place of that of its configuration: whose place it takes is known only now."""


@dataclass(frozen=True, slots=True)
class StandingBy:
    """A standby has loaded all that it may hold while another engine serves; it waits for `Activate`."""

    pid: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A step of starting up, for the log."""

    stage: str
    """One or two words, lower case: `imports`, `weights`, `memory profile`, `warm-up`."""
    elapsed_s: float
    """Seconds since the engine process began, or was given its configuration after waiting for it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves from now on; compilation and warm-up are over. What the front end must know of it."""

    pid: int
    model_type: str
    """The family, as transformers names it."""
    num_parameters: int
    vocab_size: int
    """Rows of the vocabulary projection: the bound of every token id."""
    dtype: str
    device: str
    attention_backend: str
    block_size: int
    """Tokens per KV block."""
    num_kv_blocks: int
    max_model_len: int
    """Effective bound of prompt + output tokens: never more than the KV pool holds."""
    max_num_seqs: int
    max_num_batched_tokens: int
    startup_s: float
    """From the process's start; for one that had done its imports ahead, from its configuration on; for a standby, from
    `Activate` on."""
    step_s_per_token: float = 0.0
    """Duration of the largest step over its tokens, measured once: what a deadline for a step's work goes by."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position."""

    logprob: float
    """Of the emitted token; finite or -inf, never NaN."""
    rank: int
    """Of the emitted token, 1 is the most likely."""
    top_token_ids: tuple[int, ...] = ()
    """The best ids, best first; equal values in order of id."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt but its first, packed in the machine's own byte order: as objects,
    those of a long one would hold up an engine's loop, and then the front end's, for a tenth of a second each.
    """

    num_top: int
    """How many best tokens there are for each."""
    logprobs: bytes
    """32-bit floats, one per token; finite or -inf, never NaN."""
    ranks: bytes
    """32-bit integers, one per token; 1 is the most likely."""
    top_token_ids: bytes
    """32-bit integers, `num_top` per token, best first; equal ones in order of id."""
    top_logprobs: bytes
    """32-bit floats, in the same places."""


@dataclass(slots=True)
class SequenceOutput:
    """What one step brought to one sequence.

    Not frozen, though nobody may change it: a frozen one takes many times as long to make, and each step makes one for
    every sequence in it.
    """

    request_id: int
    index: int
    """Which of the request's sequences, from 0."""
    new_token_ids: tuple[int, ...]
    """In order; a stop token that ends the sequence is included."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token, if asked for."""
    finish_reason: FinishReason | None = None
    """Set on the sequence's last output."""
    num_cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; set on the sequence's first output only."""
    prompt_logprobs: PromptLogprobs | None = None
    """If asked for; on the first output of sequence 0 only."""
    queue_s: float | None = None
    """Seconds from the request's arrival in the engine to the begin of its first step; on its first output only."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """This request ended badly; its engine did not. No more outputs follow for it."""

    request_id: int
    kind: FailureKind
    incident_id: str = ""
    """With INTERNAL: the id under which the engine logged the traceback."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and running totals after a step."""

    num_running: int = 0
    num_waiting: int = 0
    """Sequences accepted but not in the running batch (preempted and paused ones included)."""
    num_waiting_tokens: int = 0
    """Tokens that these still have to compute."""
    num_used_kv_blocks: int = 0
    """Blocks held by at least one sequence; cached but unheld blocks count as free."""
    num_kv_blocks: int = 0
    num_preemptions_total: int = 0
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything one step has to say, in one message. Sent without outputs when only the stats changed."""

    step_id: int
    outputs: tuple[SequenceOutput, ...]
    failures: tuple[RequestFailure, ...]
    stats: EngineStats
    step_s: float = 0.0
    """How long the step took, from `schedule()` to the end of `update_from_output()`."""
    num_seqs: int = 0
    """Sequences in the step."""
    num_batched_tokens: int = 0
    """Tokens that it computed."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine's own last word: an exception reached its fatal boundary; the process exits right after."""

    exception_type: str
    message: str
    """Cut at 2 KB."""
    traceback: str
    """Frames without locals, cut at 16 KB from the middle."""
    phase: Phase
    step_id: int
    batch: str
    """The shapes of the step, such as `num_seqs=3 num_batched_tokens=130`; no text, no ids of tokens."""
    starting: bool
    """True if it never was ready."""


ToEngine = Submit | Abort | Pause | Unpause | Shutdown | Activate
FromEngine = LoadProgress | Ready | StepOutputs | EngineFailed | StandingBy
