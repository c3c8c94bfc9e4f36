from __future__ import annotations

import pytest

from scheduler.core.kv_cache_manager import KVCacheManager, Start
from scheduler.core.request import Sequence, make_request
from tests.fakes import make_submit


def make_kv(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, enable_prefix_caching=enable_prefix_caching)


def make_sequence(prompt: range, *, cache_salt: str = "", cache_bypass: bool = False) -> Sequence:
    submit = make_submit(1, prompt, cache_salt=cache_salt, cache_bypass=cache_bypass)
    return make_request(submit, step_id=0, arrival=1, first_seq_id=1, max_model_len=100).sequences[0]


def compute(kv: KVCacheManager, sequence: Sequence) -> None:
    """Place `sequence` and have all its known tokens computed."""
    kv.allocate(sequence, kv.find_start(sequence))
    sequence.num_computed_tokens = len(sequence.token_ids)
    kv.register(sequence)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocate_covers_all_known_tokens(num_tokens: int, num_blocks: int) -> None:
    """A placed sequence holds just the blocks its known tokens need."""
    kv = make_kv()
    sequence = make_sequence(range(num_tokens))
    kv.allocate(sequence, Start([]))
    assert len(sequence.block_table) == num_blocks
    assert kv.num_slots_left(sequence) == num_blocks * 4


def test_can_allocate_is_exact() -> None:
    """can_allocate says yes exactly as long as the blocks and the spare ones are there."""
    kv = make_kv(num_blocks=3)
    sequence = make_sequence(range(8))
    assert kv.can_allocate(sequence, [], num_spare_blocks=1)
    assert not kv.can_allocate(sequence, [], num_spare_blocks=2)


def test_unheld_prefix_blocks_count_as_needed() -> None:
    """Hitting a cached block that nobody holds uses up a free block; hitting a held one does not."""
    kv = make_kv(num_blocks=3)
    first = make_sequence(range(9))
    compute(kv, first)
    second = make_sequence(range(9))
    prefix = kv.find_prefix(second)
    assert len(prefix) == 2
    assert kv.num_free_blocks_needed(second, prefix) == 1
    assert not kv.can_allocate(second, prefix, 0)
    kv.free(first)
    assert kv.num_free_blocks_needed(second, prefix) == 3
    assert kv.can_allocate(second, prefix, 0)


@pytest.mark.parametrize(("num_tokens", "num_cached_tokens"), [(8, 4), (9, 8), (12, 8), (4, 0), (13, 12)])
def test_prefix_is_never_the_whole_prompt(num_tokens: int, num_cached_tokens: int) -> None:
    """However much is cached, at least one token is left to compute."""
    kv = make_kv()
    compute(kv, make_sequence(range(16)))
    sequence = make_sequence(range(num_tokens))
    kv.allocate(sequence, kv.find_start(sequence))
    assert sequence.num_computed_tokens == num_cached_tokens


def test_only_computed_blocks_are_found() -> None:
    """A block is found once all its tokens are computed, not when it is allocated or half full."""
    kv = make_kv()
    first, second = make_sequence(range(12)), make_sequence(range(12))
    kv.allocate(first, Start([]))
    kv.register(first)
    assert kv.find_prefix(second) == []
    first.num_computed_tokens = 7
    kv.register(first)
    assert kv.find_prefix(second) == first.block_table[:1]
    first.num_computed_tokens = 8
    kv.register(first)
    assert kv.find_prefix(second) == first.block_table[:2]


def test_free_registers_what_was_computed() -> None:
    """Blocks filled since the last registration are found after free, and only those."""
    kv = make_kv()
    first = make_sequence(range(12))
    kv.allocate(first, Start([]))
    first.num_computed_tokens = 9
    table = first.block_table
    kv.free(first)
    assert kv.find_prefix(make_sequence(range(12))) == table[:2]
    assert (first.block_table, first.num_computed_tokens) == ([], 0)


@pytest.mark.parametrize("writer_bypasses", [True, False])
def test_bypass(writer_bypasses: bool) -> None:
    """A request that bypasses the cache neither leaves blocks to be found nor finds any."""
    kv = make_kv()
    compute(kv, make_sequence(range(12), cache_bypass=writer_bypasses))
    assert kv.find_prefix(make_sequence(range(12), cache_bypass=not writer_bypasses)) == []


def test_salt() -> None:
    """Blocks are found under their own salt only."""
    kv = make_kv()
    compute(kv, make_sequence(range(12), cache_salt="a"))
    assert len(kv.find_prefix(make_sequence(range(12), cache_salt="a"))) == 2
    assert kv.find_prefix(make_sequence(range(12), cache_salt="b")) == []
    assert kv.find_prefix(make_sequence(range(12))) == []


def test_disabled() -> None:
    """Without prefix caching nothing is ever found."""
    kv = make_kv(enable_prefix_caching=False)
    compute(kv, make_sequence(range(12)))
    assert kv.find_prefix(make_sequence(range(12))) == []


def test_forget_spares_other_holders() -> None:
    """Distrusted blocks are found by nobody, but who already holds one keeps it."""
    kv = make_kv()
    first, second = make_sequence(range(12)), make_sequence(range(12))
    compute(kv, first)
    compute(kv, second)
    shared = second.block_table[:2]
    assert first.block_table[:2] == shared
    kv.free_and_forget(first)
    assert kv.find_prefix(make_sequence(range(12))) == []
    assert all(kv.pool.is_held(block_id) for block_id in shared)
    kv.free(second)
    assert kv.pool.num_used == 0


def test_chain_goes_on_behind_a_known_block() -> None:
    """A sequence that computed a block somebody else had registered first still registers what follows it."""
    kv = make_kv()
    first, second = make_sequence(range(12)), make_sequence(range(16))
    kv.allocate(first, Start([]))
    kv.allocate(second, Start([]))
    for sequence in (first, second):
        sequence.num_computed_tokens = len(sequence.token_ids)
        kv.register(sequence)
    assert kv.find_prefix(make_sequence(range(20))) == [*first.block_table[:3], second.block_table[3]]
