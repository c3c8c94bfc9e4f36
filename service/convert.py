"""protobuf ↔ our own requests and messages. Pure: no I/O, no clock, no randomness (the seed's source is handed in).

What lives here: the meaning of each field, every check that needs no tokenizer, and the building of responses. All
violations of a request are collected into one answer. Precedence: another model (NOT_FOUND), then anything invalid
(INVALID_ARGUMENT), then options that this build does not support (UNIMPLEMENTED).

A violation names the field and its bounds. It never repeats what the caller sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from emberline.v1 import admin_pb2, inference_pb2, tokenizer_pb2
from scheduler.guide_messages import GuideKind, GuideSource
from scheduler.messages import (
    GREEDY_TEMPERATURE,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SequenceStart,
    StoppingParams,
    Submit,
    TokenLogprobs,
)
from service.errors import FieldViolation, InvalidRequestError, UnknownModelError
from service.request import (
    CACHE_SALT_BYTES_MAX,
    INT32_MAX,
    PRIORITY_MAX,
    REQUEST_ID_BYTES_MAX,
    STREAM_INTERVAL_MAX,
    ChatInput,
    ChatTurn,
    DetokenizeRequest,
    GenerateRequest,
    Limits,
    OutputOptions,
    PromptInput,
    SamplingDefaults,
    TextInput,
    TokenInput,
    TokenizeRequest,
)

TOP_P_MIN = 1e-6
"""A smaller one keeps the best token alone, as this does; single precision would make it 0, which keeps none."""
NUM_VIOLATIONS_PER_LIST_MAX = 4
PROMPT_ENTRIES_PER_PART = 2048
_GUIDE_KINDS = {"json_schema": GuideKind.JSON_SCHEMA, "regex": GuideKind.REGEX, "grammar": GuideKind.GRAMMAR}
CHARACTERS_PER_TOKEN = 4
"""Of usual text, about."""
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LABEL = re.compile(rf"[\x20-\x7e]{{1,{REQUEST_ID_BYTES_MAX}}}")
_LABEL_BOUNDS = f"must be 1 to {REQUEST_ID_BYTES_MAX} characters of printable ASCII"
ABORT_IDS_MAX = 1024
MODEL_NAME_CHARS_MAX = 256
DRAIN_GRACE_S_MAX = 86400
_DURATION_S_MAX = 315_576_000_000
"""Of google.protobuf.Duration."""


class _Check:
    """Collects what is wrong. Each method returns a value within bounds, so that conversion can go on to the end."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def fail(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    def that(self, condition: bool, field: str, description: str) -> bool:
        if not condition:
            self.fail(field, description)
        return condition

    def number(self, field: str, value: float, least: float, most: float) -> float:
        """NaN is within no bounds. −0.0 becomes 0."""
        self.that(least <= value <= most, field, f"must be in [{least:g}, {most:g}]")
        return value + 0.0

    def integer(self, field: str, value: int, least: int, most: int) -> int:
        self.that(least <= value <= most, field, f"must be in [{least}, {most}]")
        return value

    def token_ids(
        self, field: str, token_ids: Sequence[int], vocab_size: int, num_max: int | None = None
    ) -> tuple[int, ...]:
        """A list over `num_max` is refused by its length alone: to look at millions of ids would hold up the loop."""
        if num_max is not None and len(token_ids) > num_max:
            self.fail(field, f"{len(token_ids)} ids; at most {num_max}")
            return ()
        ids = tuple(token_ids)
        if ids and max(ids) >= vocab_size:
            bad = [position for position, token_id in enumerate(ids) if token_id >= vocab_size]
            for position in bad[:NUM_VIOLATIONS_PER_LIST_MAX]:
                self.fail(f"{field}[{position}]", f"must be in [0, {vocab_size})")
            if len(bad) > NUM_VIOLATIONS_PER_LIST_MAX:
                self.fail(field, f"{len(bad)} ids are not in [0, {vocab_size})")
        return ids

    def duration_s(self, field: str, message: Message) -> float | None:
        """Seconds; None if the field is absent."""
        if not message.HasField(field):
            return None
        value: Duration = getattr(message, field)
        seconds, nanos = value.seconds, value.nanos
        positive = seconds >= 0 and nanos >= 0 and (seconds or nanos)
        valid = positive and seconds <= _DURATION_S_MAX and nanos < 1_000_000_000
        self.that(bool(valid), field, "must be a positive duration")
        return float(seconds + nanos / 1e9)

    def settle(self) -> None:
        """Raises InvalidRequestError if there is reason to."""
        if self.violations:
            raise InvalidRequestError(self.violations)


def generate_request(
    message: inference_pb2.GenerateRequest,
    *,
    served_model_name: str,
    limits: Limits,
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
) -> GenerateRequest:
    """`draw_seed` is called if the request is valid and has no seed.

    Raises UnknownModelError, InvalidRequestError.
    """
    check_model(message.model, served_model_name)
    check = _Check()
    label = valid_label(message)
    if label is None and message.HasField("request_id"):
        check.fail("request_id", _LABEL_BOUNDS)
    prompt = _prompt(check, message, limits)
    sampling = _sampling(check, message, limits, defaults)
    max_tokens, min_tokens = _token_bounds(check, message, limits)
    stopping = message.stopping
    resume_token_ids = check.token_ids(
        "resume_token_ids", message.resume_token_ids, limits.vocab_size, limits.max_model_len
    )
    num_sequences = 1
    if message.sampling.HasField("n"):
        num_sequences = check.integer("sampling.n", message.sampling.n, 1, limits.max_sequences)
        if num_sequences > 1 and resume_token_ids:
            check.fail("resume_token_ids", "only with one sequence: they do not say whose they are")
    output = _output(check, message.output)
    salt = message.cache.salt
    check.that(len(salt.encode()) <= CACHE_SALT_BYTES_MAX, "cache.salt", f"at most {CACHE_SALT_BYTES_MAX} bytes")
    priority = check.integer("priority", message.priority, -PRIORITY_MAX, PRIORITY_MAX)
    stop_strings = _stop_strings(check, stopping.stop_strings, limits)
    stop_token_ids = check.token_ids(
        "stopping.stop_token_ids", stopping.stop_token_ids, limits.vocab_size, limits.max_stop_token_ids
    )
    max_queue_time_s = check.duration_s("max_queue_time", message)
    max_time_s = check.duration_s("max_time", message)
    guide = _guide(check, message, limits)
    check.settle()
    return GenerateRequest(
        request_id=label,
        prompt=prompt,
        sampling=sampling(draw_seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=stop_strings,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop,
        output=output,
        cache_salt=salt,
        cache_bypass=message.cache.bypass,
        priority=priority,
        num_sequences=num_sequences,
        resume_token_ids=resume_token_ids,
        guide=guide,
        resume_on_engine_death=(message.resume_on_engine_death if message.HasField("resume_on_engine_death") else None),
        max_queue_time_s=max_queue_time_s,
        max_time_s=max_time_s,
    )


def valid_label(message: inference_pb2.GenerateRequest) -> str | None:
    """The caller's label, if it is one: what is not may be anything, and has no business in a log."""
    return message.request_id if _LABEL.fullmatch(message.request_id) else None


def num_option_entries(message: inference_pb2.GenerateRequest) -> int:
    """Entries of the options that may be as long as the vocabulary; looks at none of them."""
    return len(message.sampling.logit_bias) + len(message.sampling.allowed_token_ids)


def num_queue_tokens(message: inference_pb2.GenerateRequest, limits: Limits) -> int:
    """What the request will add to the queue, before anything is done for it: exact where it has ids, an estimate from
    its bytes where it has text. A prompt counts as no more than the longest that is not refused right after.
    """
    match message.WhichOneof("input"):
        case "text":
            num_prompt = len(message.text) // CHARACTERS_PER_TOKEN
        case "chat":
            num_prompt = message.chat.ByteSize() // CHARACTERS_PER_TOKEN
        case _:
            num_prompt = len(message.token_ids.ids)
    num_resumed = len(message.resume_token_ids)
    return min(num_prompt + num_resumed, limits.max_model_len) + num_option_entries(message)


def to_submit(
    request: GenerateRequest,
    *,
    engine_request_id: int,
    prompt_token_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    limits: Limits,
    guide: bytes = b"",
) -> Submit:
    """Settles what only the tokenized prompt can tell. Raises InvalidRequestError if it is empty or too long or has
    tokens that the model lacks, or if nothing could be sampled.

    An absent max_tokens becomes the limit of outputs; the engine ends a sequence that fills the context before.
    """
    # A model's files may name an id that its vocabulary lacks; no engine could mask or sample it.
    eos = () if request.ignore_eos else tuple(token_id for token_id in eos_token_ids if token_id < limits.vocab_size)
    submit = Submit(
        request_id=engine_request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=request.sampling,
        stopping=StoppingParams(
            max_tokens=limits.max_output_tokens if request.max_tokens is None else request.max_tokens,
            min_tokens=request.min_tokens,
            eos_token_ids=eos,
            stop_token_ids=request.stop_token_ids,
        ),
        sequences=tuple(SequenceStart(index, request.resume_token_ids) for index in range(request.num_sequences)),
        priority=request.priority,
        cache_salt=request.cache_salt,
        cache_bypass=request.cache_bypass,
        guide=guide,
    )
    check = _Check()
    _check_prompt(check, submit, len(request.resume_token_ids), _prompt_field(request.prompt), limits)
    num_entries = len(submit.prompt_token_ids) * (1 + (request.sampling.num_prompt_logprobs or 0))
    if request.sampling.num_prompt_logprobs is not None and num_entries > limits.max_prompt_logprob_entries:
        most = limits.max_prompt_logprob_entries
        description = f"{num_entries} entries (as many per prompt token as this and 1 more); at most {most}"
        check.fail("output.prompt_logprobs", description)
    allowed = request.sampling.allowed_token_ids
    if allowed and request.min_tokens and set(allowed) <= {*eos, *request.stop_token_ids}:
        check.fail("sampling.allowed_token_ids", "min_tokens leaves none of them to sample: all of them stop")
    check.settle()
    return submit


def tokenize_request(
    message: tokenizer_pb2.TokenizeRequest, *, served_model_name: str, limits: Limits
) -> TokenizeRequest:
    """Raises UnknownModelError, InvalidRequestError."""
    check_model(message.model, served_model_name)
    check = _Check()
    prompt: TextInput | ChatInput = TextInput("")
    match message.WhichOneof("input"):
        case "text":
            _check_text(check, "text", [message.text], limits)
            prompt = _text(message.text, message.encode)
        case "chat":
            prompt = _chat(check, message.chat, limits)
            check.that(not message.HasField("encode"), "encode", "only with text")
        case _:
            check.fail("input", "one of text and chat is required")
    check.settle()
    return TokenizeRequest(prompt, message.with_pieces)


def detokenize_request(
    message: tokenizer_pb2.DetokenizeRequest, *, served_model_name: str, limits: Limits
) -> DetokenizeRequest:
    """Raises UnknownModelError, InvalidRequestError."""
    check_model(message.model, served_model_name)
    check = _Check()
    token_ids = check.token_ids("ids", message.ids, limits.vocab_size, limits.max_model_len)
    check.settle()
    return DetokenizeRequest(token_ids, _or(message, "skip_special_tokens", default=True))


def abort_labels(message: admin_pb2.AbortRequest) -> list[str]:
    """Raises InvalidRequestError."""
    check = _Check()
    labels = list(message.request_ids)
    if check.that(1 <= len(labels) <= ABORT_IDS_MAX, "request_ids", f"1 to {ABORT_IDS_MAX} ids"):
        bad = [position for position, label in enumerate(labels) if not _LABEL.fullmatch(label)]
        for position in bad[:NUM_VIOLATIONS_PER_LIST_MAX]:
            check.fail(f"request_ids[{position}]", _LABEL_BOUNDS)
    check.settle()
    return labels


def drain_grace_s(message: admin_pb2.DrainRequest) -> float | None:
    """None: absent. Raises InvalidRequestError."""
    if not message.HasField("grace"):
        return None
    check = _Check()
    seconds, nanos = message.grace.seconds, message.grace.nanos
    valid = 0 <= seconds <= DRAIN_GRACE_S_MAX and 0 <= nanos < 1_000_000_000
    check.that(valid, "grace", f"must be a duration in [0, {DRAIN_GRACE_S_MAX}] seconds")
    check.settle()
    return seconds + nanos / 1e9


def check_model(model: str, served_model_name: str) -> None:
    """Absent and empty mean whichever is served. Raises UnknownModelError, InvalidRequestError if it cannot be one."""
    if len(model) > MODEL_NAME_CHARS_MAX:
        raise InvalidRequestError([FieldViolation("model", f"at most {MODEL_NAME_CHARS_MAX} characters")])
    if model and model != served_model_name:
        raise UnknownModelError(served_model_name)


def tokens(
    request: GenerateRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
) -> list[inference_pb2.Token]:
    """The `tokens` of a delta: empty unless token_ids or logprobs were asked for."""
    if request.sampling.num_logprobs is None or logprobs is None:
        return [inference_pb2.Token(id=token_id) for token_id in token_ids] if request.output.token_ids else []
    return [
        inference_pb2.Token(
            id=token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[
                inference_pb2.TokenLogprob(id=top_id, logprob=logprob)
                for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def prompt_tokens(prompt_token_ids: Sequence[int], scores: PromptLogprobs) -> Iterator[list[inference_pb2.Token]]:
    """The tokens of a prompt with their logprobs, in parts, each a few milliseconds' work: there may be thousands."""
    num_top = scores.num_top
    logprobs, ranks = memoryview(scores.logprobs).cast("f"), memoryview(scores.ranks).cast("i")
    top_token_ids, top_logprobs = memoryview(scores.top_token_ids).cast("i"), memoryview(scores.top_logprobs).cast("f")
    yield [inference_pb2.Token(id=prompt_token_ids[0])]
    num_per_part = max(1, PROMPT_ENTRIES_PER_PART // (1 + num_top))
    for start in range(0, len(logprobs), num_per_part):
        yield [
            inference_pb2.Token(
                id=prompt_token_ids[place + 1],
                logprob=logprobs[place],
                rank=ranks[place],
                top=[
                    inference_pb2.TokenLogprob(id=top_token_ids[entry], logprob=top_logprobs[entry])
                    for entry in range(place * num_top, (place + 1) * num_top)
                ],
            )
            for place in range(start, min(start + num_per_part, len(logprobs)))
        ]


def finish(
    reason: FinishReason, *, matched: str | None = None, matched_token_id: int | None = None
) -> inference_pb2.Finish:
    """The numbers of the two enums are the same; a test holds them to it."""
    return inference_pb2.Finish(
        reason=inference_pb2.FinishReason.Name(reason), matched=matched, matched_token_id=matched_token_id
    )


def _or(message: Message, field: str, *, default: bool) -> bool:
    """An optional flag, or its default where that is not false."""
    return bool(getattr(message, field)) if message.HasField(field) else default


def _text(text: str, encode: inference_pb2.EncodeOptions) -> TextInput:
    return TextInput(text, _or(encode, "add_special_tokens", default=True), encode.parse_special)


def _check_text(check: _Check, field: str, texts: Sequence[str], limits: Limits) -> None:
    """To encode a text takes many times its size. Where no bound is known, that of the message is the only one."""
    most = limits.max_text_bytes
    if most is not None and (num_bytes := sum(len(text.encode()) for text in texts)) > most:
        check.fail(field, f"{num_bytes} bytes; {limits.max_prompt_tokens} tokens are at most {most}")


def _prompt(check: _Check, message: inference_pb2.GenerateRequest, limits: Limits) -> PromptInput:
    kind = message.WhichOneof("input")
    if message.HasField("encode"):
        check.that(kind == "text", "encode", "only with text")
    if kind == "text":
        _check_text(check, "text", [message.text], limits)
        return _text(message.text, message.encode)
    if kind == "chat":
        return _chat(check, message.chat, limits)
    if kind is None:
        check.fail("input", "one of text, token_ids and chat is required")
    else:
        check.that(len(message.token_ids.ids) > 0, "token_ids.ids", "at least one id")
    return TokenInput(check.token_ids("token_ids.ids", message.token_ids.ids, limits.vocab_size, limits.max_model_len))


def _chat(check: _Check, chat: inference_pb2.Chat, limits: Limits) -> ChatInput:
    field = "chat.messages"
    in_bounds = 1 <= len(chat.messages) <= limits.max_chat_messages
    if not check.that(in_bounds, field, f"1 to {limits.max_chat_messages} messages"):
        return ChatInput(())
    # A role becomes part of the template's own words, and there it might complete the string of a special token.
    bad = [position for position, turn in enumerate(chat.messages) if not _ROLE.fullmatch(turn.role)]
    for position in bad[:NUM_VIOLATIONS_PER_LIST_MAX]:
        check.fail(f"{field}[{position}].role", "must be 1 to 64 letters, digits, dots, hyphens and underscores")
    # A template may leave some of it out (old reasoning), but the bound is a large multiple of what usual text needs.
    _check_text(check, field, [turn.content for turn in chat.messages], limits)
    turns = tuple(ChatTurn(turn.role, turn.content, turn.parse_special) for turn in chat.messages)
    return ChatInput(turns, _or(chat, "add_generation_prompt", default=True))


def _sampling(
    check: _Check, message: inference_pb2.GenerateRequest, limits: Limits, defaults: SamplingDefaults
) -> Callable[[Callable[[], int]], SamplingParams]:
    """Checks the options; gives what makes them effective once the rest of the request is valid, too."""
    options = message.sampling

    def number(name: str, default: float, least: float, most: float) -> float:
        if not options.HasField(name):
            return default
        return check.number(f"sampling.{name}", getattr(options, name), least, most)

    temperature = number("temperature", defaults.temperature, 0, 100)
    top_p = number("top_p", defaults.top_p, 0, 1)
    if options.HasField("top_p") and top_p == 0:
        check.fail("sampling.top_p", "must be in (0, 1]")
    values: dict[str, Any] = {
        "min_p": number("min_p", defaults.min_p, 0, 1),
        "presence_penalty": number("presence_penalty", 0.0, -2, 2),
        "frequency_penalty": number("frequency_penalty", 0.0, -2, 2),
        "repetition_penalty": number("repetition_penalty", defaults.repetition_penalty, 0.01, 100),
    }
    top_k = defaults.top_k
    if options.HasField("top_k"):
        top_k = check.integer("sampling.top_k", options.top_k, 0, INT32_MAX)
    logit_bias = _logit_bias(check, options, limits)
    allowed = check.token_ids(
        "sampling.allowed_token_ids", options.allowed_token_ids, limits.vocab_size, limits.vocab_size
    )
    check.that(len(set(allowed)) == len(allowed), "sampling.allowed_token_ids", "must be distinct")
    num_logprobs = _num_logprobs(check, message.output, "logprobs", limits)
    num_prompt_logprobs = _num_logprobs(check, message.output, "prompt_logprobs", limits)

    def effective(draw_seed: Callable[[], int]) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
            top_p=max(top_p, TOP_P_MIN),
            top_k=top_k,
            seed=options.seed if options.HasField("seed") else draw_seed(),
            logit_bias=logit_bias,
            allowed_token_ids=allowed,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            **values,
        )

    return effective


def _num_logprobs(check: _Check, output: inference_pb2.OutputOptions, name: str, limits: Limits) -> int | None:
    if not output.HasField(name):
        return None
    return check.integer(f"output.{name}", getattr(output, name), 0, limits.max_logprobs)


def _logit_bias(check: _Check, options: inference_pb2.SamplingOptions, limits: Limits) -> tuple[tuple[int, float], ...]:
    """In order of id: a map has none of its own, and the same request should make the same Submit."""
    field = "sampling.logit_bias"
    if len(options.logit_bias) > limits.vocab_size:
        check.fail(field, f"{len(options.logit_bias)} entries; at most {limits.vocab_size}")
        return ()
    bias = dict(sorted(options.logit_bias.items()))
    bad_ids = [token_id for token_id in bias if token_id >= limits.vocab_size]
    bad_values = [token_id for token_id, value in bias.items() if not -100 <= value <= 100]
    for token_id in bad_ids[:NUM_VIOLATIONS_PER_LIST_MAX]:
        check.fail(f"{field}[{token_id}]", f"the id must be in [0, {limits.vocab_size})")
    for token_id in bad_values[:NUM_VIOLATIONS_PER_LIST_MAX]:
        check.fail(f"{field}[{token_id}]", "the value must be in [-100, 100]")
    return tuple((token_id, value + 0.0) for token_id, value in bias.items())


def _token_bounds(check: _Check, message: inference_pb2.GenerateRequest, limits: Limits) -> tuple[int | None, int]:
    """max_tokens and min_tokens."""
    stopping = message.stopping
    max_tokens = None
    least = 0 if message.output.HasField("prompt_logprobs") else 1
    if stopping.HasField("max_tokens"):
        max_tokens = check.integer("stopping.max_tokens", stopping.max_tokens, least, limits.max_output_tokens)
    most = limits.max_output_tokens
    if max_tokens is not None and least <= max_tokens <= most:
        most = max_tokens
    description = f"must be in [0, max_tokens], and max_tokens is {most} here"
    check.that(0 <= stopping.min_tokens <= most, "stopping.min_tokens", description)
    return max_tokens, stopping.min_tokens


def _stop_strings(check: _Check, stop_strings: Sequence[str], limits: Limits) -> tuple[str, ...]:
    field = "stopping.stop_strings"
    check.that(len(stop_strings) <= limits.max_stop_strings, field, f"at most {limits.max_stop_strings} strings")
    for position, stop in enumerate(stop_strings[: limits.max_stop_strings]):
        if not 1 <= len(stop.encode()) <= limits.max_stop_string_bytes:
            check.fail(f"{field}[{position}]", f"must be 1 to {limits.max_stop_string_bytes} bytes")
    return tuple(stop_strings)


def _output(check: _Check, output: inference_pb2.OutputOptions) -> OutputOptions:
    stream_interval = 1
    if output.HasField("stream_interval"):
        stream_interval = check.integer("output.stream_interval", output.stream_interval, 1, STREAM_INTERVAL_MAX)
    return OutputOptions(
        text=_or(output, "text", default=True),
        token_ids=output.token_ids,
        skip_special_tokens=_or(output, "skip_special_tokens", default=True),
        stream_interval=stream_interval,
    )


def _guide(check: _Check, message: inference_pb2.GenerateRequest, limits: Limits) -> GuideSource | None:
    """Its form and size; what it says is the guide compiler's business."""
    if not message.HasField("guided"):
        return None
    check.that(not message.stopping.ignore_eos, "stopping.ignore_eos", "not with guided, whose end is an EOS")
    guided = message.guided
    kind = guided.WhichOneof("guide")
    if kind == "json_object":
        check.that(guided.json_object, "guided.json_object", "must be true")
        return GuideSource(GuideKind.JSON_OBJECT)
    if kind == "choice":
        return _choice(check, guided.choice.options, limits)
    if kind is None:
        check.fail("guided", "a guide is required")
        return None
    text = str(getattr(guided, kind))
    num_bytes = len(text.encode())
    if not 1 <= num_bytes <= limits.max_guide_bytes:
        check.fail(f"guided.{kind}", f"{num_bytes} bytes; must be 1 to {limits.max_guide_bytes}")
    return GuideSource(_GUIDE_KINDS[kind], text)


def _choice(check: _Check, options: Sequence[str], limits: Limits) -> GuideSource | None:
    field = "guided.choice.options"
    if not 1 <= len(options) <= limits.max_guide_choices:
        check.fail(field, f"1 to {limits.max_guide_choices} strings")
        return None
    empty = [position for position, option in enumerate(options) if not option]
    for position in empty[:NUM_VIOLATIONS_PER_LIST_MAX]:
        check.fail(f"{field}[{position}]", "must not be empty")
    num_bytes = sum(len(option.encode()) for option in options)
    check.that(num_bytes <= limits.max_guide_bytes, field, f"{num_bytes} bytes; at most {limits.max_guide_bytes}")
    return GuideSource(GuideKind.CHOICE, options=tuple(dict.fromkeys(options)))


def _prompt_field(prompt: PromptInput) -> str:
    match prompt:
        case TextInput():
            return "text"
        case ChatInput():
            return "chat"
        case TokenInput():
            return "token_ids.ids"


def _check_prompt(check: _Check, submit: Submit, num_resumed_tokens: int, field: str, limits: Limits) -> None:
    """Resumed tokens are output: the prompt alone is held to its limit, both together to the context."""
    prompt = submit.prompt_token_ids
    num_tokens = len(prompt) + num_resumed_tokens
    if not prompt:
        check.fail(field, "at least one token")
    elif len(prompt) > limits.max_prompt_tokens:
        check.fail(field, f"{len(prompt)} tokens; at most {limits.max_prompt_tokens}")
    elif num_tokens > limits.max_model_len:
        check.fail("resume_token_ids", f"{num_tokens} tokens together with the prompt; at most {limits.max_model_len}")
    elif max(prompt) >= limits.vocab_size:  # a tokenizer may know more tokens than its model
        check.fail(field, f"becomes token ids that the model does not have; each must be in [0, {limits.vocab_size})")
