"""PagedKVCache: mlx-lm's contract, and the books of one cache."""

from __future__ import annotations

import copy
import gc
import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from kvpool import build_paged_caches
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import attach_caches
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.models.cache import KVCache, create_attention_mask


def make_pool(n_blocks: int = 256, block_size: int = 16, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def rows(n: int, dims: int = 4, dtype=mx.float32, start: int = 0, heads: int = 2) -> mx.array:
    """Rows that tell which token they are."""
    ids = mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(ids, (1, heads, n, dims)).astype(dtype)


def append(cache, n: int, **options):
    data = rows(n, start=cache.offset, **options)
    return cache.update_and_fetch(data, data)


def blocks_for(n_tokens: int, block_size: int = 16) -> int:
    return 2 * -(-n_tokens // block_size)


def check(cache) -> None:
    cache.check_invariants()
    cache.pool.check_invariants()
    assert cache.n_blocks_held() == blocks_for(cache.offset, cache.pool.config.block_size)


# --- mlx-lm's contract ----------------------------------------------------------------------------


def test_whatever_stock_offers_is_there():
    stock, ours = KVCache(), PagedKVCache(make_pool())
    offered = [name for name in dir(stock) if not name.startswith("_") and name != "step"]
    assert [name for name in offered if not hasattr(ours, name)] == []
    for cache in (stock, ours):
        append(cache, 3)
    assert len(ours.state) == len(stock.state) == 3
    assert ours.state[2] == stock.state[2] == 3
    again = PagedKVCache.from_state(ours.state)
    assert again.offset == 3
    assert mx.array_equal(again.keys_and_values()[0], rows(3))


def test_signature_and_attributes():
    pool = make_pool()
    cache = PagedKVCache(pool)
    assert (cache.pool, cache.owner, cache.offset, cache.window) == (pool, -1, 0, None)
    assert cache.keys is None and cache.values is None and cache.empty()
    assert (cache.state, cache.meta_state, cache.nbytes, cache.size()) == (
        (None, None, 0),
        "",
        0,
        0,
    )
    assert repr(cache) == "PagedKVCache(owner=-1, offset=0)"
    assert not hasattr(cache, "__len__") and not hasattr(cache, "bits")
    assert cache, "an empty cache must be true, or a model forgets its mask"


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_returns_all_tokens_so_far(block_size):
    cache = PagedKVCache(make_pool(n_blocks=1024, block_size=block_size), 1)
    for n in (5, 1, 1, 300, 7):
        keys, values = append(cache, n)
        assert mx.array_equal(keys, rows(cache.offset))
        assert mx.array_equal(values, rows(cache.offset))
    assert cache.size() == cache.offset == 314
    check(cache)


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


def test_keys_and_values_may_differ_in_dims_and_dtype():
    cache = PagedKVCache(make_pool(), 1)
    keys, values = cache.update_and_fetch(
        rows(3, dims=6, dtype=mx.bfloat16), rows(3, dims=2, dtype=mx.float16)
    )
    assert (keys.shape[3], values.shape[3]) == (6, 2)
    formats = {(b.stream, b.format) for b in cache.pool.blocks_for(1)}
    assert formats == {("k", "bf16"), ("v", "fp16")}


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
    ("n", "as_array", "window"),
    [(1, False, None), (4, False, None), (4, True, None), (1, False, 3)],
)
def test_the_mask_is_that_of_mlx_lm(n, as_array, window):
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 6)
    expected = create_attention_mask(n, 6, as_array, window)
    mask = cache.make_mask(n, return_array=as_array, window_size=window)
    if isinstance(expected, mx.array):
        assert mx.array_equal(mask, expected)
    else:
        assert mask == expected


def test_state_has_nothing_to_gather_and_can_be_set():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    append(cache, 20)
    order, handle, offset = cache.state
    assert order.size <= 1 and offset == 20
    mx.eval([cache.state])
    keys = rows(20)
    for state in (cache.state, (keys, keys), (keys, keys, 7), [keys, keys, 20]):
        twin = PagedKVCache(pool, 2)
        twin.state = state
        assert twin.offset == (state[2] if len(state) == 3 else 20)
        assert mx.array_equal(twin.keys_and_values()[0], keys[:, :, : twin.offset])
        check(twin)
    twin.state = (None, None, 0)
    assert twin.empty() and twin.n_blocks_held() == 0
    assert cache.state[1] is not handle
    append(cache, 3)
    append(cache, 3)
    assert PagedKVCache.from_state((order, handle, offset)).offset == 20


@pytest.mark.parametrize("bad", [None, (None,), "ab", (1, 2), (None, None, 1)])
def test_a_bad_state_is_refused_and_changes_nothing(bad):
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 20)
    with pytest.raises((ValueError, TypeError), match=r"\[PagedKVCache::state\]"):
        cache.state = bad
    assert cache.offset == 20
    check(cache)


def test_from_state_needs_attach_before_it_can_grow():
    pool = make_pool()
    loose = PagedKVCache.from_state((rows(20), rows(20), 20))
    assert loose.pool is None and loose.size() == 20 and pool.stats.blocks_in_use() == 0
    with pytest.raises(RuntimeError, match="attach"):
        append(loose, 1)
    assert loose.trim(2) == 2
    loose.attach(pool, 3)
    assert pool.stats.blocks_in_use() == 4
    assert mx.array_equal(append(loose, 1)[0], rows(19))
    check(loose)
    with pytest.raises(ValueError, match="has a pool already"):
        loose.attach(pool, 3)


def test_attaching_a_list_makes_one_group_or_changes_nothing():
    pool = make_pool(n_blocks=10)
    loose = [PagedKVCache.from_state((rows(40), rows(40), 40)) for _ in range(2)]
    with pytest.raises(BlockPoolExhaustedError):
        attach_caches(loose, pool, 3)
    assert pool.stats.blocks_in_use() == 0
    assert [cache.pool for cache in loose] == [None, None]
    assert [cache.offset for cache in loose] == [40, 40]
    pool = make_pool(n_blocks=12)
    attach_caches(loose, pool, 3)
    loose[1].release()
    assert pool.stats.blocks_in_use() == 0 and loose[0].empty()


def test_keys_and_values_can_be_set_one_by_one():
    cache = PagedKVCache(make_pool(), 1)
    cache.keys = rows(20)
    cache.values = rows(20)
    assert cache.n_blocks_held() == 4
    assert mx.array_equal(cache.keys_and_values()[1], rows(20))
    cache.keys = mx.depends(cache.keys, cache.values)  # as models do to order their communication
    assert mx.array_equal(cache.keys, rows(20))
    check(cache)
    cache.keys = cache.values = None
    assert cache.offset == 0 and cache.n_blocks_held() == 0
    append(cache, 2)
    check(cache)


def test_meta_state_stays_empty():
    cache = PagedKVCache(make_pool())
    cache.meta_state = ""
    with pytest.raises(ValueError, match="meta_state"):
        cache.meta_state = "x"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "name"),
    [
        ((None,), {}, TypeError, "pool"),
        (("pool",), {}, TypeError, "pool"),
        (("", None), {}, TypeError, "owner"),
        (("", True), {}, TypeError, "owner"),
        (("", 1.0), {}, TypeError, "owner"),
        (("", 2**63), {}, ValueError, "owner"),
        (("",), {"format": "fp8"}, ValueError, "format"),
        (("",), {"format": 16}, TypeError, "format"),
        (("",), {"window": 0}, ValueError, "window"),
        (("",), {"window": True}, TypeError, "window"),
        (("",), {"age_policy": 3}, TypeError, "age_policy"),
        (("",), {"age_policy": "fp16:1,int8", "format": "bf16"}, ValueError, "age_policy"),
        (("",), {"bits": 3}, ValueError, "bits"),
        (("",), {"method": "kivy"}, ValueError, "method"),
        (("",), {"method": "kivi", "bits": 0}, ValueError, "bits"),
        (("",), {"method": "kivi", "age_policy": "auto:1,int8"}, ValueError, "method"),
    ],
)
def test_arguments_are_checked(arguments, options, error, name):
    arguments = [make_pool() if argument == "" else argument for argument in arguments]
    with pytest.raises(error, match=rf"\[PagedKVCache\].*{name}"):
        PagedKVCache(*arguments, **options)


def test_numpy_ints_become_ints():
    cache = PagedKVCache(make_pool(), np.int64(3), window=np.int32(8))
    assert (type(cache.owner), type(cache.window)) == (int, int)


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([1], [2], TypeError),
        (rows(2), None, TypeError),
        (rows(2)[0], rows(2)[0], ValueError),
        (rows(2), rows(3), ValueError),
        (mx.tile(rows(2), (2, 1, 1, 1)), mx.tile(rows(2), (2, 1, 1, 1)), ValueError),
        (rows(2, dims=5), rows(2), ValueError),
        (rows(2)[:, :1], rows(2)[:, :1], ValueError),
        (rows(2).astype(mx.int32), rows(2), ValueError),
    ],
)
@pytest.mark.parametrize("n_before", [0, 3])
def test_what_does_not_fit_is_refused_and_changes_nothing(keys, values, error, n_before):
    cache = PagedKVCache(make_pool(), 1)
    if n_before:
        append(cache, n_before)
    elif isinstance(keys, mx.array) and keys.ndim == 4 and keys.shape[3] == 5:
        pytest.skip("an empty cache takes any shape")
    elif isinstance(keys, mx.array) and keys.ndim == 4 and keys.shape[1] == 1:
        pytest.skip("an empty cache takes any number of heads")
    with pytest.raises(error, match=r"\[Paged(KVCache|Layer)::update_and_fetch\]"):
        cache.update_and_fetch(keys, values)
    assert cache.offset == n_before
    assert append(cache, 1)[0].shape[2] == n_before + 1
    check(cache)


def test_no_tokens_are_no_step():
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 0)
    assert cache.empty()
    append(cache, 3)
    assert append(cache, 0)[0].shape[2] == 3


# --- the books ------------------------------------------------------------------------------------


def test_running_out_changes_nothing_and_says_what_fits():
    pool = make_pool(n_blocks=8)
    pool.allocate("v", 33, owner=9)  # one block of values is left, and four of keys
    cache = PagedKVCache(pool, 1)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        append(cache, 17)
    assert caught.value.tokens_that_fit == 16
    assert cache.n_blocks_held() == 0 and pool.n_free("k") == 4
    append(cache, 16)
    check(cache)


def test_unused_slots_show():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    append(cache, 1)
    assert pool.stats.unused_slots() == 2 * 15
    append(cache, 15)
    assert pool.stats.unused_slots() == 0


def test_caches_with_the_default_owner_free_their_own_blocks():
    pool = make_pool()
    first, second = PagedKVCache(pool), PagedKVCache(pool)
    append(first, 20)
    append(second, 20)
    first.release()
    assert pool.stats.blocks_in_use() == second.n_blocks_held() == 4
    append(second, 1)
    check(second)


@pytest.mark.parametrize("again", [True, False])
def test_a_released_cache_is_empty(again):
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    append(cache, 20)
    cache.release()
    if again:
        cache.release()
    assert cache.empty() and cache.offset == 0 and pool.stats.blocks_in_use() == 0
    assert mx.array_equal(append(cache, 3)[0], rows(3))
    check(cache)


def test_a_dropped_cache_gives_its_blocks_back_from_any_thread():
    pool = make_pool()
    held = [PagedKVCache(pool, 1)]
    mx.eval(append(held[0], 20))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert pool.stats.blocks_in_use() == 0


def test_freeing_behind_the_cache_is_a_typed_error_until_release():
    pool = make_pool()
    cache = PagedKVCache(pool, 7)
    append(cache, 20)
    pool.free_all(7)
    stranger = pool.allocate("k", 64, owner=8)
    for _ in range(2):
        with pytest.raises(ValueError, match="owner 7 were freed behind"):
            append(cache, 1)
    assert cache.offset == 20
    cache.release()
    append(cache, 1)
    assert pool.blocks_for(8) == stranger
    check(cache)


# --- forks ----------------------------------------------------------------------------------------


def test_field_C7_a_copy_shares_blocks_and_costs_one_at_its_first_write():
    pool = make_pool(n_blocks=20)
    cache = PagedKVCache(pool, 1)
    append(cache, 40)  # two full blocks and a partial one, a stream
    assert pool.stats.blocks_in_use() == 6
    twin = copy.deepcopy(cache)
    assert twin.pool is pool and twin.owner != 1
    assert pool.stats.blocks_in_use() == 6
    assert pool.n_free("k") + pool.n_free("v") == 14
    shared = [{block.block_id for block in pool.blocks_for(owner)} for owner in (1, twin.owner)]
    assert shared[0] == shared[1] and len(shared[0]) == 6
    append(twin, 1)
    assert pool.stats.blocks_in_use() == 8
    append(cache, 1)  # the other side has its tail alone now
    assert pool.stats.blocks_in_use() == 8
    assert mx.array_equal(cache.keys, rows(41)) and mx.array_equal(twin.keys, rows(41))
    del twin
    assert pool.stats.blocks_in_use() == 6
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
    assert pool.stats.blocks_in_use() == 0


# --- readers --------------------------------------------------------------------------------------


def test_arrays_handed_out_keep_what_they_show():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    keys, values = append(cache, 20)
    cache.trim(15)
    append(cache, 9)
    kept = cache.keys
    cache.release()
    stranger = PagedKVCache(pool, 2)
    data = rows(200, start=1000)
    mx.eval(stranger.update_and_fetch(data, data))
    assert mx.array_equal(keys, rows(20)) and mx.array_equal(values, rows(20))
    assert mx.array_equal(kept, rows(14))
    del keys, values, kept
    assert pool.stats.blocks_in_use() == stranger.n_blocks_held()


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


# --- field cases ----------------------------------------------------------------------------------


def test_field_C8_an_offset_taken_before_an_update_stays():
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 2)
    offset = cache.offset
    append(cache, 3)
    assert (offset, cache.offset) == (2, 5)


def test_field_D14_a_quantised_replacement_takes_its_place():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    mx.random.seed(2)
    data = mx.random.normal((1, 2, 40, 64))
    mx.eval(cache.update_and_fetch(data, data))
    held = cache.n_blocks_held()
    narrow = cache.to_quantized(group_size=64, bits=8)
    mx.eval(narrow.keys)
    assert isinstance(narrow, PagedKVCache) and not hasattr(narrow, "bits")
    free = pool.n_free("k") + pool.n_free("v")
    wide_bytes = cache.nbytes
    del cache
    assert pool.n_free("k") + pool.n_free("v") == free + held
    assert pool.stats.blocks_in_use() == narrow.n_blocks_held() > 0
    assert narrow.nbytes < wide_bytes / 3
    assert mx.max(mx.abs(narrow.keys - data)).item() < 0.05
    append(narrow, 1, dims=64)
    check(narrow)
    for options, name in (({"bits": 5}, "bits"), ({"group_size": 32}, "group_size")):
        with pytest.raises(ValueError, match=name):
            narrow.to_quantized(**options)


def test_field_E14_growth_copies_no_rows():
    cache = PagedKVCache(make_pool(n_blocks=512), 1)
    data = rows(1)
    for _ in range(600):
        mx.eval(cache.update_and_fetch(data, data))
    assert cache.n_blocks_held() == blocks_for(600)


def test_field_E15_a_full_pool_has_room_in_its_tails():
    pool = make_pool(n_blocks=4)
    cache = PagedKVCache(pool, 1)
    append(cache, 17)
    assert pool.n_free("k") == pool.n_free("v") == 0
    append(cache, 15)
    with pytest.raises(BlockPoolExhaustedError):
        append(cache, 16)
    assert cache.offset == 32


def test_field_F1_a_negative_trim_is_refused():
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 10)
    with pytest.raises(ValueError, match="n must be >= 0, got -5"):
        cache.trim(-5)
    for bad in (1.0, True, None):
        with pytest.raises(TypeError, match=r"\[PagedKVCache::trim\]"):
            cache.trim(bad)
    assert cache.offset == 10


def test_field_F2_trim_stops_at_zero():
    pool = make_pool()
    cache = PagedKVCache(pool, 1)
    append(cache, 10)
    assert cache.trim(25) == 10
    assert (cache.offset, pool.stats.blocks_in_use(), cache.empty()) == (0, 0, True)
    assert cache.keys is None


def test_field_F15_what_is_shared_counts_in_tokens_not_in_capacity():
    cache = PagedKVCache(make_pool(), 1)
    append(cache, 300)
    assert cache.trim(300 - 200) == 100
    assert cache.offset == 200 and cache.n_blocks_held() == blocks_for(200)
    assert mx.array_equal(append(cache, 1)[0], rows(201))


def test_field_F16_a_draft_is_rewound_by_what_was_rejected():
    # Four drafts, one accepted: model and draft cache drop three and two.
    model, draft = PagedKVCache(make_pool(), 1), PagedKVCache(make_pool(), 2)
    for cache in (model, draft):
        append(cache, 10)
    append(model, 5)
    append(draft, 4)
    assert (model.trim(3), draft.trim(2)) == (3, 2)
    assert model.offset == draft.offset == 12
    assert mx.array_equal(append(model, 1)[0], rows(13))


# --- windows --------------------------------------------------------------------------------------


def window_cache(window: int, n_blocks: int = 256, block_size: int = 4) -> PagedKVCache:
    return PagedKVCache(make_pool(n_blocks, block_size), 1, window=window)


def test_blocks_behind_the_window_go_back():
    cache = window_cache(window=8)
    for _ in range(50):
        keys, _ = append(cache, 1)
        end = cache.offset
        assert mx.array_equal(keys, rows(min(8, end), start=max(0, end - 8)))
    assert cache.n_blocks_held() <= 2 * 3
    assert (cache.offset, cache.size()) == (50, 8)
    cache.check_invariants()


def test_field_E18_positions_behind_the_window_are_gone():
    cache = window_cache(window=8)
    for _ in range(9):
        keys, _ = append(cache, 1)
    assert keys[0, 0, :, 0].tolist() == list(range(1, 9))


def test_field_F3_and_F4_a_window_that_has_closed_over_tokens_is_not_trimmed():
    cache = window_cache(window=8)
    for _ in range(20):
        append(cache, 1)
    assert not cache.is_trimmable()
    assert cache.trim(5) == 0
    assert cache.offset == 20
    young = window_cache(window=8)
    append(young, 6)
    assert young.is_trimmable() and young.trim(2) == 2
    assert mx.array_equal(append(young, 1)[0], rows(5))


def test_field_F14_chunks_on_a_window_that_is_full():
    cache = window_cache(window=8)
    widths = []
    for n in (8, 3, 3, 3, 1):
        keys, _ = append(cache, n)
        widths.append(keys.shape[2])
        assert mx.array_equal(keys, rows(keys.shape[2], start=cache.offset - keys.shape[2]))
    assert widths == [8, 10, 10, 10, 8]


@pytest.mark.parametrize("n_prompt", range(1023, 1029))
def test_field_F13_the_mask_is_as_wide_as_the_keys_around_a_window_of_1024(n_prompt):
    cache = window_cache(window=1024, n_blocks=1200)
    for n in (n_prompt, 1, 2):
        mask = cache.make_mask(n, return_array=True, window_size=1024)
        keys, _ = append(cache, n)
        if mask is not None:
            assert mask.shape == (n, keys.shape[2])


def test_field_F11_rows_of_a_window_mask_see_as_many_as_the_window():
    cache = window_cache(window=128)
    append(cache, 126)
    mask = cache.make_mask(4, return_array=True)
    assert mask.sum(axis=1).tolist() == [127, 128, 128, 128]


def test_a_narrower_window_than_the_cache_masks_single_tokens_too():
    cache = window_cache(window=8)
    append(cache, 12)
    mask = cache.make_mask(1, window_size=5)
    keys, _ = append(cache, 1)
    assert mask.shape == (keys.shape[2],)
    assert mask.tolist() == 3 * [False] + 5 * [True]


def test_field_F5_a_window_is_read_in_the_order_of_its_tokens():
    cache = window_cache(window=8)
    for _ in range(12):
        append(cache, 1)
    assert cache.keys[0, 0, :, 0].tolist() == list(range(4, 12))
    assert cache.trim(2) == 0  # the first ten are not what is left


def test_field_F10_the_mask_counts_what_is_left_of_the_front():
    cache = window_cache(window=61)
    append(cache, 100)
    mask = cache.make_mask(4, return_array=True)
    keys, _ = append(cache, 4)
    assert keys.shape[2] == 64 and mask.shape == (4, 64)


def test_field_F18_a_window_is_its_layers_own():
    pool = make_pool(block_size=2)
    full, window = PagedKVCache(pool, 1), PagedKVCache(pool, 1, window=4)
    for cache in (full, window):
        for _ in range(10):
            append(cache, 1)
    assert (full.keys.shape[2], window.keys.shape[2]) == (10, 4)


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
