"""PoolBackedRotatingKVCache: the ring of mlx-lm's RotatingKVCache, charged for what it holds."""

from __future__ import annotations

import copy
import random

import mlx.core as mx
import pytest
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.caches import PoolBackedRotatingKVCache
from mlx_lm.models.cache import RotatingKVCache


def make_pool(n_blocks: int = 64) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))


def append(cache, n: int):
    data = mx.broadcast_to(mx.arange(n)[None, None, :, None] + cache.offset, (1, 1, n, 2)) * 1.0
    return cache.update_and_fetch(data, data)


def kept(cache) -> list[int]:
    """The tokens of the ring, oldest first."""
    return [int(row) for row in cache._temporal_order(cache.keys)[0, 0, :, 0].tolist()]


def same_mask(a, b) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return mx.array_equal(a, b).item()
    return a is b or a == b


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_size", "keep"), [(8, 0), (8, 3), (1, 0), (20, 4)])
def test_holds_what_the_stock_ring_holds(max_size, keep, seed):
    choice = random.Random(seed)
    pool = make_pool()
    ours, stock = (
        PoolBackedRotatingKVCache(pool, max_size, 1, keep),
        RotatingKVCache(max_size, keep),
    )
    for _ in range(40):
        n = choice.choice([1, 1, 1, 2, 3, 9])
        window = choice.choice([None, max_size])
        assert same_mask(ours.make_mask(n, window), stock.make_mask(n, window))
        for a, b in zip(append(ours, n), append(stock, n), strict=True):
            assert mx.array_equal(a, b)
        assert ours.keys.shape == stock.keys.shape
        assert (ours.offset, ours._idx, ours.size()) == (stock.offset, stock._idx, stock.size())
        assert ours.is_trimmable() == stock.is_trimmable()
        assert ours.n_blocks_held() == 2 * -(-ours.keys.shape[2] // 4)
        ours.check_invariants()
    pool.check_invariants()


def test_a_chunk_is_charged_for_the_window_and_itself():
    pool = make_pool()
    cache = PoolBackedRotatingKVCache(pool, 8, 1)
    append(cache, 8)
    append(cache, 10)
    assert pool.stats.blocks_in_use() == 2 * 5  # 8 - 1 + 10 rows
    append(cache, 1)
    assert pool.stats.blocks_in_use() == 2 * 2


def test_a_chunk_that_does_not_fit_changes_nothing():
    cache = PoolBackedRotatingKVCache(make_pool(n_blocks=8), 8, 1)
    append(cache, 8)
    with pytest.raises(BlockPoolExhaustedError, match="9 tokens fit"):
        append(cache, 10)
    assert kept(cache) == list(range(8))
    append(cache, 9)
    assert kept(cache) == list(range(1, 17))
    cache.check_invariants()


def test_a_ring_that_has_not_wrapped_trims_and_gives_blocks_back():
    pool = make_pool()
    cache = PoolBackedRotatingKVCache(pool, 20, 1)
    append(cache, 15)
    assert cache.trim(9) == 9
    assert pool.stats.blocks_in_use() == 2 * 2
    append(cache, 1)
    append(cache, 3)
    assert kept(cache) == list(range(10))
    cache.check_invariants()


def test_field_H11_a_wrapped_ring_survives_its_state():
    pool = make_pool()
    cache = PoolBackedRotatingKVCache(pool, 8, 1, keep=2)
    for _ in range(21):
        append(cache, 1)
    loaded = PoolBackedRotatingKVCache.from_state(cache.state)
    with pytest.raises(RuntimeError, match="attach"):
        append(loaded, 1)
    loaded.attach(pool, 2)
    twin = copy.deepcopy(cache)
    for n in (1, 3, 1):
        expected = append(cache, n)[0]
        assert mx.array_equal(append(loaded, n)[0], expected)
        assert mx.array_equal(append(twin, n)[0], expected)
    for ring in (cache, loaded, twin):
        ring.check_invariants()


def test_field_F3_a_wrapped_ring_that_is_trimmed_keeps_its_index():
    cache = PoolBackedRotatingKVCache(make_pool(), 8, 1)
    for _ in range(20):
        append(cache, 1)
    assert (cache.trim(5), cache.offset, cache._idx) == (0, 20, 4)


def test_a_state_of_another_window_is_refused():
    pool = make_pool()
    cache, other = PoolBackedRotatingKVCache(pool, 8, 1), PoolBackedRotatingKVCache(pool, 9, 1)
    append(other, 3)
    with pytest.raises(ValueError, match="max_size must be 0 and 8, got 0 and 9"):
        cache.state = other.state
    assert cache.empty()


@pytest.mark.parametrize(("keep", "error"), [(8, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_fewer_tokens_are_kept_than_the_window_has(keep, error):
    with pytest.raises(error, match=rf"\[PoolBackedRotatingKVCache\] keep must be .*{keep}"):
        PoolBackedRotatingKVCache(make_pool(), 8, keep=keep)
