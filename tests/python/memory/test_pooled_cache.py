"""PooledKVCache: a pool's books around any cache."""

from __future__ import annotations

import gc
import importlib
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inner_caches import ListCache
from kvpool.cache import ExactKVCache, KVCache
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory import BlockPoolAllocator, PoolConfig
from kvpool.memory.pooled_cache import PooledKVCache

HEAD_DIM = 4


def make_pool(block_size: int = 16, n_blocks: int = 64, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def fill(cache: PooledKVCache, n: int) -> None:
    for t in range(n):
        cache.append(np.full(HEAD_DIM, t / 8), np.full(HEAD_DIM, t / 8))
        cache.check_invariants()


def test_blocks_follow_the_tokens():
    pool = make_pool()
    cache = PooledKVCache(ListCache(), pool, owner=3, format="int2")
    fill(cache, 40)
    assert cache.n_blocks_held() == 6
    blocks = pool.blocks_for(3)
    assert sorted((block.stream, block.n_used) for block in blocks) == [
        *[("k", 8), ("k", 16), ("k", 16)],
        *[("v", 8), ("v", 16), ("v", 16)],
    ]
    assert {block.format for block in blocks} == {"int2"}
    assert len(cache) == 40
    assert cache.memory_bytes() == 4000
    assert cache.attend("q") == ("q", 40)
    assert repr(cache) == "PooledKVCache(inner=ListCache, owner=3, blocks=6)"
    assert (cache.owner, cache.format, cache.pool) == (3, "int2", pool)


def test_keys_and_values_are_charged_when_they_come():
    cache = PooledKVCache(ListCache(), make_pool(block_size=2))
    for expected in (1, 1, 2):  # a prompt's keys first
        cache.append_key(1)
        assert cache.n_blocks_held() == expected
    for expected in (3, 3, 4):
        cache.append_value(1)
        assert cache.n_blocks_held() == expected
    cache.check_invariants()
    assert len(cache) == 3


def test_no_block_moves_between_block_boundaries():
    pool = make_pool()
    cache = PooledKVCache(ListCache(), pool)
    fill(cache, 1)
    before = pool.stats.n_allocations
    fill(cache, 15)
    assert (pool.stats.n_allocations, pool.stats.n_frees) == (before, 0)


def test_one_free_list_serves_both_streams():
    pool = make_pool(block_size=4, n_blocks=4, separate_kv=False)
    cache = PooledKVCache(ListCache(), pool)
    fill(cache, 8)
    assert cache.n_blocks_held() == 4
    with pytest.raises(BlockPoolExhaustedError):
        cache.append(1, 1)
    assert len(cache) == 8


def test_it_is_a_kv_cache():
    assert isinstance(PooledKVCache(ListCache(), make_pool()), KVCache)


def test_any_of_our_caches_goes_in():
    pool = make_pool()
    inner = ExactKVCache(HEAD_DIM)
    cache = PooledKVCache(inner, pool)
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, 20, HEAD_DIM)).astype(np.float32)
    alone = ExactKVCache(HEAD_DIM)
    for k, v in zip(keys, values, strict=True):
        cache.append(k, v)
        alone.append_key(k)
        alone.append_value(v)
    assert np.array_equal(cache.attend(keys[0]), alone.attend(keys[0]))
    assert cache.memory_bytes() == alone.memory_bytes()
    assert cache.n_blocks_held() == 4


@pytest.mark.parametrize("name", ["append_key", "append_value", "attend", "memory_bytes", "reset"])
def test_fault_F24_an_inner_cache_without_a_method_is_refused(name):
    inner = type("Broken", (ListCache,), {name: None})()
    pool = make_pool()
    with pytest.raises(TypeError, match=f"Broken lacks {name}"):
        PooledKVCache(inner, pool)
    with pytest.raises(TypeError, match="lacks append_key, append_value"):
        PooledKVCache(object(), pool)


def test_fault_F24_a_failing_append_keeps_no_block():
    pool = make_pool()
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    inner.refuse_keys = inner.refuse_values = True
    for append in (cache.append_key, cache.append_value, lambda k: cache.append(k, k)):
        with pytest.raises(RuntimeError, match="refused"):
            append(1)
        assert cache.n_blocks_held() == pool.stats.blocks_in_use() == 0
    inner.refuse_keys = inner.refuse_values = False
    fill(cache, 1)
    assert cache.n_blocks_held() == 2


@pytest.mark.parametrize("taken", ["k", "v"])
def test_fault_F25_running_out_leaves_the_pair_out(taken):
    pool = make_pool(block_size=4, n_blocks=4)
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    fill(cache, 4)
    other = pool.allocate(taken, 4, owner=9)
    for _ in range(3):
        with pytest.raises(BlockPoolExhaustedError):
            cache.append("k", "v")
        assert len(inner.keys) == len(inner.values) == 4
        assert cache.n_blocks_held() == 2
    pool.free(other)
    cache.append("k", "v")
    assert (inner.keys[4:], inner.values[4:]) == (["k"], ["v"])


def test_fault_F25_running_out_between_single_appends_can_be_retried():
    pool = make_pool(block_size=4, n_blocks=2)
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    other = pool.allocate("v", 4, owner=9)
    cache.append_key("k")
    for _ in range(2):
        with pytest.raises(BlockPoolExhaustedError):
            cache.append_value("v")
    pool.free(other)
    cache.append_value("v")
    assert (inner.keys, inner.values) == (["k"], ["v"])
    cache.check_invariants()


def test_a_refused_value_takes_its_key_back_where_the_inner_cache_can():
    pool = make_pool()
    cache = PooledKVCache(ExactKVCache(HEAD_DIM), pool)
    with pytest.raises(ValueError, match="must be finite"):
        cache.append(np.ones(HEAD_DIM), np.full(HEAD_DIM, np.nan))
    assert (len(cache), cache.n_blocks_held()) == (0, 0)
    fill(cache, 2)
    assert len(cache) == 2


def test_a_refused_value_whose_key_stays_can_only_be_completed():
    pool = make_pool()
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    inner.refuse_values = True
    with pytest.raises(RuntimeError, match="refused"):
        cache.append("k0", "bad")
    assert cache.n_blocks_held() == 1  # the key is really there
    cache.check_invariants()
    inner.refuse_values = False
    for append in (lambda: cache.append("k1", "v1"), lambda: cache.append_key("k1")):
        with pytest.raises(ValueError, match="key whose value it refused"):
            append()
    cache.append_value("v0")
    cache.append("k1", "v1")
    assert (inner.keys, inner.values) == (["k0", "k1"], ["v0", "v1"])


def test_append_after_a_lone_key_is_refused():
    cache = PooledKVCache(ListCache(), make_pool())
    cache.append_key("k")
    with pytest.raises(ValueError, match="not a pair yet"):
        cache.append("k", "v")
    assert cache.n_blocks_held() == 1


@pytest.mark.parametrize("method", ["release", "reset"])
def test_fault_F26_a_released_cache_is_empty(method):
    pool = make_pool(block_size=4)
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    fill(cache, 9)
    getattr(cache, method)()
    assert (len(cache), len(inner), cache.n_blocks_held()) == (0, 0, 0)
    assert pool.stats.blocks_in_use() == 0
    assert cache.attend("q") == ("q", 0)
    getattr(cache, method)()
    fill(cache, 5)
    assert cache.n_blocks_held() == 4


@pytest.mark.parametrize(
    "inner", [lambda: ListCache(window=8), lambda: ExactKVCache(HEAD_DIM, capacity=8)]
)
@pytest.mark.parametrize("block_size", [4, 16, 3])
def test_fault_F27_blocks_of_forgotten_tokens_go_back(inner, block_size):
    pool = make_pool(block_size=block_size)
    cache = PooledKVCache(inner(), pool)
    fill(cache, 40)
    assert len(cache) == 8
    assert cache.n_blocks_held() == 2 * -(-8 // block_size) == pool.stats.blocks_in_use()
    assert sum(block.n_used for block in pool.blocks_for(-1)) == 16


def test_fault_F27_a_full_window_needs_no_further_block():
    pool = make_pool(block_size=4, n_blocks=4)
    cache = PooledKVCache(ExactKVCache(HEAD_DIM, capacity=8), pool)
    fill(cache, 40)  # the pool has exactly the window's blocks
    assert pool.n_free("k") == pool.n_free("v") == 0
    before = pool.stats.n_allocations
    fill(cache, 40)
    assert pool.stats.n_allocations == before


def test_a_window_without_a_capacity_settles_after_one_block_too_many():
    pool = make_pool(block_size=4, n_blocks=6)
    cache = PooledKVCache(ListCache(window=8), pool)
    fill(cache, 9)
    before = pool.stats.n_allocations
    fill(cache, 40)
    assert pool.stats.n_allocations == before


def test_tokens_from_before_the_wrapper_are_charged_with_the_first_append():
    pool = make_pool(block_size=4, n_blocks=8)
    inner = ListCache()
    for t in range(9):
        inner.append_key(t)
        inner.append_value(t)
    cache = PooledKVCache(inner, pool)
    cache.append(9, 9)
    assert cache.n_blocks_held() == 6
    cache.check_invariants()


def test_tokens_dropped_behind_the_wrapper_are_given_back():
    pool = make_pool(block_size=4)
    inner = ListCache()
    cache = PooledKVCache(inner, pool)
    fill(cache, 12)
    del inner.keys[2:], inner.values[2:]
    cache.append(1, 1)
    assert cache.n_blocks_held() == 2


def test_fault_F28_caches_of_one_owner_leave_each_others_blocks():
    pool = make_pool(block_size=4)
    first, second = PooledKVCache(ListCache(), pool), PooledKVCache(ListCache(), pool)
    assert first.owner == second.owner == -1
    fill(first, 5)
    fill(second, 5)
    first.release()
    assert second.n_blocks_held() == len(pool.blocks_for(-1)) == 4
    other = pool.allocate("k", 16, owner=7)
    fill(second, 10)
    assert [block.n_used for block in other] == [4] * 4
    pool.check_invariants()


def test_blocks_freed_behind_its_back_are_an_error_until_released():
    pool = make_pool(block_size=4)
    inner = ListCache()
    cache = PooledKVCache(inner, pool, owner=5)
    fill(cache, 6)
    pool.free_all(5)
    for use in (lambda: cache.append(1, 1), lambda: cache.append_key(1), lambda: cache.attend(1)):
        with pytest.raises(ValueError, match="freed behind the cache"):
            use()
    assert len(inner.keys) == 6
    cache.release()
    fill(cache, 6)
    assert cache.n_blocks_held() == 4


def test_a_collected_cache_gives_its_blocks_back_in_any_thread():
    pool = make_pool()
    for collect in (lambda c: c.clear(), lambda c: _in_thread(c.clear)):
        caches = [PooledKVCache(ListCache(), pool)]
        fill(caches[0], 20)
        assert pool.stats.blocks_in_use() == 4
        collect(caches)
        gc.collect()
        assert pool.stats.blocks_in_use() == 0


def _in_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_cache_may_outlive_the_name_of_its_pool():
    cache = PooledKVCache(ListCache(), make_pool())
    gc.collect()
    fill(cache, 20)
    cache.release()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"owner": None}, "owner"),
        ({"owner": True}, "owner"),
        ({"owner": 1.0}, "owner"),
        ({"format": None}, "format must be a str"),
        ({"format": 3}, "format must be a str"),
        ({"pool": object()}, "pool must be a BlockPoolAllocator, got object"),
        ({"pool": Mock(spec=BlockPoolAllocator)}, "pool must be a BlockPoolAllocator, got <Mock"),
    ],
)
def test_constructor_arguments_are_checked(arguments, message):
    with pytest.raises(TypeError, match=message):
        PooledKVCache(ListCache(), **{"pool": make_pool(), **arguments})


class FlakyCache(ListCache):
    """Refuses what it is told to, and keeps ``step`` tokens less when its window is full."""

    def __init__(self, window: int, step: int) -> None:
        super().__init__()
        self._limit, self._step = window, step

    def append_value(self, v) -> None:
        super().append_value(v)
        if len(self.values) > self._limit:
            del self.keys[: self._step], self.values[: self._step]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.sampled_from(["pair", "key", "value", "bad", "release", "steal"]), max_size=80
    ),
    window=st.integers(1, 12),
    step=st.integers(1, 6),
    block_size=st.integers(1, 5),
    n_blocks=st.integers(2, 8),
)
def test_blocks_always_match_what_the_inner_cache_holds(steps, window, step, block_size, n_blocks):
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))
    inner = FlakyCache(window, min(step, window))
    cache = PooledKVCache(inner, pool, owner=1)
    unpaired = 0
    for action in steps:
        if action == "steal":
            if not pool.blocks_for(2):
                pool.allocate("v", 1, owner=2) if pool.n_free("v") else None
            else:
                pool.free_all(2)
            continue
        length = len(inner)
        n_keys = len(inner.keys)
        inner.refuse_keys = action == "bad"
        try:
            if action == "release":
                cache.release()
                unpaired = 0
            elif action in ("pair", "bad"):
                cache.append(0, 0)
            elif action == "key":
                cache.append_key(0)
                unpaired += 1
            elif unpaired > 0:
                cache.append_value(0)
                unpaired -= 1
        except (BlockPoolExhaustedError, RuntimeError, ValueError):
            assert (len(inner), len(inner.keys)) == (length, n_keys)
        cache.check_invariants()
        pool.check_invariants()
        if unpaired == 0:
            assert cache.n_blocks_held() == 2 * -(-len(inner) // block_size)
        assert len(pool.blocks_for(1)) == cache.n_blocks_held()


PUBLISHED = ["turboquant_mse", "turboquant_prod", "polar", "qjl", "spectral"]


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_caches_go_in(method):
    published = pytest.importorskip("veloxquant_mlx")
    builder = importlib.import_module("veloxquant_mlx").KVCacheBuilder
    assert published is not None
    mx = pytest.importorskip("mlx.core")
    inner = builder().with_method(method).with_head_dim(64).build()
    cache = PooledKVCache(inner, make_pool(), owner=1)
    for t in range(40):
        row = mx.random.normal((64,), key=mx.random.key(t)).astype(mx.float16)
        cache.append(row, row)
    assert cache.n_blocks_held() == 6
    assert cache.attend(row).shape == (64,)
    cache.release()
    assert len(cache) == 0
