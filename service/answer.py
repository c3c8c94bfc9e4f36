"""From a request's outputs to the messages of its answer.

What lives here: which text and tokens each message carries, and what the first and the last one add. What must not:
gRPC, waiting, engines. One `Answer` per call; it knows the tokens only in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from emberline.v1 import inference_pb2
from scheduler.messages import FinishReason, PromptLogprobs, SequenceOutput, Submit, TokenLogprobs
from service import convert
from service.account import Account
from service.request import GenerateRequest
from service.sequence_text import SequenceText


@dataclass(slots=True)
class SequenceState:
    """One sequence of a call: its text, and its tokens so far."""

    text: SequenceText
    is_finished: bool = False
    held_back: inference_pb2.GenerateResponse | None = None
    """What has come since the last message, until there is enough for the next one."""
    num_held_back: int = 0
    """Tokens in it, those without text yet included."""


@dataclass(slots=True)
class Answer:
    """One request after tokenization."""

    request: GenerateRequest
    submit: Submit
    sequences: list[SequenceState]
    account: Account
    is_first: bool = True
    is_prompt_due: bool = field(init=False)
    """Whether logprobs of the prompt are still to come, without which nothing else is told."""
    early: list[SequenceOutput] = field(default_factory=list)
    """What has come meanwhile of the other sequences than the one that brings them."""

    def __post_init__(self) -> None:
        self.is_prompt_due = self.submit.sampling.num_prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def delta(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        reason: FinishReason | None,
    ) -> inference_pb2.GenerateResponse | None:
        """The message for some new tokens of one sequence, or None if there is nothing to say yet."""
        sequence = self.sequences[index]
        # Resumed tokens with a stop string are all there is; only their prompt is still of interest.
        pushed = sequence.text.resumed or sequence.text.push(token_ids, reason)
        kept = token_ids[: pushed.num_kept_tokens]
        self.account.num_output_tokens += len(kept)
        message = sequence.held_back or inference_pb2.GenerateResponse(request_id=self.account.label, index=index)
        sequence.held_back = None
        sequence.num_held_back += len(kept)
        if self.request.output.text:
            message.text += pushed.text
        message.tokens.extend(
            convert.tokens(self.request, kept, logprobs[: len(kept)] if logprobs is not None else None)
        )
        if pushed.finish_reason is not None:
            output = kept or self.submit.sequences[index].resume_token_ids
            self._finish(message, sequence, pushed.finish_reason, pushed.matched_stop, output[-1] if output else None)
        elif not message.HasField("prompt") and (
            sequence.num_held_back < self.request.output.stream_interval or not (message.text or message.tokens)
        ):
            sequence.held_back = message
            return None
        sequence.num_held_back = 0
        self._introduce(message)
        return message

    def cut(self) -> Iterator[inference_pb2.GenerateResponse]:
        """The last messages of the sequences that are not finished when `max_time` is over."""
        self.is_prompt_due = False
        yield from self.assemble(())
        for index, sequence in enumerate(self.sequences):
            if not sequence.is_finished:
                delta = self.delta(index, (), None, FinishReason.TIME_LIMIT)
                assert delta is not None, "an end is always told"
                yield delta

    def over_before_it_began(self) -> inference_pb2.GenerateResponse | None:
        """The only message of a call whose resumed tokens hold a stop string, else None. Of every other end that they
        had reached the engine tells, and of this one too where it has the prompt to score.
        """
        resumed = self.sequences[0].text.resumed
        if resumed is None or resumed.finish_reason is None or self.submit.sampling.num_prompt_logprobs is not None:
            return None
        message = inference_pb2.GenerateResponse(request_id=self.account.label)
        self._finish(message, self.sequences[0], resumed.finish_reason, resumed.matched_stop, None)
        self._introduce(message)
        return message

    def _finish(
        self,
        message: inference_pb2.GenerateResponse,
        sequence: SequenceState,
        reason: FinishReason,
        matched: str | None,
        last_token_id: int | None,
    ) -> None:
        by_token = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        finish = convert.finish(reason, matched=matched, matched_token_id=last_token_id if by_token else None)
        message.finish.CopyFrom(finish)
        sequence.is_finished = True
        self.account.finish = reason.name
        if self.is_finished:
            account = self.account
            message.usage.prompt = account.num_prompt_tokens
            message.usage.completion = account.num_output_tokens
            message.usage.cached = account.num_cached_tokens

    def _introduce(self, message: inference_pb2.GenerateResponse) -> None:
        if self.is_first:
            self.is_first = False
            message.prompt.count = self.account.num_prompt_tokens
            message.prompt.cached = self.account.num_cached_tokens
            message.prompt.seed = self.submit.sampling.seed

    def take_prompt(self, scores: PromptLogprobs) -> Iterator[None]:
        """Make the prompt's tokens part of the first message, some with each step: see `convert.prompt_tokens`."""
        message = inference_pb2.GenerateResponse(request_id=self.account.label)
        for part in convert.prompt_tokens(self.submit.prompt_token_ids, scores):
            message.prompt.tokens.extend(part)
            yield
        assert self.is_prompt_due, "an engine tells it once"
        self.is_prompt_due = False
        self.sequences[0].held_back = message

    def assemble(self, outputs: Sequence[SequenceOutput]) -> Iterator[inference_pb2.GenerateResponse]:
        """One message per sequence for all that has come."""
        self.early += outputs
        if self.is_prompt_due:
            return
        outputs, self.early = self.early, []
        if self.is_first:
            outputs.sort(key=lambda output: output.index != 0)  # the prompt is told with its sequence
        by_index: dict[int, list[SequenceOutput]] = {}
        for output in outputs:
            by_index.setdefault(output.index, []).append(output)
        for index, parts in by_index.items():
            if self.sequences[index].is_finished:
                continue  # the engine ran past a stop string
            token_ids = [token_id for part in parts for token_id in part.new_token_ids]
            logprobs = None
            if parts[0].logprobs is not None:
                logprobs = [value for part in parts for value in part.logprobs or ()]
            delta = self.delta(index, token_ids, logprobs, parts[-1].finish_reason)
            if delta is not None:
                yield delta

    @property
    def finished(self) -> list[int]:
        """The sequences that have ended, by whomever."""
        return [index for index, sequence in enumerate(self.sequences) if sequence.is_finished]
