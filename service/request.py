"""A request after validation: what the protocol's message means, with every default settled.

What lives here: frozen dataclasses between `convert`, `tokenizer` and whoever serves a call. What must not: protobuf,
gRPC, I/O. Everything in a `GenerateRequest` of this module is within its bounds, except for what only the tokenized
prompt can tell: `convert.to_submit` checks that.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.guide_messages import GuideSource
from scheduler.messages import SamplingParams

PRIORITY_MAX = 100
REQUEST_ID_BYTES_MAX = 128
CACHE_SALT_BYTES_MAX = 128
STREAM_INTERVAL_MAX = 1024
SEQUENCES_MAX = 16
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are held to. Built from the configuration and the engine's `Ready`."""

    vocab_size: int
    """Every token id is below this."""
    max_model_len: int
    """Prompt and output tokens together."""
    max_prompt_tokens: int
    """Prompt tokens without resumed ones, which are output; below `max_model_len`, so that one output token always has
    room.
    """
    max_output_tokens: int
    """Bound of max_tokens, and its default."""
    max_request_bytes: int
    """The gRPC message limit; told to callers, enforced by gRPC."""
    max_text_bytes: int | None = None
    """A longer text would have more tokens than a prompt may; None: unknown."""
    max_logprobs: int = 20
    max_prompt_logprob_entries: int = 200_000
    """A prompt token's own and its best ones', over the whole prompt: at most 20 bytes each, all in one message, and a
    caller's library takes one of up to 4 MB unless it is told otherwise. In memory, while they are written, some 50."""
    max_stop_strings: int = 16
    max_stop_string_bytes: int = 1024
    max_stop_token_ids: int = 64
    max_chat_messages: int = 1024
    max_sequences: int = SEQUENCES_MAX
    """Of one request. No more than the engine has seats, so that they can run side by side."""
    max_guide_bytes: int = 64 * 1024
    """As its caller wrote it; choices together."""
    max_guide_choices: int = 1024


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an absent sampling value means; from the model's generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str
    parse_special: bool = False


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str
    add_special_tokens: bool = True
    parse_special: bool = False


@dataclass(frozen=True, slots=True)
class TokenInput:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatInput:
    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = True


PromptInput = TextInput | TokenInput | ChatInput


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the responses hold."""

    text: bool = True
    token_ids: bool = False
    skip_special_tokens: bool = True
    stream_interval: int = 1
    """Tokens of a sequence since its last message before there is another; its end does not wait."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One valid request of Generate or Complete."""

    request_id: str | None
    """The caller's label; None if one has to be made."""
    prompt: PromptInput
    sampling: SamplingParams
    """Effective values; the seed is drawn if it was absent."""
    max_tokens: int | None
    """None: as many as the limits allow."""
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    output: OutputOptions = OutputOptions()
    cache_salt: str = ""
    cache_bypass: bool = False
    priority: int = 0
    num_sequences: int = 1
    """More than one: `resume_token_ids` is empty."""
    resume_token_ids: tuple[int, ...] = ()
    guide: GuideSource | None = None
    resume_on_engine_death: bool | None = None
    """None: the server's default."""
    max_queue_time_s: float | None = None
    """Until the first step; None: as long as it takes."""
    max_time_s: float | None = None
    """From arrival to the end; None: as long as it takes."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    prompt: TextInput | ChatInput
    with_pieces: bool = False


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    token_ids: tuple[int, ...]
    skip_special_tokens: bool = True
