"""What each live stream was given and has had.

What lives here: prompt ids, resumed ids, sampling (all in the `Submit`) and the emitted ids of each sequence, from the
moment a request is handed over until its call ends. What must not: I/O, text. From this alone a stream is taken up by
another engine (the sampler's noise is a function of seed, index and position; stop strings and the like are functions
of the ids), and a death can tell which requests the dead engine had. Bounded by admission (how many) and by max_tokens
(how long).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.messages import SequenceOutput, Submit


@dataclass(slots=True)
class JournalEntry:
    """One live stream."""

    submit: Submit
    """As the call made it."""
    label: str = ""
    """The caller's `request_id`."""
    is_replayed: bool = False
    """Whether it goes on after its engine's death."""
    emitted: tuple[list[int], ...] = ()
    """Token ids that engines have put out, by sequence; resumed ones are in the `Submit`."""
    num_cached_tokens: int = 0
    """Prompt tokens that its first engine took from the prefix cache."""
    sent: Submit | None = None
    """As it was last sent to an engine; None: never yet."""
    message_ordinal: int = 0
    """How many messages that engine had been sent when this request was."""
    num_sent: int = 0
    """Attempts, counted when sent."""
    num_fruitless_deaths: int = 0
    """Dying steps it was in, since an attempt of it last brought a token."""
    num_finished: int = 0

    def __post_init__(self) -> None:
        self.emitted = tuple([] for _ in range(self.submit.num_sequences))

    @property
    def has_output(self) -> bool:
        """True once an engine has put out anything."""
        return self.num_finished > 0 or any(self.emitted)

    @property
    def is_finished(self) -> bool:
        """True once every sequence has its finish reason."""
        return self.num_finished == len(self.emitted)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the longest sequence, resumed ones included."""
        return len(self.submit.resume_token_ids) + max(len(token_ids) for token_ids in self.emitted)

    @property
    def has_progressed(self) -> bool:
        """Whether the present attempt has brought a token."""
        return self.sent is not None and self.num_output_tokens > len(self.sent.resume_token_ids)

    def gets_past_its_place(self, num_new_tokens: int) -> bool:
        """True of a suspect that, with the last `num_new_tokens` it got, is past the place where an engine died, or has
        finished before it.
        """
        if self.sent is None:
            return False
        num_tokens = self.num_output_tokens
        was_before = num_tokens - num_new_tokens < self.sent.alone_until
        return was_before and (num_tokens >= self.sent.alone_until or self.is_finished)

    def next_attempt(self, alone_until: int) -> Submit:
        """What the next engine is told: go on behind the last token that came."""
        resume_token_ids = (*self.submit.resume_token_ids, *self.emitted[0])
        return replace(self.submit, resume_token_ids=resume_token_ids, alone_until=alone_until)

    def record(self, output: SequenceOutput) -> None:
        """Take what one step brought."""
        emitted = self.emitted[output.index]
        if output.num_cached_tokens is not None and not emitted:
            self.num_cached_tokens += output.num_cached_tokens
        emitted.extend(output.new_token_ids)
        self.num_finished += output.finish_reason is not None

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
