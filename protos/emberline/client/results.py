"""What a caller gets: frozen values, made of the protocol's messages.

What lives here: the shapes of an answer, and their making. What must not: gRPC, requests. Field by field they are the
messages of `inference.proto`, whose comments hold; what may be absent there is None here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emberline.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could have been."""

    id: int
    logprob: float
    """Natural logarithm of the model's probability."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token."""

    id: int
    logprob: float | None = None
    """Natural logarithm of the model's probability, if logprobs were asked for."""
    rank: int | None = None
    """1 is the most likely."""
    top: tuple[TokenLogprob, ...] = ()
    """The best ones of the position, best first."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What became of the prompt."""

    count: int
    """Tokens."""
    cached: int
    """Of these, taken from the prefix cache."""
    seed: int
    """The seed in force, given or drawn."""
    tokens: tuple[Token, ...] = ()
    """If prompt_logprobs were asked for; the first one has no logprob."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended."""

    reason: str
    """`EOS`, `STOP_STRING`, `STOP_TOKEN`, `MAX_TOKENS`, `CONTEXT_LIMIT` or `TIME_LIMIT`; a reason that is newer than
    this client is its number."""
    matched: str | None = None
    """The stop string found."""
    matched_token_id: int | None = None
    """The token that ended it, for EOS and STOP_TOKEN."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, summed over its sequences."""

    prompt: int
    completion: int
    """Tokens this call brought; over all attempts of a stream that was resumed."""
    cached: int
    """Prompt tokens that the first attempt took from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence."""

    request_id: str
    index: int
    """Which of the n sequences."""
    text: str
    """New text: whole characters; may be empty."""
    tokens: tuple[Token, ...] = ()
    """New tokens, if token_ids or logprobs were asked for."""
    prompt: Prompt | None = None
    """On the stream's first delta."""
    finish: Finish | None = None
    """On a sequence's last delta."""
    usage: Usage | None = None
    """On the stream's last delta."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sequence of a whole answer."""

    index: int
    text: str
    finish: Finish
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    completions: tuple[Completion, ...]
    """By index."""
    prompt: Prompt
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first sequence, which is the only one unless `n` was asked for."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A text or a conversation as token ids."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Each token's own text, if asked for."""
    max_prompt_tokens: int
    """The most that a prompt may have, for comparison."""


def delta(message: inference_pb2.GenerateResponse) -> Delta:
    """Of a stream's message."""
    return Delta(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        tokens=_tokens(message.tokens),
        prompt=_prompt(message.prompt) if message.HasField("prompt") else None,
        finish=_finish(message.finish) if message.HasField("finish") else None,
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def answer(message: inference_pb2.CompleteResponse) -> Answer:
    """Of Complete's message."""
    completions = tuple(
        Completion(one.index, one.text, _finish(one.finish), _tokens(one.tokens)) for one in message.completions
    )
    return Answer(message.request_id, completions, _prompt(message.prompt), _usage(message.usage))


class Fold:
    """Deltas to a whole answer: what Complete does, for a stream."""

    def __init__(self) -> None:
        self._last: Delta | None = None
        self._prompt: Prompt | None = None
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[Token]] = {}
        self._finishes: dict[int, Finish] = {}

    def add(self, new: Delta) -> None:
        """In the order of the stream."""
        self._last = new
        self._prompt = self._prompt or new.prompt
        self._texts.setdefault(new.index, []).append(new.text)
        self._tokens.setdefault(new.index, []).extend(new.tokens)
        if new.finish is not None:
            self._finishes[new.index] = new.finish

    def answer(self) -> Answer:
        """After the last one."""
        last = self._last
        assert last is not None, "an answer without a message is none"
        assert last.usage is not None, "the stream has not ended"
        assert self._prompt is not None, "the first message tells of the prompt"
        completions = tuple(
            Completion(index, "".join(texts), self._finishes[index], tuple(self._tokens[index]))
            for index, texts in sorted(self._texts.items())
        )
        return Answer(last.request_id, completions, self._prompt, last.usage)


def _tokens(messages: Iterable[inference_pb2.Token]) -> tuple[Token, ...]:
    return tuple(
        Token(
            id=message.id,
            logprob=message.logprob if message.HasField("logprob") else None,
            rank=message.rank if message.HasField("rank") else None,
            top=tuple(TokenLogprob(one.id, one.logprob) for one in message.top),
        )
        for message in messages
    )


def _prompt(message: inference_pb2.PromptInfo) -> Prompt:
    return Prompt(message.count, message.cached, message.seed, _tokens(message.tokens))


def _finish(message: inference_pb2.Finish) -> Finish:
    value = inference_pb2.FinishReason.DESCRIPTOR.values_by_number.get(message.reason)
    return Finish(
        reason=value.name.removeprefix("FINISH_REASON_") if value is not None else str(message.reason),
        matched=message.matched if message.HasField("matched") else None,
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
    )


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(message.prompt, message.completion, message.cached)
