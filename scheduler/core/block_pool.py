"""The KV blocks: who holds them, which are free, and which contents are worth keeping.

What lives here: block ids, reference counts, the free blocks, the map of cached contents. What must not: sequences,
requests, tensors.

A block is held (reference count above 0) or free. A free block is either blank or cached: its content may still be
hit, until a shortage evicts it, least recently released first. Held + free = total, always.

A cached content is known by its key: the *content id* of the block before it (for a first block: the salt) and its
own token ids. Content ids are never used twice, so equal keys mean, by induction, equal salts and equal token ids from
the very first on. The key is looked up in a dict, which compares the token ids themselves after their hash has
matched. A content whose predecessor was evicted can no longer be reached and ages out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BlockKey = tuple[int | str, tuple[int, ...]]
"""(content id of the block before, or the salt; the block's token ids)."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        """Free blocks without content; the last one is handed out next."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, least recently released first."""
        self._cached: dict[BlockKey, int] = {}
        """Key → block, for every cached content, held or not."""
        self._keys: list[BlockKey | None] = [None] * num_blocks
        """Block → key of its content, the inverse of `_cached`."""
        self._content_ids = [0] * num_blocks
        """Block → id of its content; meaningful only where there is a key."""
        self._last_content_id = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_held(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 0

    def num_holders(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def take(self, num_blocks: int) -> list[int]:
        """Hold `num_blocks` free blocks without content; evicts cached ones when no blank ones are left."""
        assert num_blocks <= self.num_free, "take without a check"
        block_ids = []
        for _ in range(num_blocks):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._evictable.popitem(last=False)
                self._drop_content(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold blocks found by `find`, or held by somebody else: once more, if so."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Let go of each block once. Give a table's last block first: a chain is best evicted from its end."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} released but not held"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._evictable[block_id] = None

    def find(self, key: BlockKey) -> int | None:
        """The block with exactly this content, or None."""
        return self._cached.get(key)

    def is_cached(self, block_id: int) -> bool:
        """Whether `find` may give this block."""
        return self._keys[block_id] is not None

    def content_id(self, block_id: int) -> int:
        """The name of a cached block's content, for the key of the block after it."""
        assert self._keys[block_id] is not None
        return self._content_ids[block_id]

    def register(self, block_id: int, key: BlockKey) -> int:
        """Make a held, fully computed block's content known, and return its content id.

        Where another block already has this content, that one stays the known one and `block_id` stays without. If
        `block_id` is known by another key, a predecessor of that was evicted: nobody could have found it any more.
        """
        assert self.is_held(block_id)
        known_block_id = self._cached.get(key)
        if known_block_id is not None:
            return self._content_ids[known_block_id]
        if self._keys[block_id] is not None:
            self._drop_content(block_id)
        self._last_content_id += 1
        self._cached[key] = block_id
        self._keys[block_id] = key
        self._content_ids[block_id] = self._last_content_id
        return self._last_content_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let nobody hit these held blocks' contents any more."""
        for block_id in block_ids:
            assert self.is_held(block_id)
            if self._keys[block_id] is not None:
                self._drop_content(block_id)

    def _drop_content(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._cached[key]
        self._keys[block_id] = None
