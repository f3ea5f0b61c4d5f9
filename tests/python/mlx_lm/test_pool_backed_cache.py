"""PoolBackedKVCache: its buffers, what they are charged, and what they become in codes."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_kinds import POOLED, append, make_pool, rows
from kvpool.memory.pool_backed_cache import PoolBackedKVCache
from kvpool.mlx_lm.caches import PoolBackedQuantizedKVCache
from mlx_lm.models.cache import KVCache

check = POOLED.check


def test_the_step_is_at_least_a_block():
    cache = PoolBackedKVCache(make_pool())
    assert cache.step == 256
    assert repr(cache) == "PoolBackedKVCache(owner=-1, offset=0, step=256)"
    assert PoolBackedKVCache(make_pool(block_size=300)).step == 300
    step = PoolBackedKVCache(make_pool(), 1, np.int32(8)).step
    assert (type(step), step) == (int, 8)


@pytest.mark.parametrize(
    ("step", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_step_is_a_number_of_rows(step, error):
    with pytest.raises(error, match=rf"\[PoolBackedKVCache\] step must be .*{step}"):
        PoolBackedKVCache(make_pool(), 1, step)


@pytest.mark.parametrize("step", [1, 10, 16, 256])
def test_an_explicit_step_gives_buffers_of_the_stock_length(step):
    class Stock(KVCache):
        pass

    Stock.step = step
    ours, stock = PoolBackedKVCache(make_pool(n_blocks=4096), 1, step), Stock()
    for n in (3, 7, 1, 1, 30, 12, 1):
        ours_out, stock_out = append(ours, n), append(stock, n)
        assert ours.keys.shape == stock.keys.shape
        assert mx.array_equal(ours_out[0], stock_out[0])
        check(ours)


def test_the_buffer_takes_the_wider_dtype_when_it_grows():
    ours, stock = PoolBackedKVCache(make_pool(), 1, 4), KVCache()
    stock.step = 4
    for dtype in (mx.float16, mx.float32, mx.float32):
        for cache in (ours, stock):
            append(cache, 3, dtype=dtype)
        assert ours.keys.dtype == stock.keys.dtype
    assert ours.pool.blocks_for(1)[0].format == "fp32"


def test_state_is_cut_to_the_tokens_and_can_be_set_with_two_or_three_items():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 20)
    keys, values, offset = cache.state
    assert (keys.shape[2], values.shape[2], offset) == (20, 20, 20)
    for state, n in (((keys, values), 20), ((keys, values, 7), 7)):
        twin = PoolBackedKVCache(pool, 2)
        twin.state = state
        assert twin.offset == n
        assert mx.array_equal(twin.keys_and_values()[0], rows(n))
        check(twin)


def test_keys_and_values_can_be_set_one_by_one():
    cache = PoolBackedKVCache(make_pool(), 1)
    cache.keys = rows(20)
    cache.values = rows(20)
    cache.offset = 18
    assert cache.n_blocks_held() == 4
    assert mx.array_equal(cache.keys_and_values()[1], rows(18))
    check(cache)
    for bad in (-1, 21):
        with pytest.raises(ValueError, match=r"\[PoolBackedKVCache::offset\] offset must be"):
            cache.offset = bad
    assert cache.offset == 18


# --- what buffers are charged ---------------------------------------------------------------------


def test_fault_F31_growth_off_the_step_is_charged_for_what_the_buffer_holds():
    cache = PoolBackedKVCache(make_pool(), 1, 20)
    for n in (7, 15, 30, 1, 1):
        append(cache, n)
        check(cache)


def test_fault_F32_every_sequence_of_a_batch_is_charged():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 5, batch=4)
    assert pool.stats.blocks_in_use() == 4 * 2 * 16
    check(cache)


def test_fault_F41_growth_copies_few_rows():
    cache = PoolBackedKVCache(make_pool(n_blocks=2 * 512, block_size=16), 1)
    data, lengths = rows(1), []
    for _ in range(4096):
        cache.update_and_fetch(data, data)
        mx.eval(cache.keys, cache.values)
        if not lengths or lengths[-1] != cache.keys.shape[2]:
            lengths.append(cache.keys.shape[2])
    assert lengths == [256, 512, 768, 1280, 2048, 3072, 4096 + 512]


def test_a_batch_of_another_size_does_not_fit():
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 3, batch=2)
    with pytest.raises(ValueError, match=r"\[PoolBackedKVCache::update_and_fetch\] keys of shape"):
        append(cache, 1)
    check(cache)


def test_field_E14_an_explicit_step_grows_in_steps():
    cache = PoolBackedKVCache(make_pool(n_blocks=2 * 256), 1, 256)
    growths, before = 0, 0
    data = rows(1)
    for _ in range(1024):
        cache.update_and_fetch(data, data)
        growths += cache.keys.shape[2] != before
        before = cache.keys.shape[2]
    assert growths == 4


# --- codes ----------------------------------------------------------------------------------------


def test_codes_are_those_of_mlx():
    cache = PoolBackedKVCache(make_pool(), 1)
    data = mx.random.normal((1, 2, 21, 64))
    cache.update_and_fetch(data[:, :, :20], data[:, :, :20])
    quantised = cache.to_quantized(group_size=64, bits=8)
    assert isinstance(quantised, PoolBackedQuantizedKVCache)
    keys, _ = quantised.update_and_fetch(data[:, :, 20:], data[:, :, 20:])
    expected = mx.quantize(data, group_size=64, bits=8)
    assert all(mx.array_equal(a, b) for a, b in zip(keys, expected, strict=True))
    quantised.check_invariants()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("bits", 7, ValueError),
        ("bits", True, TypeError),
        ("bits", 8.0, TypeError),
        ("group_size", 63, ValueError),
        ("group_size", None, TypeError),
    ],
)
def test_codes_have_widths_that_mlx_has(name, value, error):
    cache = PoolBackedKVCache(make_pool(), 1)
    data = mx.zeros((1, 2, 3, 64))
    cache.update_and_fetch(data, data)
    with pytest.raises(error, match=rf"\[PoolBackedKVCache::to_quantized\] {name} must .*{value}"):
        cache.to_quantized(**{name: value})
    with pytest.raises(error, match=rf"\[PoolBackedQuantizedKVCache\] {name} must .*{value}"):
        PoolBackedQuantizedKVCache(make_pool(), 1, **{name: value})
    state = [None, None, 0, 64, 8]
    state[3 if name == "group_size" else 4] = value
    with pytest.raises(error, match=rf"\[PoolBackedQuantizedKVCache::state\] {name} must"):
        PoolBackedQuantizedKVCache.from_state(state)
    assert cache.offset == 3
    check(cache)


def test_quantising_works_in_a_full_pool():
    pool = make_pool(n_blocks=32)
    cache = PoolBackedKVCache(pool, 1)
    data = mx.random.normal((1, 2, 20, 64))
    cache.update_and_fetch(data, data)
    assert pool.n_free() == 0
    quantised = cache.to_quantized()
    assert quantised.n_blocks_held() == 32 and cache.empty()
    quantised.check_invariants()


def test_a_quantised_cache_survives_copy_trim_and_state():
    pool = make_pool()
    plain = PoolBackedKVCache(pool, 1)
    data = mx.random.normal((1, 2, 40, 64))
    plain.update_and_fetch(data, data)
    cache = plain.to_quantized(bits=4)
    del plain
    twin = copy.deepcopy(cache)
    assert twin.trim(30) == 30 and twin.n_blocks_held() == 2
    assert cache.offset == 40 and cache.nbytes > twin.nbytes > 0
    loaded = PoolBackedQuantizedKVCache.from_state(cache.state)
    loaded.attach(pool, 5)
    assert (loaded.bits, loaded.group_size, loaded.offset) == (4, 64, 40)
    for x in (cache, twin, loaded):
        x.update_and_fetch(data[:, :, :1], data[:, :, :1])
        x.check_invariants()
    cache.keys = tuple(mx.depends(list(cache.keys), list(cache.values)))
