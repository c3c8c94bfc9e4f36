"""Log-probabilities of many positions in a row, packed: what a prompt's are kept in while it is computed in chunks.

What lives here: the packed form, and the way from it to what is told. What must not be here: how they are computed, or
whose they are. An entry takes 8 bytes; as `TokenLogprobs` objects those of one long prompt would take ten times as much
for as long as the prompt runs.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field

from scheduler.messages import TokenLogprobs


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

    def unpack(self) -> tuple[TokenLogprobs, ...]:
        """As they are told."""
        num_top = self.num_top
        top_token_ids, top_logprobs = tuple(self.top_token_ids), tuple(self.top_logprobs)
        return tuple(
            TokenLogprobs(logprob, rank, top_token_ids[start : start + num_top], top_logprobs[start : start + num_top])
            for logprob, rank, start in zip(self.logprobs, self.ranks, itertools.count(step=num_top), strict=False)
        )
