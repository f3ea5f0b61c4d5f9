"""PagedKVCache: its pages, those that forks share, and those that readers keep."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from cache_kinds import PAGED, append, blocks_for, in_use, make_pool, rows
from kvpool import build_paged_caches
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.mlx_lm.paged import PagedKVCache

check = PAGED.check


# --- pages ----------------------------------------------------------------------------------------


def test_it_says_what_it_is():
    assert repr(PagedKVCache(make_pool())) == "PagedKVCache(owner=-1, offset=0)"
    window = PagedKVCache(make_pool(), 3, window=np.int32(8))
    assert repr(window) == "PagedKVCache(owner=3, offset=0, window=8)"
    assert type(window.window) is int and PagedKVCache(make_pool()).window is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_pages_keep_the_type_of_the_tokens_by_default(dtype):
    cache = PagedKVCache(make_pool(), 1)
    data = mx.random.normal((1, 2, 37, 80)).astype(dtype)
    keys, values = cache.update_and_fetch(data, data[..., :48])
    assert keys.dtype == values.dtype == dtype
    assert mx.array_equal(keys, data) and mx.array_equal(values, data[..., :48])
    name = {mx.float32: "fp32", mx.float16: "fp16", mx.bfloat16: "bf16"}[dtype]
    assert {block.format for block in cache.pool.blocks_for(1)} == {name}
    assert cache.nbytes == 3 * 16 * 2 * (80 + 48) * dtype.size


@pytest.mark.parametrize(("format", "error"), [("fp16", 4e-3), ("int8", 0.02), ("int4", 0.3)])
def test_a_format_is_what_pages_hold(format, error):
    cache = PagedKVCache(make_pool(), 1, format=format)
    mx.random.seed(1)
    data = mx.random.normal((1, 2, 100, 64))
    keys, values = cache.update_and_fetch(data, data)
    assert keys.dtype == mx.float32  # as it came
    assert mx.max(mx.abs(keys - data)).item() < error
    assert mx.array_equal(keys, values)
    assert {block.format for block in cache.pool.blocks_for(1)} == {format}


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"format": "fp8"}, ValueError, "format"),
        ({"format": 16}, TypeError, "format"),
        ({"window": 0}, ValueError, "window"),
        ({"window": True}, TypeError, "window"),
        ({"age_policy": 3}, TypeError, "age_policy"),
        ({"age_policy": "fp16:1,int8", "format": "bf16"}, ValueError, "age_policy"),
        ({"bits": 3}, ValueError, "bits"),
        ({"method": "kivy"}, ValueError, "method"),
        ({"method": "kivi", "bits": 0}, ValueError, "bits"),
        ({"method": "kivi", "age_policy": "auto:1,int8"}, ValueError, "method"),
    ],
)
def test_arguments_are_checked(options, error, name):
    with pytest.raises(error, match=rf"\[PagedKVCache\].*{name}"):
        PagedKVCache(make_pool(), **options)


@pytest.mark.parametrize("data", [rows(2, batch=2), rows(2).astype(mx.int32)])
def test_pages_hold_floats_of_one_sequence(data):
    cache = PagedKVCache(make_pool(), 1)
    for n in (0, 3):
        append(cache, n)
        with pytest.raises(ValueError, match=r"\[Paged(KVCache|Layer)::update_and_fetch\]"):
            cache.update_and_fetch(data, data)
        assert cache.offset == n
        check(cache)
    assert mx.array_equal(append(cache, 1)[0], rows(4))


def test_state_has_nothing_to_gather_and_takes_two_or_three_items():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    append(cache, 20)
    order, handle, offset = cache.state
    assert order.size <= 1 and offset == 20
    keys = rows(20)
    for state, n in (((keys, keys), 20), ((keys, keys, 7), 7)):
        twin = PagedKVCache(pool, 2)
        twin.state = state
        assert twin.offset == n
        assert mx.array_equal(twin.keys_and_values()[0], rows(n))
        check(twin)
    assert cache.state[1] is not handle
    append(cache, 3)
    append(cache, 3)
    assert PagedKVCache.from_state((order, handle, offset)).offset == 20


def test_keys_and_values_can_be_set_one_by_one():
    cache = PagedKVCache(make_pool(), 1)
    cache.keys = rows(20)
    cache.values = rows(20)
    assert cache.offset == 20 and cache.n_blocks_held() == 4
    assert mx.array_equal(cache.keys_and_values()[1], rows(20))
    check(cache)


def test_narrow_pages_hold_what_wide_ones_did():
    cache = PagedKVCache(make_pool(), 1)
    mx.random.seed(2)
    data = mx.random.normal((1, 2, 40, 64))
    mx.eval(cache.update_and_fetch(data, data))
    narrow = cache.to_quantized(group_size=64, bits=8)
    assert isinstance(narrow, PagedKVCache) and not hasattr(narrow, "bits")
    assert narrow.nbytes < cache.nbytes / 3
    assert mx.max(mx.abs(narrow.keys - data)).item() < 0.05
    append(narrow, 1, dims=64)
    check(narrow)
    for options, name in (({"bits": 5}, "bits"), ({"group_size": 32}, "group_size")):
        with pytest.raises(ValueError, match=rf"\[PagedKVCache::to_quantized\] {name} must be"):
            narrow.to_quantized(**options)


# --- forks ----------------------------------------------------------------------------------------


def test_field_C7_a_copy_shares_blocks_and_costs_one_at_its_first_write():
    pool = make_pool(n_blocks=20)
    cache = PagedKVCache(pool, 1)
    append(cache, 40)  # two full blocks and a partial one, a stream
    assert in_use(pool) == 6
    twin = copy.deepcopy(cache)
    assert twin.pool is pool and twin.owner != 1
    assert in_use(pool) == 6
    assert pool.n_free("k") + pool.n_free("v") == 14
    shared = [{block.block_id for block in pool.blocks_for(owner)} for owner in (1, twin.owner)]
    assert shared[0] == shared[1] and len(shared[0]) == 6
    append(twin, 1)
    assert in_use(pool) == 8
    append(cache, 1)  # the other side has its tail alone now
    assert in_use(pool) == 8
    assert mx.array_equal(cache.keys, rows(41)) and mx.array_equal(twin.keys, rows(41))
    del twin
    assert in_use(pool) == 6
    check(cache)


def test_field_C1_two_writers_behind_one_tail():
    pool = make_pool()
    first = PagedKVCache(pool, 1)
    append(first, 20)
    second = copy.deepcopy(first)
    for cache, token in ((first, 100), (second, 200)):
        data = rows(1, start=token)
        cache.update_and_fetch(data, data)
    assert first.keys[0, 0, 20, 0].item() == 100
    assert second.keys[0, 0, 20, 0].item() == 200
    for cache in (first, second):
        assert mx.array_equal(cache.values[:, :, :20], rows(20))
        check(cache)


@pytest.mark.parametrize("format", ["fp16", "int8", "int4", "int3", "int2"])
def test_field_C2_a_block_of_its_own_has_every_byte_of_every_layer(format):
    pool = make_pool()
    model = SimpleNamespace(layers=[None] * 3)
    caches = build_paged_caches(model, pool, 1, format=format)
    mx.random.seed(5)
    data = [mx.random.normal((1, 3, 21, 80)) for _ in range(4)]
    for i, cache in enumerate(caches):
        cache.update_and_fetch(data[i], data[i + 1])
    before = [cache.keys_and_values() for cache in caches]
    mx.eval(before)
    twins = copy.deepcopy(caches)
    for i, cache in enumerate(twins):
        cache.update_and_fetch(data[i][:, :, :1], data[i + 1][:, :, :1])
    for cache, twin, (keys, values) in zip(caches, twins, before, strict=True):
        for fork in (cache, twin):
            assert mx.array_equal(fork.keys[:, :, :21], keys)
            assert mx.array_equal(fork.values[:, :, :21], values)


def test_field_C5_a_fork_shares_although_the_pool_is_full_and_its_append_fails():
    pool = make_pool(n_blocks=8)
    first, other = PagedKVCache(pool, 1), PagedKVCache(pool, 2)
    append(first, 40)
    append(other, 3)
    assert pool.n_free("k") == pool.n_free("v") == 0
    twin = copy.deepcopy(first)
    with pytest.raises(BlockPoolExhaustedError):
        append(twin, 1)
    assert (first.offset, twin.offset, pool.n_free("k")) == (40, 40, 0)
    for cache in (first, twin):
        assert mx.array_equal(cache.keys, rows(40))
        check(cache)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_field_A5_forks_go_in_any_order(order):
    pool = make_pool()
    caches = [PagedKVCache(pool, 1)]
    append(caches[0], 20)
    for _ in range(2):
        caches.append(copy.deepcopy(caches[-1]))
        append(caches[-1], 3)
    for i in order:
        caches[i].release()
        pool.check_invariants()
    assert in_use(pool) == 0


# --- readers --------------------------------------------------------------------------------------


def test_field_D10_blocks_freed_while_a_step_reads_them_come_back_after_it():
    pool = make_pool(n_blocks=4)
    cache = PagedKVCache(pool, 5)
    keys, _ = append(cache, 20)
    pool.free_all(5)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 17, owner=6)
    assert mx.array_equal(keys, rows(20))
    del keys, _
    cache.release()
    mx.synchronize()
    assert pool.n_free("k") == 2
    pool.check_invariants()


def test_a_thread_that_ends_with_a_pending_append_leaves_the_cache_usable():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    mx.eval(append(cache, 5))

    def work():
        append(cache, 3)  # never evaluated

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    offset = cache.offset
    assert offset in (5, 8)
    keys, _ = append(cache, 2)
    assert mx.array_equal(keys, rows(offset + 2))


@pytest.mark.parametrize("transform", [mx.compile, mx.grad])
def test_tracing_is_refused(transform):
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 2)

    def step(x):
        return mx.sum(cache.update_and_fetch(x, x)[0])

    with pytest.raises((RuntimeError, ValueError), match=r"mx\.compile|mx\.grad|trac"):
        transform(step)(rows(1))
    assert mx.array_equal(append(cache, 1)[0][:, :, :2], rows(2))


def test_field_E14_growth_copies_no_rows():
    cache = PagedKVCache(make_pool(n_blocks=512), 1)
    data = rows(1)
    for _ in range(600):
        mx.eval(cache.update_and_fetch(data, data))
    assert cache.n_blocks_held() == blocks_for(600)


# --- older tokens in fewer bits -------------------------------------------------------------------


def test_full_blocks_are_demoted_as_they_age_and_their_bytes_go_back():
    pool = make_pool()
    cache = PagedKVCache(pool, 1, age_policy="fp16:32,int8:64,int4")
    mx.random.seed(4)
    data = mx.random.normal((1, 2, 300, 64)).astype(mx.float16)
    for i in range(300):
        token = data[:, :, i : i + 1]
        mx.eval(cache.update_and_fetch(token, token))
    formats = [block.format for block in pool.blocks_for(1) if block.stream == "k"]
    assert set(formats) == {"fp16", "int8", "int4"}
    n_of = {name: formats.count(name) for name in set(formats)}
    assert n_of["fp16"] in (2, 3, 4) and n_of["int8"] in (3, 4, 5)
    exact = 2 * 19 * 16 * 2 * 64 * 2
    assert cache.nbytes < 0.5 * exact
    keys = cache.keys
    assert mx.array_equal(keys[:, :, -32:], data[:, :, -32:])
    assert mx.max(mx.abs(keys - data)).item() < 0.5
    check(cache)


def test_a_byte_budget_ends_before_the_blocks_do():
    pool = make_pool(n_blocks=64)
    page = 16 * 2 * 4 * 4  # tokens, heads, dims, bytes
    model = SimpleNamespace(layers=[None])
    (cache,) = build_paged_caches(model, pool, 1, byte_budget=6 * page)
    append(cache, 48)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        append(cache, 1)
    assert cache.offset == 48 and caught.value.tokens_that_fit == 0
    assert pool.n_free("k") > 0
    cache.release()
    append(cache, 1)
