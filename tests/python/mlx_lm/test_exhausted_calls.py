"""Running out outside a step: the error starts with the call that was made."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from kvpool import BlockPoolExhaustedError, PoolBackedKVCache
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import PoolBackedRotatingKVCache, attach_caches

ROWS = mx.ones((1, 2, 12, 8))


def make_pool(n_blocks: int = 6) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))


def filled(kind: type) -> PoolBackedKVCache | PoolBackedRotatingKVCache:
    """A cache that fills its pool with twelve tokens."""
    pool = make_pool()
    cache = kind(pool, 16, 1) if kind is PoolBackedRotatingKVCache else kind(pool, 1)
    cache.update_and_fetch(ROWS, ROWS)
    assert pool.n_available("k") == 0
    return cache


@pytest.fixture(params=[PoolBackedKVCache, PoolBackedRotatingKVCache])
def cache(request):
    return filled(request.param)


def exhausted(cache, call: str):
    name = type(cache).__name__
    return pytest.raises(BlockPoolExhaustedError, match=rf"^\[{name}::{call}\] stream k needs ")


def test_a_copy(cache):
    with exhausted(cache, "__deepcopy__"):
        copy.deepcopy(cache)
    assert cache.pool.stats.blocks_in_use() == 6


def test_a_loaded_cache(cache):
    loaded = type(cache).from_state(cache.state)
    pool = make_pool(4)
    with exhausted(cache, "attach"):
        attach_caches([loaded], pool, 2)
    assert loaded.pool is None and pool.stats.blocks_in_use() == 0


def test_a_state(cache):
    keys, values, offset, *geometry = cache.state
    longer = mx.concatenate([keys, keys], axis=2), mx.concatenate([values, values], axis=2)
    with exhausted(cache, "state"):
        cache.state = (*longer, offset, *geometry) if geometry else longer
    assert cache.offset == 12


def test_buffers(cache):
    with exhausted(cache, "keys"):
        cache.keys = mx.ones((1, 2, 40, 8))
    assert cache.pool.stats.blocks_in_use() == 6
