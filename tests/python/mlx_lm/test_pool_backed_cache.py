"""PoolBackedKVCache: mlx-lm's contract, and the books of one cache."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import PoolBackedKVCache
from kvpool.mlx_lm.caches import PoolBackedQuantizedKVCache, attach_caches
from mlx_lm.models.cache import KVCache, create_attention_mask


def make_pool(n_blocks: int = 256, block_size: int = 16, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def rows(n: int, batch: int = 1, dims: int = 4, dtype=mx.float32, start: int = 0) -> mx.array:
    """Rows that tell which token they are."""
    ids = mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(ids, (batch, 2, n, dims)).astype(dtype)


def append(cache, n: int, **options):
    data = rows(n, start=cache.offset, **options)
    return cache.update_and_fetch(data, data)


def charged(cache) -> int:
    """Blocks that the buffers of a cache stand for."""
    if cache.keys is None:
        return 0
    batch, _, n_rows, _ = cache.keys.shape
    return 2 * batch * -(-n_rows // cache.pool.config.block_size)


def check(cache) -> None:
    cache.check_invariants()
    cache.pool.check_invariants()
    assert cache.n_blocks_held() == charged(cache)


# --- mlx-lm's contract ----------------------------------------------------------------------------


def test_fault_F37_whatever_stock_offers_is_there():
    stock, ours = KVCache(), PoolBackedKVCache(make_pool())
    offered = [name for name in dir(stock) if not name.startswith("_")]
    assert [name for name in offered if not hasattr(ours, name)] == []
    for cache in (stock, ours):
        append(cache, 3)
    assert len(ours.state) == len(stock.state) == 3
    assert ours.state[2] == stock.state[2] == 3
    again = PoolBackedKVCache.from_state(ours.state)
    assert again.offset == 3
    assert mx.array_equal(again.keys_and_values()[0], stock.keys_and_values()[0])


def test_signature_and_attributes():
    pool = make_pool()
    cache = PoolBackedKVCache(pool)
    assert (cache.pool, cache.owner, cache.step, cache.offset) == (pool, -1, 256, 0)
    assert cache.keys is None and cache.values is None and cache.empty()
    assert (cache.state, cache.meta_state, cache.nbytes, cache.size()) == (
        (None, None, 0),
        "",
        0,
        0,
    )
    assert repr(cache) == "PoolBackedKVCache(owner=-1, offset=0, step=256)"
    assert not hasattr(cache, "__len__") and not hasattr(cache, "bits")
    assert cache, "an empty cache must be true, or a model forgets its mask"
    assert PoolBackedKVCache(make_pool(block_size=300)).step == 300


def test_returns_all_tokens_so_far():
    cache = PoolBackedKVCache(make_pool(), 1)
    for n in (5, 1, 1, 300, 7):
        keys, values = append(cache, n)
        assert mx.array_equal(keys, rows(cache.offset))
        assert mx.array_equal(values, rows(cache.offset))
    assert cache.size() == cache.offset == 314
    check(cache)


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


def test_keys_and_values_may_differ_in_dims_and_dtype():
    cache = PoolBackedKVCache(make_pool(), 1)
    cache.update_and_fetch(rows(3, dims=6, dtype=mx.bfloat16), rows(3, dims=2, dtype=mx.float16))
    assert (cache.keys.shape[3], cache.values.shape[3]) == (6, 2)
    formats = {(b.stream, b.format) for b in cache.pool.blocks_for(1)}
    assert formats == {("k", "bf16"), ("v", "fp16")}


def test_the_buffer_takes_the_wider_dtype_when_it_grows():
    ours, stock = PoolBackedKVCache(make_pool(), 1, 4), KVCache()
    stock.step = 4
    for dtype in (mx.float16, mx.float32, mx.float32):
        for cache in (ours, stock):
            append(cache, 3, dtype=dtype)
        assert ours.keys.dtype == stock.keys.dtype
    assert ours.pool.blocks_for(1)[0].format == "fp32"


@pytest.mark.parametrize(
    ("n", "as_array", "window"),
    [(1, False, None), (4, False, None), (4, True, None), (1, False, 3)],
)
def test_the_mask_is_that_of_mlx_lm(n, as_array, window):
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 6)
    expected = create_attention_mask(n, 6, as_array, window)
    mask = cache.make_mask(n, return_array=as_array, window_size=window)
    if isinstance(expected, mx.array):
        assert mx.array_equal(mask, expected)
    else:
        assert mask == expected


def test_state_is_cut_to_the_tokens_and_can_be_set_with_two_or_three_items():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 20)
    keys, values, offset = cache.state
    assert (keys.shape[2], values.shape[2], offset) == (20, 20, 20)
    for state in ((keys, values), (keys, values, 7), [keys, values, 20]):
        twin = PoolBackedKVCache(pool, 2)
        twin.state = state
        assert twin.offset == (state[2] if len(state) == 3 else 20)
        assert mx.array_equal(twin.keys_and_values()[0], keys[:, :, : twin.offset])
        check(twin)
    twin.state = (None, None, 0)
    assert twin.empty() and twin.n_blocks_held() == 0


@pytest.mark.parametrize("bad", [None, (None,), "ab", (1, 2), (None, None, 1)])
def test_a_bad_state_is_refused_and_changes_nothing(bad):
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 20)
    with pytest.raises((ValueError, TypeError), match=r"\[PoolBackedKVCache::state\]"):
        cache.state = bad
    assert cache.offset == 20
    check(cache)


def test_field_H1_an_offset_below_the_buffer_is_kept():
    cache = PoolBackedKVCache.from_state((rows(256), rows(256), 5))
    assert cache.offset == 5
    assert cache.state[0].shape[2] == 5


def test_writing_does_not_reach_arrays_that_were_handed_out_or_in():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1, 4)
    given = rows(4)
    fetched, _ = cache.update_and_fetch(given, given)
    state = cache.state
    cache.trim(3)
    cache.update_and_fetch(rows(1, start=99), rows(1, start=99))
    twin = PoolBackedKVCache(pool, 2)
    twin.state = state
    twin.trim(1)
    twin.update_and_fetch(rows(1, start=77), rows(1, start=77))
    for array in (given, fetched, state[0]):
        assert mx.array_equal(array, rows(4))


def test_from_state_needs_attach_before_it_can_grow():
    pool = make_pool()
    loose = PoolBackedKVCache.from_state((rows(20), rows(20), 20))
    assert loose.pool is None and loose.size() == 20 and pool.stats.blocks_in_use() == 0
    with pytest.raises(RuntimeError, match="attach"):
        append(loose, 1)
    loose.attach(pool, 3)
    assert pool.stats.blocks_in_use() == 4
    assert mx.array_equal(append(loose, 1)[0], rows(21))
    check(loose)
    with pytest.raises(ValueError, match="has a pool already"):
        loose.attach(pool, 3)


def test_attaching_a_list_makes_one_group_or_changes_nothing():
    pool = make_pool(n_blocks=10)
    loose = [PoolBackedKVCache.from_state((rows(40), rows(40), 40)) for _ in range(2)]
    with pytest.raises(BlockPoolExhaustedError):
        attach_caches(loose, pool, 3)
    assert pool.stats.blocks_in_use() == 0
    assert [cache.pool for cache in loose] == [None, None]
    pool = make_pool(n_blocks=12)
    attach_caches(loose, pool, 3)
    loose[1].release()
    assert pool.stats.blocks_in_use() == 0 and loose[0].empty()


def test_keys_and_values_can_be_set_one_by_one():
    cache = PoolBackedKVCache(make_pool(), 1)
    cache.keys = rows(20)
    cache.values = rows(20)
    cache.offset = 18
    assert cache.n_blocks_held() == 4
    assert mx.array_equal(cache.keys_and_values()[1], rows(18))
    cache.keys = mx.depends(cache.keys, cache.values)  # as models do to order their communication
    check(cache)
    for bad in (-1, 21):
        with pytest.raises(ValueError, match="offset"):
            cache.offset = bad
    cache.keys = cache.values = None
    assert cache.offset == 0 and cache.n_blocks_held() == 0
    append(cache, 2)
    check(cache)


def test_meta_state_stays_empty():
    cache = PoolBackedKVCache(make_pool())
    cache.meta_state = ""
    with pytest.raises(ValueError, match="meta_state"):
        cache.meta_state = "x"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((None,), TypeError),
        (("pool",), TypeError),
        ((None, 1), TypeError),
    ],
)
def test_a_pool_must_be_one(args, error):
    with pytest.raises(error, match="pool"):
        PoolBackedKVCache(*args)


@pytest.mark.parametrize(
    ("owner", "step", "error"),
    [
        (None, None, TypeError),
        (True, None, TypeError),
        (1.0, None, TypeError),
        (2**63, None, ValueError),
        (1, 0, ValueError),
        (1, -1, ValueError),
        (1, 1.5, TypeError),
        (1, True, TypeError),
    ],
)
def test_owner_and_step_are_checked(owner, step, error):
    with pytest.raises(error, match=r"owner|step"):
        PoolBackedKVCache(make_pool(), owner, step)


def test_numpy_ints_become_ints():
    cache = PoolBackedKVCache(make_pool(), np.int64(3), np.int32(8))
    assert (type(cache.owner), type(cache.step)) == (int, int)


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([1], [2], TypeError),
        (rows(2), None, TypeError),
        (rows(2)[0], rows(2)[0], ValueError),
        (rows(2), rows(3), ValueError),
        (rows(2, batch=2), rows(2, batch=2), ValueError),
        (rows(2, dims=5), rows(2), ValueError),
        (rows(2)[:, :1], rows(2)[:, :1], ValueError),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(keys, values, error):
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 3)
    with pytest.raises(error, match=r"\[PoolBackedKVCache::update_and_fetch\]"):
        cache.update_and_fetch(keys, values)
    assert mx.array_equal(cache.keys_and_values()[0], rows(3))
    check(cache)


def test_no_tokens_are_no_step():
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 0)
    assert cache.empty()
    append(cache, 3)
    assert append(cache, 0)[0].shape[2] == 3


# --- faults of the reference, and field cases -----------------------------------------------------


def test_fault_F28_caches_with_the_default_owner_free_their_own_blocks():
    pool = make_pool()
    first, second = PoolBackedKVCache(pool), PoolBackedKVCache(pool)
    append(first, 20)
    append(second, 20)
    first.release()
    assert pool.stats.blocks_in_use() == second.n_blocks_held() == 32
    append(second, 1)
    check(second)


def test_fault_F30_keys_do_not_grow_without_values():
    pool = make_pool(n_blocks=8)
    pool.allocate("v", 33, owner=9)  # one block of values is left, and four of keys
    cache = PoolBackedKVCache(pool, 1)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        append(cache, 17)
    assert caught.value.tokens_that_fit == 16
    assert cache.n_blocks_held() == 0 and pool.n_free("k") == 4
    append(cache, 16)
    check(cache)


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


def test_fault_F33_unused_slots_show():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 1)
    assert pool.stats.unused_slots() == 2 * 255
    assert pool.stats.fragmentation() == 2 / 256
    append(cache, 15)
    assert pool.stats.unused_slots() == 2 * 240
    assert pool.stats.fragmentation() == 0.0


def test_fault_F34_trim_gives_blocks_back():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 300)
    assert cache.trim(200) == 200
    assert pool.stats.blocks_in_use() == 2 * 7
    check(cache)
    assert mx.array_equal(append(cache, 1)[0], rows(101))
    for bad, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"\[PoolBackedKVCache::trim\]"):
            cache.trim(bad)
    assert cache.offset == 101


@pytest.mark.parametrize("again", [True, False])
def test_fault_F26_and_F36_a_released_cache_is_empty(again):
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 20)
    cache.release()
    if again:
        cache.release()
    assert cache.empty() and cache.offset == 0 and pool.stats.blocks_in_use() == 0
    assert mx.array_equal(append(cache, 3)[0], rows(3))
    check(cache)


def test_fault_F39_a_copy_has_its_own_owner_and_charge():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 20)
    twin = copy.deepcopy(cache)
    assert twin.owner != 1 and pool.stats.blocks_in_use() == 64
    append(twin, 1)
    assert mx.array_equal(cache.keys_and_values()[0], rows(20))
    append(cache, 300)
    twin.release()
    assert pool.stats.blocks_in_use() == cache.n_blocks_held()
    check(cache)
    shallow = copy.copy(cache)
    assert shallow.owner != cache.owner and shallow.n_blocks_held() == cache.n_blocks_held()


def test_fault_F41_growth_copies_few_rows():
    cache = PoolBackedKVCache(make_pool(n_blocks=2 * 512, block_size=16), 1)
    data, lengths = rows(1), []
    for _ in range(4096):
        cache.update_and_fetch(data, data)
        mx.eval(cache.keys, cache.values)
        if not lengths or lengths[-1] != cache.keys.shape[2]:
            lengths.append(cache.keys.shape[2])
    assert lengths == [256, 512, 768, 1280, 2048, 3072, 4096 + 512]


def test_freeing_behind_the_cache_is_a_typed_error_until_release():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 7)
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


def test_field_C8_an_offset_taken_before_an_update_stays():
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 2)
    offset = cache.offset
    append(cache, 3)
    assert (offset, cache.offset) == (2, 5)


def test_field_D14_a_quantised_replacement_is_charged_and_the_old_blocks_go_back():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    data = mx.random.normal((1, 2, 20, 64))
    cache.update_and_fetch(data, data)
    held = cache.n_blocks_held()
    quantised = cache.to_quantized(group_size=64, bits=8)
    assert isinstance(quantised, PoolBackedQuantizedKVCache)
    free = pool.n_free("k") + pool.n_free("v")
    del cache
    assert pool.n_free("k") + pool.n_free("v") == free + held
    assert pool.stats.blocks_in_use() == quantised.n_blocks_held() > 0
    assert {block.format for block in pool.blocks_for(1)} == {"int8"}
    keys, _ = quantised.update_and_fetch(data[:, :, :1], data[:, :, :1])
    whole = mx.concatenate([data, data[:, :, :1]], axis=2)
    expected = mx.quantize(whole, group_size=64, bits=8)
    assert all(mx.array_equal(a, b) for a, b in zip(keys, expected, strict=True))
    quantised.check_invariants()


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


def test_field_E14_an_explicit_step_grows_in_steps():
    cache = PoolBackedKVCache(make_pool(n_blocks=2 * 256), 1, 256)
    growths, before = 0, 0
    data = rows(1)
    for _ in range(1024):
        cache.update_and_fetch(data, data)
        growths += cache.keys.shape[2] != before
        before = cache.keys.shape[2]
    assert growths == 4


def test_field_F1_a_negative_trim_is_refused():
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 10)
    with pytest.raises(ValueError, match="n must be >= 0, got -5"):
        cache.trim(-5)
    assert cache.offset == 10


def test_field_F2_trim_stops_at_zero():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, 1)
    append(cache, 10)
    assert cache.trim(25) == 10
    assert (cache.offset, pool.stats.blocks_in_use(), cache.empty()) == (0, 0, True)


def test_field_F16_a_draft_is_rewound_by_what_was_rejected():
    # Four drafts, one accepted: model and draft cache drop three and two.
    cache = PoolBackedKVCache(make_pool(), 1)
    append(cache, 10)
    append(cache, 5)
    assert cache.trim(3) == 3
    assert mx.array_equal(append(cache, 1)[0], rows(13))


def test_a_pool_without_separate_streams_and_one_that_grows():
    for pool in (
        make_pool(n_blocks=32, separate_kv=False),
        make_pool(n_blocks=2, grow_on_exhaustion=True, max_blocks=40),
    ):
        cache = PoolBackedKVCache(pool, 1)
        append(cache, 200)
        append(cache, 56)
        check(cache)
        with pytest.raises(BlockPoolExhaustedError):
            append(cache, 400)
        check(cache)
