"""Faults of the published package that must not come back, by their ids."""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import pytest
from kvpool.memory import Block, BlockPoolAllocator, BlockPoolExhaustedError, PoolConfig


def make(n_blocks: int = 8, **options: object) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **options))


def test_fault_F01_stale_handle_cannot_touch_the_next_owners_block() -> None:
    pool = make()
    stale = pool.allocate("k", 4, owner=1)
    pool.free(stale)
    held = pool.allocate("k", 4, owner=2)
    assert held[0].block_id == stale[0].block_id
    pool.free(stale)
    assert pool.blocks_for(2) == held
    with pytest.raises(ValueError, match=r"\[BlockPoolAllocator::mark_used\] .* stale"):
        pool.mark_used(stale[0], 1)
    with pytest.raises(ValueError, match="mark_used"):
        stale[0].n_used = 1
    with pytest.raises(ValueError, match="set_format"):
        stale[0].format = "int4"
    assert (held[0].owner, held[0].n_used, held[0].format) == (2, 4, "fp16")


def test_fault_F02_block_of_another_pool_is_refused_also_late_in_a_list() -> None:
    pool, other = make(), make()
    ours, theirs = pool.allocate("k", 8, 1), other.allocate("k", 8, 1)
    with pytest.raises(ValueError, match=r"\[BlockPoolAllocator::free\]"):
        pool.free([*ours, theirs[0]])
    assert len(pool.blocks_for(1)) == len(other.blocks_for(1)) == 2
    assert pool.stats.n_frees == other.stats.n_frees == 0
    with pytest.raises(ValueError, match="mark_used"):
        pool.mark_used(theirs[0], 1)
    pool.check_invariants()
    other.check_invariants()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_fault_F03_freeing_a_copy_and_the_block_frees_once(duplicate: object) -> None:
    pool = make()
    (block,) = pool.allocate("k", 4, 1)
    twin = duplicate(block)
    pool.free([twin])
    pool.free([block])
    assert (pool.n_free("k"), pool.stats.n_frees) == (4, 1)
    ids = [b.block_id for b in pool.allocate("k", 16, 2)]
    assert len(set(ids)) == 4


def test_fault_F04_hand_made_block_is_refused() -> None:
    pool = make()
    for made in (Block(999, "k", owner=1), Block(3, "k", owner=1, n_used=4, ever_allocated=True)):
        with pytest.raises(ValueError, match=r"blocks\[0\] belongs to no pool"):
            pool.free([made])
    assert len(pool.allocate("k", 16, 2)) == 4
    assert not pool.is_active(1)


@pytest.mark.parametrize(
    "call", ["allocate", "free_all", "register_owner", "release_owner", "blocks_for", "fork"]
)
def test_fault_F05_owner_none_is_refused(call: str) -> None:
    pool = make()
    arguments = ("k", 4, None) if call == "allocate" else (None,)
    with pytest.raises(TypeError, match=rf"\[BlockPoolAllocator::{call}\] owner must be an int"):
        getattr(pool, call)(*arguments)
    assert (pool.n_free("k"), len(pool.history)) == (4, 0)


def test_fault_F07_growth_is_decided_before_it_happens() -> None:
    pool = make(4, grow_on_exhaustion=True, max_blocks=6)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 20, 1)
    assert (pool.stats.n_blocks, pool.stats.n_grown, pool.n_free("k")) == (4, 0, 2)
    assert len(pool.allocate("v", 16, 1)) == 4


@pytest.mark.parametrize("n_used", [-1, 5, 2**70])
def test_fault_F08_mark_used_takes_only_what_fits(n_used: int) -> None:
    pool, other = make(), make()
    (block,) = pool.allocate("k", 4, 1)
    with pytest.raises(ValueError, match=r"\[BlockPoolAllocator::mark_used\] n_used must"):
        pool.mark_used(block, n_used)
    with pytest.raises(ValueError, match="block"):
        pool.mark_used(other.allocate("k", 4, 1)[0], 1)
    with pytest.raises(TypeError, match="n_used must be an int"):
        pool.mark_used(block, 1.0)
    pool.free([block])
    with pytest.raises(ValueError, match="stale"):
        pool.mark_used(block, 1)
    with pytest.raises(ValueError, match="belongs to no pool"):
        pool.mark_used(Block(3), 1)


def test_fault_F09_fill_written_through_the_block_stays_on_the_books() -> None:
    pool = make()
    blocks = pool.allocate("k", 16, 1)
    for block in blocks:
        block.n_used = 2
    assert pool.stats.fragmentation() == 0.5
    for _ in range(3):
        for block in blocks:
            block.n_used = 4
    assert pool.stats.fragmentation() == 0.0
    pool.free(blocks)
    pool.check_invariants()
    assert pool.stats.fragmentation() == 0.0


def test_fault_F11_free_takes_a_generator_that_uses_the_pool() -> None:
    pool = make()
    blocks = pool.allocate("k", 12, 1)

    def chosen() -> object:
        for block in blocks:
            pool.allocate("v", 4, owner=2)
            assert pool.n_free("v") >= 1
            yield block

    pool.free(chosen())
    assert (pool.n_free("k"), len(pool.blocks_for(2))) == (4, 3)

    def fails() -> object:
        yield from pool.allocate("k", 4, 3)
        raise KeyError("late")

    with pytest.raises(KeyError, match="late"):
        pool.free(fails())
    assert len(pool.blocks_for(3)) == 1


def test_fault_F11_finaliser_that_uses_the_pool_during_a_list() -> None:
    """Objects that a collection ends while a list of blocks is made may call the pool."""
    import gc

    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=4096))

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            pool.free(pool.allocate("k", 100, 7))

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            Cycle()
            blocks = pool.allocate("k", 100, 1)
            assert [b.owner for b in blocks] == [1] * 100
            pool.free_all(1)
    finally:
        gc.set_threshold(*threshold)
    pool.check_invariants()


def test_fault_F15_free_of_a_list_costs_the_same_in_any_order() -> None:
    """A quadratic free took seconds here; the bound only tells that from a linear one."""
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=2 * 65_536))
    blocks = pool.allocate("k", 65_536, 1)
    start = time.perf_counter()
    pool.free(reversed(blocks))
    assert time.perf_counter() - start < 5
    assert pool.n_free("k") == 65_536


def test_fault_F16_explicit_registration_lasts() -> None:
    pool = make()
    pool.register_owner(1)
    pool.free(pool.allocate("k", 4, 1))
    with pytest.raises(ValueError, match="owner 1 is still active"):
        pool.register_owner(1)
    pool.allocate("k", 4, 1)
    with pytest.raises(ValueError, match=r"release_owner\] owner 1 still has 1 blocks"):
        pool.release_owner(1)
    pool.free_all(1)
    pool.register_owner(1)


def test_fault_F50_the_allocator_imports_without_mlx() -> None:
    code = """
import sys
from kvpool.memory import BlockPoolAllocator, BlockPoolExhaustedError, OwnerAlreadyActiveError
import kvpool, kvpool.core.exceptions, kvpool.memory.block_pool
BlockPoolAllocator().allocate("k", 1, 1)
heavy = [m for m in sys.modules if m.split(".")[0] in ("mlx", "mlx_lm", "numpy")]
assert not heavy, heavy
ours = [m for m in sys.modules if m.startswith("kvpool")]
assert len(ours) < 20, ours
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
