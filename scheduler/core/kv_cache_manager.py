"""Which blocks a sequence holds, and which of its computed tokens others may share.

What lives here: the arithmetic from tokens to blocks, and all writes to a sequence's block table. What must not: who
runs and who waits (`scheduler.py`).

Every change is a check and then a commit (`can_allocate`/`allocate`, `can_append`/`append`), so nothing is ever rolled
back. `allocate` gives the blocks of all known tokens at once: a sequence that was let in can compute its whole prompt
without asking again, and only the growth of outputs can run into a shortage.

A block is offered to the prefix cache once all its tokens are computed, generated ones included. A prefix is never the
whole prompt: at least one token must be computed to have logits. So a sequence writes only behind its shared blocks,
and a block that others can find is never written again.
"""

from __future__ import annotations

from scheduler.core.block_pool import BlockPool
from scheduler.core.request import Sequence


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
        num_tokens_max = len(token_ids) - 1
        if sequence.is_scored:
            num_tokens_max = min(num_tokens_max, sequence.num_scored_tokens)
        for end in range(size, num_tokens_max + 1, size):
            block_id = pool.find((content_id, tuple(token_ids[end - size : end])))
            if block_id is None:
                break
            prefix.append(block_id)
            content_id = pool.content_id(block_id)
        return prefix

    def num_free_blocks_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Free blocks that `allocate` will use up: all but those of the prefix that somebody holds."""
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        return num_blocks - sum(self.pool.is_held(block_id) for block_id in prefix)

    def can_allocate(self, sequence: Sequence, prefix: list[int], num_spare_blocks: int) -> bool:
        """Whether there are blocks for all known tokens, and `num_spare_blocks` would be left."""
        return self.num_free_blocks_needed(sequence, prefix) + num_spare_blocks <= self.num_free_blocks

    def allocate(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give `sequence` the blocks of its known tokens. `prefix` is of `find_prefix`, with no block taken since."""
        assert not sequence.block_table
        self.pool.hold(prefix)
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        sequence.block_table = prefix + self.pool.take(num_blocks - len(prefix))
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_registered_blocks = len(prefix)
        sequence.last_content_id = self.pool.content_id(prefix[-1]) if prefix else sequence.request.cache_salt

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
