"""Which blocks a sequence holds, and which of its computed tokens others may share.

What lives here: the arithmetic from tokens to blocks, and all writes to a sequence's block table. What must not: who
runs and who waits (`scheduler.py`).

Every change is a check and then a commit (`can_allocate`/`allocate`, `can_append`/`append`), so nothing is ever rolled
back. `allocate` gives the blocks of all known tokens at once: a sequence that was let in can compute its whole prompt
without asking again, and only the growth of outputs can run into a shortage.

**Sequences of one request** begin with the same prompt and share its full blocks with whichever of them runs, by
reference count alone: whether the prefix cache has them, or may be asked, does not matter. The first to run computes
them; a later one may take them before that is done, and computes nothing until it is (`Sequence.provider`). Since the
rest of the prompt, less than a block, is computed by each for itself, no block is ever copied. The prompt is so
computed once, except by a sequence that is let in when none of its siblings runs and the cache does not have it.

A block is offered to the prefix cache once all its tokens are computed, generated ones included. A prefix is never the
whole prompt: at least one token must be computed to have logits. So a sequence writes only behind its shared blocks,
and a block that others can find is never written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from scheduler.core.block_pool import BlockPool
from scheduler.core.request import Sequence, SequenceStatus


class Start(NamedTuple):
    """What a sequence that is let in begins with."""

    prefix: list[int]
    """Blocks that are there already."""
    provider: Sequence | None = None
    """The running sibling that they are of, if it has not computed all of them yet."""


class KVCacheManager:
    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks that begin this sequence's tokens; empty if it bypasses the cache. Holds nothing.

        What is still to be scored is not taken: a token that is not computed has no logits.
        """
        if not self._enable_prefix_caching or sequence.request.cache_bypass:
            return []
        size, token_ids, pool = self.block_size, sequence.token_ids, self.pool
        content_id: int | str = sequence.request.cache_salt
        prefix = []
        for end in range(size, _num_tokens_to_take_max(sequence) + 1, size):
            block_id = pool.find((content_id, tuple(token_ids[end - size : end])))
            if block_id is None:
                break
            prefix.append(block_id)
            content_id = pool.content_id(block_id)
        return prefix

    def find_start(self, sequence: Sequence) -> Start:
        """The longer of what the cache has and what a sibling shares; nothing for one that still has its blocks."""
        if sequence.block_table:
            return Start([])
        prefix = self.find_prefix(sequence)
        siblings = sequence.request.sequences
        if len(siblings) == 1:
            return Start(prefix)
        num_tokens_max = min(_num_tokens_to_take_max(sequence), sequence.num_prompt_tokens)
        for sibling in siblings:
            if sibling.status is not SequenceStatus.RUNNING or sibling.provider is not None:
                continue
            num_tokens = num_tokens_max
            if sibling.order > sequence.order:  # it may have to give way before it has computed any more
                num_tokens = min(num_tokens, sibling.num_computed_tokens)
            num_blocks = num_tokens // self.block_size
            if num_blocks > len(prefix):
                is_computed = sibling.num_computed_tokens >= num_blocks * self.block_size
                return Start(sibling.block_table[:num_blocks], None if is_computed else sibling)
        return Start(prefix)

    def num_free_blocks_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Free blocks that `allocate` or `complete` will use up: all but those that it has, and those of the prefix
        that somebody holds.
        """
        num_blocks = -(-len(sequence.token_ids) // self.block_size) - len(sequence.block_table)
        return num_blocks - sum(self.pool.is_held(block_id) for block_id in prefix)

    def num_freed_by(self, sequences: Iterable[Sequence], prefix: list[int]) -> int:
        """Blocks outside of `prefix` that would be free if all of these let go of theirs."""
        counts = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        for block_id in prefix:
            counts.pop(block_id, None)
        return sum(self.pool.num_holders(block_id) == count for block_id, count in counts.items())

    def can_allocate(self, sequence: Sequence, prefix: list[int], num_spare_blocks: int) -> bool:
        """Whether there are blocks for all known tokens, and `num_spare_blocks` would be left."""
        return self.num_free_blocks_needed(sequence, prefix) + num_spare_blocks <= self.num_free_blocks

    def allocate(self, sequence: Sequence, start: Start) -> None:
        """Give `sequence` the blocks of its known tokens. `start` is of `find_start`, with no block taken since."""
        assert not sequence.block_table
        prefix = start.prefix
        self.pool.hold(prefix)
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        sequence.block_table = prefix + self.pool.take(num_blocks - len(prefix))
        sequence.provider = start.provider
        sequence.num_shared_tokens = len(prefix) * self.block_size
        sequence.num_computed_tokens = 0 if start.provider is not None else sequence.num_shared_tokens
        # A sibling's blocks may have no name yet; they are offered once more then.
        is_named = bool(prefix) and self.pool.is_cached(prefix[-1])
        sequence.num_registered_blocks = len(prefix) if is_named else 0
        sequence.last_content_id = self.pool.content_id(prefix[-1]) if is_named else sequence.request.cache_salt

    def complete(self, sequence: Sequence) -> list[int]:
        """Add the blocks that `sequence`, which has others, lacks for its known tokens. Returns them."""
        block_ids = self.pool.take(self.num_free_blocks_needed(sequence, []))
        sequence.block_table += block_ids
        return block_ids

    def provide(self, sequence: Sequence) -> None:
        """Let those siblings go on that wait for no more than `sequence` has computed."""
        for sibling in sequence.request.sequences:
            if sibling.provider is sequence and sibling.num_shared_tokens <= sequence.num_computed_tokens:
                sibling.provider = None
                sibling.num_computed_tokens = sibling.num_shared_tokens

    def can_append(self) -> bool:
        return self.pool.num_free > 0

    def append(self, sequence: Sequence) -> int:
        """Add one block to the table and return its id."""
        (block_id,) = self.pool.take(1)
        sequence.block_table.append(block_id)
        return block_id

    def num_slots_left(self, sequence: Sequence) -> int:
        """Tokens that can still be computed into the blocks held."""
        return len(sequence.block_table) * self.block_size - sequence.num_computed_tokens

    def register(self, sequence: Sequence) -> None:
        """Offer the blocks filled since the last call to the prefix cache."""
        if not self._enable_prefix_caching or sequence.request.cache_bypass:
            return
        size, token_ids = self.block_size, sequence.token_ids
        for index in range(sequence.num_registered_blocks, sequence.num_computed_tokens // size):
            key = (sequence.last_content_id, tuple(token_ids[index * size : (index + 1) * size]))
            sequence.last_content_id = self.pool.register(sequence.block_table[index], key)
            sequence.num_registered_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Take all blocks back; what was computed in them stays findable until they are needed."""
        self.register(sequence)
        self._release(sequence)

    def free_and_forget(self, sequence: Sequence) -> None:
        """Take all blocks back and make sure that nobody finds them: their contents are not to be trusted."""
        self.pool.forget(sequence.block_table)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.provider = None


def _num_tokens_to_take_max(sequence: Sequence) -> int:
    """Leading tokens that need not be computed anew: all but the last, and but those that are still to be scored."""
    num_tokens = len(sequence.token_ids) - 1
    return min(num_tokens, sequence.num_scored_tokens) if sequence.is_scored else num_tokens
