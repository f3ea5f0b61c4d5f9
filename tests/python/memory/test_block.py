"""Block: handles of a pool and blocks made by hand."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import tracemalloc
import weakref
from dataclasses import asdict, fields, is_dataclass, replace

import pytest
from kvpool.memory import Block, BlockPoolAllocator, PoolConfig


@pytest.fixture
def pool() -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=8))


def values(block: Block) -> tuple:
    return (
        block.block_id,
        block.stream,
        block.format,
        block.n_used,
        block.owner,
        block.ever_allocated,
    )


def test_made_by_hand() -> None:
    assert values(Block(3)) == (3, "kv", "fp16", 0, None, False)
    assert values(Block(3, "k", "int4", 2, 9, True)) == (3, "k", "int4", 2, 9, True)
    block = Block(block_id=3, owner=1)
    block.owner, block.n_used, block.stream = None, 4, "v"
    block.block_id, block.format, block.ever_allocated = 5, "int2", True
    assert values(block) == (5, "v", "int2", 4, None, True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_id", "3"),
        ("block_id", True),
        ("stream", None),
        ("format", b"fp16"),
        ("n_used", 1.0),
        ("owner", "me"),
        ("ever_allocated", 1),
    ],
)
def test_made_by_hand_checks_types(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"^\[Block\] {name} must be"):
        Block(**{"block_id": 1, name: wrong})
    with pytest.raises(TypeError, match=rf"^\[Block\] {name} must be"):
        setattr(Block(1), name, wrong)


def test_a_number_that_sets_the_field_it_is_for() -> None:
    """Each value must be dropped once, or the next use of its memory shows another object."""

    class Index:
        def __index__(self) -> int:
            block.n_used = 2**60 + 1
            return 2**60 + 2

    block = Block(1, n_used=2**60)
    for _ in range(100):
        block.n_used = Index()
        assert block.n_used == 2**60 + 2
    references = sys.getrefcount(block.n_used)
    assert references == 2  # the block's own and the call's


def test_wrong_constructor_arguments() -> None:
    with pytest.raises(TypeError, match="block_id"):
        Block()
    with pytest.raises(TypeError):
        Block(1, colour="red")
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del Block(1).owner


def test_handle_reads_through_the_pool(pool: BlockPoolAllocator) -> None:
    (block,) = pool.allocate("k", 2, owner=7, format="int8")
    (other,) = pool.blocks_for(7)
    assert block is not other and block == other
    pool.mark_used(other, 3)
    assert values(block) == (3, "k", "int8", 3, 7, True)
    pool.free([other])
    assert values(block) == (3, "k", "int8", 0, None, True)


def test_writing_goes_through_the_pool(pool: BlockPoolAllocator) -> None:
    (block,) = pool.allocate("k", 4, 1)
    block.n_used = 1
    block.format = "int4"
    (seen,) = pool.blocks_for(1)
    assert (seen.n_used, seen.format, pool.stats.fragmentation()) == (1, "int4", 1 / 8)
    for name, value in (("block_id", 1), ("stream", "v"), ("owner", 2), ("ever_allocated", True)):
        with pytest.raises(AttributeError, match=f"{name} of a pool's block is read-only"):
            setattr(block, name, value)
    with pytest.raises(TypeError, match="format must be a str"):
        block.format = 4
    with pytest.raises(ValueError, match="n_used must be between 0 and 4, got 9"):
        block.n_used = 9
    with pytest.raises(AttributeError):
        block.colour = "red"


def test_handles_of_two_checkouts_differ(pool: BlockPoolAllocator) -> None:
    (first,) = pool.allocate("k", 4, 1)
    pool.free([first])
    (second,) = pool.allocate("k", 4, 1)
    assert first is not second and first.block_id == second.block_id
    assert (first.owner, second.owner) == (None, 1)
    assert first != second


def test_equal_by_value_and_unhashable(pool: BlockPoolAllocator) -> None:
    (block,) = pool.allocate("k", 4, 1)
    assert block == Block(3, "k", "fp16", 4, 1, True)
    assert block != Block(3, "k", "fp16", 3, 1, True)
    assert block != (3, "k", "fp16", 4, 1, True) and block != "block"
    with pytest.raises(TypeError, match="unhashable"):
        hash(block)
    with pytest.raises(TypeError):
        _ = block < block


def test_repr_is_a_dataclass_repr(pool: BlockPoolAllocator) -> None:
    text = "Block(block_id=3, stream='k', format='fp16', n_used=4, owner=1, ever_allocated=True)"
    assert repr(pool.allocate("k", 4, 1)[0]) == text
    assert repr(Block(3, "k", "fp16", 4, 1, True)) == text


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copy_names_the_same_reference(pool: BlockPoolAllocator, duplicate: object) -> None:
    (block,) = pool.allocate("k", 4, 1)
    (twin,) = duplicate([block]) if duplicate is copy.deepcopy else [duplicate(block)]
    assert twin is not block
    twin.n_used = 2
    assert block.n_used == 2
    pool.free([twin])
    assert block.owner is None
    hand_made = Block(1, owner=5)
    twin = duplicate(hand_made)
    twin.owner = 6
    assert hand_made.owner == 5


def test_serves_where_a_dataclass_does(pool: BlockPoolAllocator) -> None:
    (block,) = pool.allocate("k", 3, 1)
    assert is_dataclass(Block) and [f.name for f in fields(block)] == list(Block.__match_args__)
    assert asdict(block) == {
        "block_id": 3,
        "stream": "k",
        "format": "fp16",
        "n_used": 3,
        "owner": 1,
        "ever_allocated": True,
    }
    assert values(replace(block, owner=9)) == (3, "k", "fp16", 3, 9, True)
    assert block.owner == 1


def test_pickle_holds_the_values_alone(pool: BlockPoolAllocator) -> None:
    (block,) = pool.allocate("k", 3, 1)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(block, protocol))
        assert loaded == block
        with pytest.raises(ValueError, match="belongs to no pool"):
            pool.free([loaded])


def test_handle_keeps_its_pool_alive() -> None:
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=8))
    gone = weakref.ref(pool)
    blocks = pool.allocate("k", 8, 1)
    del pool
    assert blocks[0].owner == 1
    del blocks
    assert gone() is None, "a pool is no part of a cycle"


def test_handles_are_small_and_leak_nothing(pool: BlockPoolAllocator) -> None:
    assert sys.getsizeof(pool.allocate("k", 1, 1)[0]) <= 48
    pool.free_all(1)

    def work() -> None:
        for format in ("fp16", "int4"):
            for block in pool.allocate("k", 8, 1, format):
                repr(block), copy.copy(block), block == block
            shared = pool.fork(1)
            pool.writable(shared[0])
            pool.free_all(shared[1].owner)
            pool.free_all(1)
            for bad in (lambda: pool.allocate("k", 99, 1), lambda: pool.free([Block(1)])):
                with contextlib.suppress(RuntimeError, ValueError):
                    bad()
        pickle.loads(pickle.dumps(Block(1, owner=2)))

    work()
    gc.collect()
    kept = pool, Block, "fp16"
    references = [sys.getrefcount(value) for value in kept]
    tracemalloc.start()
    for _ in range(20):
        work()
    grown = []
    for _ in range(3):
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            work()
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    # What other tests left behind may go or come meanwhile, but not each time; an object a round
    # would be 16 KiB at the least.
    counts = [sys.getrefcount(value) for value in kept]
    assert all(now <= then for now, then in zip(counts, references, strict=True)), counts
    assert min(grown) < 12_000
    assert not gc.is_tracked(pool.allocate("k", 1, 1)[0])
