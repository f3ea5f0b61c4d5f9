"""The allocator's API: every call, argument and default, and what it does beyond its text."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields

import pytest
from kvpool.memory import (
    AllocationStats,
    Block,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolConfig,
    block_pool,
)

CALLS = {
    "allocate": "(self, /, stream, n_tokens, owner, format='fp16', *, layers=1)",
    "allocate_kv": "(self, /, n_tokens, owner, format='fp16', *, value_format=None, layers=1)",
    "free": "(self, /, blocks)",
    "free_all": "(self, /, owner)",
    "blocks_for": "(self, /, owner)",
    "mark_used": "(self, /, block, n_used)",
    "register_owner": "(self, /, owner)",
    "release_owner": "(self, /, owner)",
    "is_active": "(self, /, owner)",
    "new_owner": "(self, /)",
    "fork": "(self, /, owner, new_owner=None)",
    "writable": "(self, /, block)",
    "reserve": "(self, /, owner, n_tokens, *, layers=1)",
    "reserve_blocks": "(self, /, owner, n_key_blocks, n_value_blocks)",
    "n_reserved": "(self, /, stream, owner)",
    "n_free": "(self, /, stream='k')",
    "n_available": "(self, /, stream='k')",
    "n_allocatable": "(self, /, stream, owner)",
    "shrink": "(self, /, stream, target_free)",
    "check_invariants": "(self, /)",
}


def make(block_size: int = 4, n_blocks: int = 8, **options: object) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("name", CALLS)
def test_signature_and_docstring_of_each_call(name: str) -> None:
    call = getattr(BlockPoolAllocator, name)
    assert str(inspect.signature(call)) == CALLS[name]
    assert len(call.__doc__) > 20


def test_arguments_by_keyword_and_by_position() -> None:
    pool = make()
    by_keyword = pool.allocate(stream="k", n_tokens=1, owner=1, format="int4")
    by_position = pool.allocate("k", 1, 1, "int4")
    assert [b.format for b in by_keyword + by_position] == ["int4", "int4"]
    pool.mark_used(block=by_keyword[0], n_used=3)
    pool.free(blocks=by_keyword)
    assert pool.n_free(stream="k") == 3
    assert pool.shrink(stream="v", target_free=1) == 3
    pool.free_all(owner=1)
    assert pool.blocks_for(owner=1) == []
    name = "".join(["st", "ream"])  # not the interned string
    assert pool.n_free(**{name: "v"}) == 1


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (("k", 1), {}, "argument owner is missing"),
        (("k", 1, 1, "fp16", 1), {}, "takes 4 positional arguments at most, got 5"),
        (("k", 1, 1), {"owner": 2}, "argument owner is given twice"),
        (("k", 1, 1), {"tokens": 2}, "has no argument 'tokens'"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, keywords: dict, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^\[BlockPoolAllocator::allocate\] {message}$"):
        make().allocate(*arguments, **keywords)


def test_constants_of_the_submodule() -> None:
    assert (block_pool.DEFAULT_BLOCK_SIZE, block_pool.DEFAULT_HISTORY_SIZE) == (16, 256)
    assert BlockPoolAllocator.__module__ == Block.__module__ == "kvpool.memory.block_pool"


def test_config_is_kept_and_defaults_to_512_blocks_a_stream() -> None:
    config = PoolConfig(n_blocks=4)
    assert BlockPoolAllocator(config).config is config
    pool = BlockPoolAllocator()
    assert pool.config == PoolConfig()
    assert (pool.n_free("k"), pool.n_free("v")) == (512, 512)
    with pytest.raises(TypeError, match=r"\[BlockPoolAllocator\] config must be a PoolConfig"):
        BlockPoolAllocator(16)


@pytest.mark.parametrize(("n_blocks", "keys", "values"), [(5, 3, 2), (1, 1, 0), (4, 2, 2)])
def test_keys_come_first_and_get_the_odd_block(n_blocks: int, keys: int, values: int) -> None:
    pool = make(n_blocks=n_blocks)
    assert (pool.n_free("k"), pool.n_free("v")) == (keys, values)
    assert ids(pool.allocate("k", 4 * keys, 1)) == list(reversed(range(keys)))
    if values:
        assert ids(pool.allocate("v", 4 * values, 1)) == list(reversed(range(keys, n_blocks)))


def test_free_lists_are_stacks() -> None:
    pool = make()
    blocks = pool.allocate("k", 16, 1)
    assert ids(blocks) == [3, 2, 1, 0]
    pool.free([blocks[1], blocks[3], blocks[0]])
    assert ids(pool.allocate("k", 12, 2)) == [3, 0, 2]
    pool.free_all(2)
    assert ids(pool.allocate("k", 12, 3)) == [2, 0, 3]


@pytest.mark.parametrize("stream", ["k", "v", "kv", "zz", None, 7])
def test_one_list_takes_any_stream(stream: object) -> None:
    pool = make(separate_kv=False)
    (block,) = pool.allocate(stream, 1, 1)
    assert block.stream == "kv"
    assert pool.n_free(stream) == 7
    assert pool.shrink(stream, 5) == 2


@pytest.mark.parametrize("stream", ["kv", "zz", None, 7, "K", ""])
def test_separate_lists_name_the_wrong_stream(stream: object) -> None:
    pool = make()
    for call in (
        lambda: pool.allocate(stream, 1, 1),
        lambda: pool.n_free(stream),
        lambda: pool.shrink(stream, 1),
        lambda: pool.n_available(stream),
        lambda: pool.n_allocatable(stream, 1),
        lambda: pool.n_reserved(stream, 1),
    ):
        with pytest.raises(ValueError, match=f"stream must be 'k' or 'v', got {stream!r}"):
            call()
    assert len(pool.history) == 0


def test_order_of_checks() -> None:
    pool = make()
    with pytest.raises(ValueError, match="n_tokens must be >= 1, got 0"):
        pool.allocate("zz", 0, 1)
    with pytest.raises(ValueError, match="target_free must be >= 0, got -1"):
        pool.shrink("zz", -1)
    with pytest.raises(TypeError, match="owner"):
        pool.allocate("zz", 0, None)


@pytest.mark.parametrize("wrong", [None, True, 1.0, "1", (1,)])
@pytest.mark.parametrize("argument", ["n_tokens", "owner", "layers"])
def test_ints_are_ints(argument: str, wrong: object) -> None:
    pool = make()
    arguments = {"stream": "k", "n_tokens": 1, "owner": 1, "layers": 1, argument: wrong}
    with pytest.raises(TypeError, match=rf"^\[BlockPoolAllocator::allocate\] {argument} must be"):
        pool.allocate(**arguments)
    assert pool.stats.snapshot() == AllocationStats(8)
    assert not pool.is_active(1)


def test_objects_with_an_index_become_ints() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    pool = make()
    blocks = pool.allocate("k", Seven(), owner=Seven())
    assert type(blocks[0].owner) is int and blocks[0].owner == 7
    assert blocks[1].n_used == 3


def test_what_only_looks_like_an_int_is_named() -> None:
    """As an array of floats does: it has __index__, which raises."""

    class Half:
        def __index__(self) -> int:
            raise TypeError("only whole numbers")

    with pytest.raises(
        TypeError, match=r"^\[BlockPoolAllocator::allocate\] n_tokens must be an int"
    ):
        make().allocate("k", Half(), 1)
    with pytest.raises(TypeError, match=r"^\[PoolConfig\] n_blocks must be an int"):
        PoolConfig(n_blocks=Half())


def test_any_text_is_a_format() -> None:
    pool = make()
    for text in ("", "a\0b", "\N{GREEK SMALL LETTER ALPHA}" * 1000):
        assert pool.allocate("k", 1, 1, text)[0].format == text
    with pytest.raises(
        ValueError, match=r"^\[BlockPoolAllocator::allocate\] format must be encodable"
    ):
        pool.allocate("k", 1, 1, "\ud800")


def test_numpy_ints_become_ints() -> None:
    np = pytest.importorskip("numpy")
    pool = make()
    blocks = pool.allocate("k", np.int32(6), owner=np.uint8(3))
    assert type(blocks[0].owner) is int and type(blocks[1].n_used) is int
    pool.mark_used(blocks[1], np.int64(1))
    assert blocks[1].n_used == 1


def test_numbers_beyond_64_bits_name_the_argument() -> None:
    with pytest.raises(ValueError, match="owner must fit in 64 bits"):
        make().allocate("k", 1, 2**63)


def test_negative_and_large_owners() -> None:
    pool = make()
    for owner in (-1, 0, 2**62, -(2**40)):
        assert pool.allocate("k", 1, owner)[0].owner == owner


def test_blocks_are_full_but_the_last() -> None:
    pool = make()
    assert [b.n_used for b in pool.allocate("k", 10, 1)] == [4, 4, 2]
    assert [b.n_used for b in pool.allocate("v", 8, 1)] == [4, 4]


def test_layers_are_runs() -> None:
    pool = make()
    blocks = pool.allocate("k", 5, 1, layers=2)
    assert [b.n_used for b in blocks] == [4, 1, 4, 1]
    keys, values = make(n_blocks=20).allocate_kv(5, 1, "fp16", value_format="int4", layers=3)
    assert [b.n_used for b in keys] == [4, 1] * 3
    assert {b.format for b in values} == {"int4"} and {b.stream for b in values} == {"v"}


def test_allocate_kv_is_both_or_neither() -> None:
    pool = make(n_blocks=7)  # 4 for keys, 3 for values
    with pytest.raises(BlockPoolExhaustedError, match="stream v needs 4 blocks, 3 free of 3"):
        pool.allocate_kv(16, 1)
    assert (pool.n_free("k"), pool.n_free("v")) == (4, 3)
    keys, values = pool.allocate_kv(12, 1, "int8")
    assert {b.format for b in keys + values} == {"int8"}


def test_counters_count_blocks() -> None:
    pool = make()
    blocks = pool.allocate("k", 13, 1)
    assert pool.stats.n_allocations == 4
    pool.free(blocks[:3])
    assert (pool.stats.n_frees, pool.stats.blocks_in_use()) == (3, 1)
    pool.allocate("k", 4, 2)
    assert pool.stats.n_reused == 1
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 40, 2)
    assert (pool.stats.n_exhausted, pool.stats.peak_blocks_in_use) == (1, 4)


def test_fragmentation_is_over_all_managed_blocks() -> None:
    pool = make()
    (block,) = pool.allocate("k", 1, 1)
    assert pool.stats.fragmentation() == 1 / 8
    assert pool.stats.unused_slots() == 3
    pool.mark_used(block, 0)
    assert (pool.stats.fragmentation(), pool.stats.unused_slots()) == (0.0, 4)
    pool.mark_used(block, 2)
    pool.shrink("v", 0)
    assert pool.stats.fragmentation() == 1 / 4
    pool.free([block])
    pool.shrink("k", 0)
    assert (pool.stats.n_blocks, pool.stats.fragmentation()) == (0, 0.0)


def test_history_has_a_snapshot_of_each_change() -> None:
    pool = make()
    assert type(pool.history) is deque and pool.history.maxlen == 256

    def added(call: Callable[[], object], error: type[Exception] | None = None) -> int:
        before = len(pool.history)
        with pytest.raises(error) if error else nullcontext():
            call()
        return len(pool.history) - before

    blocks = pool.allocate("k", 8, 1)
    assert len(pool.history) == 1 and pool.history[-1] == pool.stats.snapshot()
    assert added(lambda: pool.allocate("k", 99, 2), BlockPoolExhaustedError) == 1
    assert added(lambda: pool.free(blocks[:1])) == 1
    assert added(lambda: pool.free(blocks[:1])) == 1  # freed already
    assert added(lambda: pool.free([])) == 1
    assert added(lambda: pool.free_all(99)) == 1
    assert added(lambda: pool.shrink("v", 3)) == 1
    assert added(lambda: pool.shrink("v", 3)) == 0
    assert added(lambda: pool.mark_used(blocks[1], 1)) == 0
    assert added(lambda: pool.register_owner(5)) == 0
    assert added(lambda: pool.release_owner(5)) == 0
    assert added(lambda: (pool.blocks_for(1), pool.n_free("k"), repr(pool))) == 0
    assert added(lambda: pool.allocate("k", 0, 2), ValueError) == 0


def test_history_is_a_copy_and_ends_at_256() -> None:
    pool = make()
    for _ in range(300):
        pool.free([])
    pool.history.clear()
    assert len(pool.history) == 256


def test_growth_shows_in_the_snapshot_of_its_allocation() -> None:
    pool = make(n_blocks=2, grow_on_exhaustion=True)
    pool.allocate("k", 12, 1)
    assert len(pool.history) == 1
    assert (pool.history[0].n_grown, pool.history[0].n_blocks) == (2, 4)


def test_free_of_the_last_block_ends_an_owner_that_nobody_registered() -> None:
    pool = make()
    pool.free(pool.allocate("k", 4, 1))
    assert not pool.is_active(1)
    pool.register_owner(1)
    with pytest.raises(OwnerAlreadyActiveError, match=r"register_owner\] owner 1 is still active"):
        pool.register_owner(1)
    pool.release_owner(1)
    pool.release_owner(1)
    assert not pool.is_active(1)


def test_free_of_a_part_keeps_the_order_of_the_rest() -> None:
    pool = make()
    blocks = pool.allocate("k", 16, 1)
    pool.free([blocks[2]])
    assert ids(pool.blocks_for(1)) == [3, 2, 0]
    assert pool.blocks_for(99) == []


def test_exhaustion_leaves_no_owner_behind() -> None:
    pool = make()
    with pytest.raises(BlockPoolExhaustedError) as caught:
        pool.allocate("k", 17, 9)
    assert not pool.is_active(9)
    error = caught.value
    assert str(error) == "[BlockPoolAllocator::allocate] stream k needs 5 blocks, 4 free of 4"
    assert (error.stream, error.owner, error.needed, error.available, error.managed) == (
        ("k", 9, 5, 4, 4)
    )
    assert pickle.loads(pickle.dumps(error)).needed == 5


@pytest.mark.parametrize("n_tokens", [10**6, 2**32, 10**12, 2**63 - 1])
def test_absurd_requests_are_exhaustion(n_tokens: int) -> None:
    pool = make()
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", n_tokens, 1, layers=3)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_kv(n_tokens, 1, layers=2**62)
    with pytest.raises(BlockPoolExhaustedError):
        pool.reserve(1, n_tokens, layers=2**40)
    assert pool.stats.n_exhausted == 3
    growing = make(grow_on_exhaustion=True, max_blocks=2**62)
    with pytest.raises(BlockPoolExhaustedError):
        growing.allocate("k", 2**33, 1)
    assert growing.stats.n_blocks == growing.config.n_blocks


def test_growth_mints_the_shortfall_with_new_ids() -> None:
    pool = make(n_blocks=4, grow_on_exhaustion=True, max_blocks=7)
    assert ids(pool.allocate("k", 16, 1)) == [5, 4, 1, 0]
    assert (pool.stats.n_blocks, pool.stats.n_grown) == (6, 2)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 8, 1)
    assert ids(pool.allocate("k", 4, 1)) == [6]


def test_shrunk_pool_grows_again_with_ids_never_used() -> None:
    pool = make(n_blocks=4, grow_on_exhaustion=True, max_blocks=4)
    assert pool.shrink("k", 0) == 2
    assert ids(pool.allocate("k", 8, 1)) == [5, 4]
    assert (pool.stats.n_retired, pool.stats.n_blocks) == (2, 4)


def test_shrink_takes_unused_blocks_then_the_coldest() -> None:
    pool = make(n_blocks=8)
    first = pool.allocate("k", 12, 1)  # 3, 2, 1; 0 is never used
    pool.free(first)
    assert pool.shrink("k", 2) == 2
    assert ids(pool.allocate("k", 8, 2)) == [1, 2]


def test_retired_handle_is_stale() -> None:
    pool = make()
    (block,) = pool.allocate("k", 4, 1)
    pool.free([block])
    pool.shrink("k", 0)
    pool.free([block])
    assert (block.owner, block.n_used, block.block_id) == (None, 0, 3)
    with pytest.raises(ValueError, match="mark_used"):
        pool.mark_used(block, 1)


def test_mark_used_of_many_is_all_or_none() -> None:
    pool = make()
    blocks = pool.allocate("k", 8, 1)
    pool.mark_used(blocks, 1)
    pool.mark_used(iter(blocks), 2)
    pool.mark_used(tuple(blocks), 3)
    assert [b.n_used for b in blocks] == [3, 3]
    (stale,) = pool.allocate("v", 4, 1)
    pool.free([stale])
    with pytest.raises(ValueError, match="stale"):
        pool.mark_used([blocks[0], stale], 1)
    with pytest.raises(ValueError, match=r"n_used must be between 0 and 4, got 5"):
        pool.mark_used(blocks, 5)
    with pytest.raises(TypeError, match="blocks must be an iterable of Block, got 3"):
        pool.mark_used(3, 1)
    assert [b.n_used for b in blocks] == [3, 3]


def test_stats_are_live_and_read_only() -> None:
    pool = make()
    stats = pool.stats
    assert stats is pool.stats and isinstance(stats, AllocationStats)
    pool.allocate("k", 5, 1)
    assert (stats.n_allocations, stats.blocks_in_use()) == (2, 2)
    for name in [field.name for field in fields(AllocationStats)]:
        with pytest.raises(AttributeError, match=f"{name} of a pool's stats is read-only"):
            setattr(stats, name, 7)
    with pytest.raises(AttributeError, match="read-only"):
        del stats.n_frees
    snapshot = stats.snapshot()
    assert type(snapshot) is AllocationStats and snapshot == stats and stats == snapshot
    assert stats == pool.stats and stats != AllocationStats(8)
    pool.free_all(1)
    assert snapshot.blocks_in_use() == 2 and snapshot != stats
    assert copy.deepcopy(stats) == pickle.loads(pickle.dumps(stats)) == stats.snapshot()


def test_stats_outlive_their_pool() -> None:
    stats = make().stats
    assert stats.n_blocks == 8


def test_reprs() -> None:
    pool = make()
    inside = (
        "in_use=0/8, allocations=0, frees=0, reused=0, exhausted=0, grown=0, retired=0, peak=0, "
        "fragmentation=0.000"
    )
    assert repr(pool.stats) == repr(pool.stats.snapshot()) == f"AllocationStats({inside})"
    assert repr(pool) == f"BlockPoolAllocator({inside})"


def test_pools_are_true_and_cannot_be_copied_or_pickled() -> None:
    pool = make()
    assert pool
    assert not hasattr(pool, "__len__") and not hasattr(pool, "__enter__")
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^\[BlockPoolAllocator\] a pool cannot be"):
            call(pool)


def test_subclass_that_forgets_init_is_told() -> None:
    class Forgetful(BlockPoolAllocator):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="__init__ was not called"):
        Forgetful().n_free("k")


def test_subclasses_keep_what_they_add() -> None:
    class Named(BlockPoolAllocator):
        name = "unset"

    pool = Named(PoolConfig(n_blocks=2))
    pool.name = "a"
    assert pool.allocate("k", 1, 1)[0].owner == 1 and pool.name == "a"


def test_fork_shares_and_writable_parts() -> None:
    pool = make()
    blocks = pool.allocate("k", 6, 1)
    shared = pool.fork(1)
    new_owner = shared[0].owner
    assert new_owner not in (None, 1) and ids(shared) == ids(blocks)
    assert pool.stats.n_allocations == 2
    with pytest.raises(ValueError, match="mark_used"):
        pool.mark_used(shared[1], 3)
    own = pool.writable(shared[1])
    assert own.block_id != blocks[1].block_id and (own.n_used, own.owner) == (2, new_owner)
    assert shared[1].owner is None
    assert pool.writable(blocks[1]) is blocks[1]
    pool.free_all(1)
    pool.free_all(new_owner)
    assert pool.n_free("k") == 4


def test_minted_owners_are_refused_from_callers() -> None:
    pool, other = make(), make()
    minted = pool.new_owner()
    assert pool.allocate("k", 1, minted)[0].owner == minted
    with pytest.raises(ValueError, match="owner"):
        other.allocate("k", 1, minted)


def test_reservation_is_kept_for_its_owner() -> None:
    pool = make(n_blocks=8)
    pool.reserve(1, 6)
    assert (pool.n_free("k"), pool.n_available("k"), pool.n_reserved("v", 1)) == (4, 2, 2)
    assert (pool.n_allocatable("k", 1), pool.n_allocatable("k", 2)) == (4, 2)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 12, 2)
    pool.allocate("k", 4, 1)
    assert pool.n_reserved("k", 1) == 1
    pool.reserve_blocks(1, 3, 0)
    assert (pool.n_reserved("k", 1), pool.n_reserved("v", 1)) == (3, 0)
    pool.reserve(1, 0)
    assert pool.n_available("k") == 3
    pool.reserve(2, 4, layers=2)
    assert pool.n_reserved("k", 2) == 2
    pool.free_all(2)
    assert pool.n_available("k") == 3 and not pool.is_active(2)


def test_prometheus_text() -> None:
    pool = make()
    pool.allocate("k", 5, 1)
    lines = pool.stats.to_prometheus().splitlines(keepends=True)
    gauges = ["blocks_in_use 2", "blocks_total 8", "fragmentation 0.125000", "peak_blocks_in_use 2"]
    counters = ["allocations_total 2", "frees_total 0", "reused_total 0", "exhausted_total 0"]
    expected = []
    for kind, samples in (
        ("gauge", gauges),
        ("counter", [*counters, "grown_total 0", "retired_total 0"]),
        ("gauge", ["unused_slots 3"]),
    ):
        for sample in samples:
            name = f"veloxquant_block_pool_{sample}"
            expected += [f"# TYPE {name.split()[0]} {kind}\n", f"{name}\n"]
    assert lines == expected
    assert pool.stats.snapshot().to_prometheus(prefix="x").startswith("# TYPE x_blocks_in_use")
    with pytest.raises(ValueError, match="prefix"):
        pool.stats.to_prometheus("not a name")
