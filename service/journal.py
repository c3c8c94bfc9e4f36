"""What each live stream was given and has had.

What lives here: prompt ids, resumed ids, sampling (all in the `Submit`) and the emitted ids of each sequence, from the
moment an engine is given a request until its call ends. What must not: I/O, text. With this a stream can be taken up
by another engine, and a death can tell which requests the dead engine had. Bounded by admission (how many) and by
max_tokens (how long).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.messages import SequenceOutput, Submit


@dataclass(slots=True)
class JournalEntry:
    """One live stream."""

    submit: Submit
    emitted: tuple[list[int], ...] = ()
    """Token ids that engines have put out, by sequence; resumed ones are in the `Submit`."""
    num_cached_tokens: int = 0
    """Prompt tokens that the engine took from its prefix cache."""
    message_ordinal: int = 0
    """How many messages its engine had been sent when this request was; 0: never sent."""
    num_finished: int = field(default=0)

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

    def record(self, output: SequenceOutput) -> None:
        """Take what one step brought."""
        self.emitted[output.index].extend(output.new_token_ids)
        self.num_cached_tokens += output.num_cached_tokens or 0
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

    def open(self, submit: Submit) -> JournalEntry:
        """Begin to keep a stream."""
        assert submit.request_id not in self._entries
        entry = self._entries[submit.request_id] = JournalEntry(submit)
        return entry

    def close(self, request_id: int) -> None:
        """Forget a stream; idempotent."""
        self._entries.pop(request_id, None)
