"""Log-probabilities of many positions in a row, packed: how a prompt's are kept while it is computed in chunks.

What lives here: the growing form, and the way from it to the message. What must not: how they are computed, or whose
they are. An entry takes 8 bytes; as objects, those of one long prompt would take ten times as much for as long as the
prompt runs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler.messages import PromptLogprobs


@dataclass(slots=True)
class PackedLogprobs:
    """One entry per position, and `num_top` best tokens for each."""

    num_top: int
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("i"))
    top_token_ids: array[int] = field(default_factory=lambda: array("i"))
    """Of all positions, one after the other."""
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.logprobs)

    def extend(self, following: PackedLogprobs) -> None:
        """Append the positions that come next."""
        assert following.num_top == self.num_top, "as many best tokens for each position"
        self.logprobs.extend(following.logprobs)
        self.ranks.extend(following.ranks)
        self.top_token_ids.extend(following.top_token_ids)
        self.top_logprobs.extend(following.top_logprobs)

    def message(self) -> PromptLogprobs:
        """As they are told."""
        return PromptLogprobs(
            num_top=self.num_top,
            logprobs=self.logprobs.tobytes(),
            ranks=self.ranks.tobytes(),
            top_token_ids=self.top_token_ids.tobytes(),
            top_logprobs=self.top_logprobs.tobytes(),
        )
