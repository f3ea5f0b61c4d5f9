"""Faults that users of other pools have reported, by their ids."""

from __future__ import annotations

import random

import pytest
from kvpool.memory import BlockPoolAllocator, BlockPoolExhaustedError, PoolConfig


def make(block_size: int, n_blocks: int, **options: object) -> BlockPoolAllocator:
    """One list, as in the cases."""
    config = PoolConfig(block_size=block_size, n_blocks=n_blocks, separate_kv=False, **options)
    return BlockPoolAllocator(config)


def test_field_A1_block_listed_twice_comes_back_once_after_its_second_owner() -> None:
    pool = make(16, 16)
    first = pool.allocate("k", 16, 1)
    second = pool.fork(1, 2)
    pool.free(first * 2)
    assert pool.n_free() == 15 and second[0].owner == 2
    pool.free(second * 2)
    assert (pool.n_free(), pool.stats.n_frees) == (16, 1)
    pool.check_invariants()


def test_field_A2_double_free_is_silent_and_harmless() -> None:
    pool = make(16, 4)
    blocks = pool.allocate("k", 16, 1)
    pool.free(blocks)
    pool.free(blocks)
    assert pool.n_free() == 4
    assert pool.allocate("k", 16, 1)[0].block_id != pool.allocate("k", 16, 1)[0].block_id


def test_field_A10_two_clean_up_paths() -> None:
    pool = make(16, 4)
    blocks = pool.allocate("k", 17, 1)
    pool.free_all(1)
    pool.free(blocks)
    pool.free_all(1)
    assert pool.n_free() == 4
    pool.check_invariants()


def test_field_A11_gauges_stay_within_bounds() -> None:
    pool = make(4, 12, grow_on_exhaustion=True, max_blocks=16)
    choice = random.Random(11)
    for _ in range(2000):
        owner, other = choice.randrange(4), choice.randrange(4)
        try:
            match choice.randrange(6):
                case 0 | 1:
                    pool.allocate("k", choice.randrange(1, 20), owner)
                case 2:
                    pool.free(choice.sample(held := pool.blocks_for(owner), len(held) // 2))
                case 3:
                    pool.fork(owner, other)
                case 4:
                    pool.free_all(owner)
                case 5:
                    pool.shrink("k", choice.randrange(8))
        except (BlockPoolExhaustedError, ValueError):
            pass
        stats = pool.stats.snapshot()
        assert 0 <= stats.blocks_in_use() <= stats.n_blocks
        assert 0.0 <= stats.fragmentation() <= 1.0
        assert stats.blocks_in_use() + pool.n_free() == stats.n_blocks


def test_field_A12_made_up_ids_are_refused() -> None:
    pool = make(16, 8)
    pool.allocate("k", 32, 1)
    before = pool.stats.snapshot()
    with pytest.raises(TypeError, match=r"blocks\[0\] must be a Block, got 0"):
        pool.free([0, 0, -1, 8])
    assert pool.stats == before and len(pool.blocks_for(1)) == 2


def test_field_D15_failed_allocation_changes_nothing_but_its_counter() -> None:
    pool = make(16, 3)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 64, 1)
    stats = pool.stats
    assert (pool.n_free(), stats.n_exhausted, stats.n_allocations) == (3, 1, 0)


def test_field_E17_shrink_leaves_blocks_in_use() -> None:
    pool = make(16, 10)
    live = pool.allocate("k", 64, 1)
    assert pool.shrink("k", 2) == 4
    assert (pool.blocks_for(1), pool.n_free()) == (live, 2)
    assert pool.shrink("k", 2) == 0
    with pytest.raises(ValueError, match="target_free must be >= 0, got -1"):
        pool.shrink("k", -1)


def test_field_I11_call_back_that_calls_the_pool_works() -> None:
    """What Python code the pool runs at all, it runs before it takes its lock."""
    pool = make(16, 8)

    class Index:
        def __index__(self) -> int:
            pool.free_all(2)
            return pool.n_free()

    pool.allocate("k", 32, 2)
    blocks = pool.allocate("k", Index(), 1)
    assert blocks[0].n_used == 8
    assert pool.blocks_for(2) == []
    pool.check_invariants()
