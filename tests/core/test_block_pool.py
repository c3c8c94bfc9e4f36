from __future__ import annotations

import pytest

from scheduler.core.block_pool import BlockPool

HASH_MODULUS = 2**61 - 1
"""CPython hashes an int to itself modulo this prime."""


def test_take_and_release() -> None:
    """Taken blocks are distinct and used; released ones are free again; the sum is always the total."""
    pool = BlockPool(4)
    block_ids = pool.take(3)
    assert len(set(block_ids)) == 3
    assert (pool.num_used, pool.num_free) == (3, 1)
    pool.release(block_ids[:2])
    assert (pool.num_used, pool.num_free) == (1, 3)


def test_shared_block_is_freed_by_its_last_holder() -> None:
    """A block held twice stays used after one release."""
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.register(block_id, ("", (1, 2)))
    pool.hold([block_id])
    pool.release([block_id])
    assert pool.is_held(block_id)
    pool.release([block_id])
    assert pool.num_used == 0


def test_release_of_a_free_block_is_refused() -> None:
    """Releasing more often than holding is a bug of ours and is found at once."""
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError):
        pool.release(block_ids)


def test_freed_content_is_found_until_evicted() -> None:
    """A released block keeps its content while blank blocks last, and loses it when it is taken."""
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    key = ("", (1, 2))
    pool.register(block_id, key)
    pool.release([block_id])
    (other_id,) = pool.take(1)
    assert other_id != block_id
    assert pool.find(key) == block_id
    assert pool.take(1) == [block_id]
    assert pool.find(key) is None


def test_eviction_takes_the_least_recently_released() -> None:
    """Under shortage the block released longest ago goes first; a hit makes a block young again."""
    pool = BlockPool(3)
    block_ids = pool.take(3)
    for block_id in block_ids:
        pool.register(block_id, ("", (block_id,)))
    pool.release(block_ids)
    pool.hold([block_ids[0]])
    pool.release([block_ids[0]])
    assert pool.take(3) == [block_ids[1], block_ids[2], block_ids[0]]


def test_equal_hashes_are_no_hit() -> None:
    """Token ids that differ are told apart even if their hashes are equal."""
    pool = BlockPool(1)
    (block_id,) = pool.take(1)
    key, colliding = ("", (5, 6)), ("", (5 + HASH_MODULUS, 6))
    assert hash(key) == hash(colliding)
    pool.register(block_id, key)
    assert pool.find(key) == block_id
    assert pool.find(colliding) is None


def test_key_covers_all_before() -> None:
    """The same token ids after another block, or under another salt, are another content."""
    pool = BlockPool(4)
    first, second, third, fourth = pool.take(4)
    first_content = pool.register(first, ("", (1, 2)))
    second_content = pool.register(second, ("salt", (1, 2)))
    assert first_content != second_content
    pool.register(third, (first_content, (3, 4)))
    pool.register(fourth, (second_content, (3, 4)))
    assert pool.find((first_content, (3, 4))) == third
    assert pool.find((second_content, (3, 4))) == fourth
    assert pool.find(("", (3, 4))) is None


def test_content_ids_are_never_reused() -> None:
    """When a block is evicted and its content computed again, what once followed it is not found under the new one."""
    pool = BlockPool(2)
    first, second = pool.take(2)
    content = pool.register(first, ("", (1, 2)))
    pool.register(second, (content, (3, 4)))
    pool.release([first])
    assert pool.take(1) == [first]
    content_again = pool.register(first, ("", (1, 2)))
    assert content_again != content
    assert pool.find((content_again, (3, 4))) is None


def test_second_block_of_equal_content_stays_unknown() -> None:
    """Of two blocks with one content the first is the known one; the other has its name but is not found."""
    pool = BlockPool(2)
    first, second = pool.take(2)
    assert pool.register(first, ("", (1,))) == pool.register(second, ("", (1,)))
    pool.release([second])
    assert pool.find(("", (1,))) == first


def test_forgotten_content_is_not_found() -> None:
    """A forgotten block is not hit any more, and is blank when its last holder lets go."""
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.register(block_ids[0], ("", (1,)))
    pool.forget(block_ids)
    assert pool.find(("", (1,))) is None
    pool.release(block_ids)
    assert pool.take(1) == block_ids
