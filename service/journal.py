"""What each live stream was given and has had.

What lives here: prompt ids, resumed ids, sampling (all in the `Submit`) and the emitted ids of each sequence, from the
moment a request is handed over until its call ends. What must not: I/O, text. From this alone a stream is taken up by
another engine (the sampler's noise is a function of seed, index and position; stop strings and the like are functions
of the ids), and a death can tell which requests the dead engine had. Bounded by admission (how many) and by max_tokens
(how long).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from scheduler.messages import SequenceOutput, SequenceStart, Submit


@dataclass(slots=True)
class JournalEntry:
    """One live stream."""

    submit: Submit
    """As the call made it."""
    label: str = ""
    """The caller's `request_id`."""
    is_replayed: bool = False
    """Whether it goes on after its engine's death."""
    emitted: dict[int, list[int]] = field(init=False)
    """Sequence → token ids that engines have put out; resumed ones are in the `Submit`."""
    finished: set[int] = field(default_factory=set)
    """The sequences that have their finish reason."""
    num_cached_tokens: int = 0
    """Prompt tokens that its first engine took from the prefix cache."""
    is_prompt_told: bool = False
    """Whether an engine has put out the prompt's logprobs."""
    sent: Submit | None = None
    """As it was last sent to an engine; None: never yet."""
    message_ordinal: int = 0
    """How many messages that engine had been sent when this request was."""
    num_sent: int = 0
    """Attempts, counted when sent."""
    num_fruitless_deaths: int = 0
    """Dying steps it was in, since an attempt of it last brought a token."""
    _was_alone: bool = False
    """Whether it `is_alone`, as of the last output."""
    _nums_resumed: dict[int, int] = field(init=False)
    """Sequence → output tokens that it had before the call."""

    def __post_init__(self) -> None:
        self.emitted = {start.index: [] for start in self.submit.sequences}
        self._nums_resumed = {start.index: len(start.resume_token_ids) for start in self.submit.sequences}

    @property
    def has_output(self) -> bool:
        """True once an engine has put out anything."""
        return bool(self.finished) or any(self.emitted.values())

    @property
    def is_finished(self) -> bool:
        """True once every sequence has its finish reason."""
        return len(self.finished) == len(self.emitted)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the longest sequence, resumed ones included."""
        return max(map(self._num_tokens, self.emitted))

    @property
    def has_progressed(self) -> bool:
        """Whether the present attempt has brought a token."""
        return self.sent is not None and any(
            self._num_tokens(start.index) > len(start.resume_token_ids) for start in self.sent.sequences
        )

    @property
    def is_alone(self) -> bool:
        """Whether a sequence of it was sent as a suspect's, and is not past the place where an engine died."""
        if self.sent is None or not self.sent.alone_until:
            return False
        unfinished = self.emitted.keys() - self.finished
        return any(self._num_tokens(index) < self.sent.alone_until for index in unfinished)

    def next_attempt(self, alone_until: int) -> Submit:
        """What the next engine is told: go on with the unfinished sequences, each behind its own last token. What was
        told of the prompt is not asked for again.
        """
        sequences = tuple(
            SequenceStart(start.index, (*start.resume_token_ids, *self.emitted[start.index]))
            for start in self.submit.sequences
            if start.index not in self.finished
        )
        sampling = self.submit.sampling
        if self.is_prompt_told:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(self.submit, sampling=sampling, sequences=sequences, alone_until=alone_until)

    def on_sent(self, submit: Submit, message_ordinal: int) -> None:
        """An attempt of it is with an engine, as that one's so-manieth message."""
        self.sent = submit
        self.num_sent += 1
        self.message_ordinal = message_ordinal
        self._was_alone = self.is_alone

    def record(self, output: SequenceOutput) -> None:
        """Take what one step brought."""
        emitted = self.emitted[output.index]
        if output.num_cached_tokens is not None and not emitted:
            self.num_cached_tokens += output.num_cached_tokens
        self.is_prompt_told |= output.prompt_logprobs is not None
        emitted.extend(output.new_token_ids)
        if output.finish_reason is not None:
            self.finished.add(output.index)

    def gets_past_its_place(self) -> bool:
        """True once of a suspect that, with the last output recorded, all its sequences have finished or are past the
        place where an engine died.
        """
        was_alone, self._was_alone = self._was_alone, self.is_alone
        return was_alone and not self._was_alone

    def _num_tokens(self, index: int) -> int:
        """Output tokens of one sequence, resumed ones included."""
        return self._nums_resumed[index] + len(self.emitted[index])

    def was_received(self, num_messages_received: int) -> bool:
        """Whether an engine that took this many messages off its socket had this one among them."""
        return 0 < self.message_ordinal <= num_messages_received


class Journal:
    """The entries of one server, by the ids that engines know."""

    def __init__(self) -> None:
        self._entries: dict[int, JournalEntry] = {}
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    def next_request_id(self) -> int:
        """An id that no engine of this server has heard before."""
        self._num_ids += 1
        return self._num_ids

    def open(self, submit: Submit, *, label: str = "", is_replayed: bool = False) -> JournalEntry:
        """Begin to keep a stream."""
        assert submit.request_id not in self._entries
        entry = self._entries[submit.request_id] = JournalEntry(submit, label, is_replayed)
        return entry

    def close(self, request_id: int) -> None:
        """Forget a stream; idempotent."""
        self._entries.pop(request_id, None)
