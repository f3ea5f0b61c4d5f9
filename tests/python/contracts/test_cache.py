"""What every cache of one layer keeps: mlx-lm's contract, and the books of the pool."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_kinds import SINGLES, append, blocks_for, in_use, make_pool, rows
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.mlx_lm import attach_caches

pytestmark = pytest.mark.parametrize("kind", SINGLES, ids=str)


# --- mlx-lm's contract ----------------------------------------------------------------------------


def test_fault_F37_whatever_stock_offers_is_there(kind):
    stock, ours = kind.stock(), kind.make(make_pool())
    offered = {name for name in dir(stock) if not name.startswith("_")}
    if kind.paged:
        offered -= {"step", "max_size", "keep"}  # there are no buffers
    assert [name for name in offered if not hasattr(ours, name)] == []
    for cache in (stock, ours):
        append(cache, 3)
    assert len(ours.state) == (3 if kind.paged else len(stock.state))
    assert ours.state[2] == stock.state[2] == 3
    again = kind.cls.from_state(ours.state)
    assert again.offset == 3
    assert kind.same(again.keys_and_values()[0], rows(3))


def test_an_empty_cache(kind):
    pool = make_pool()
    cache = kind.make(pool)
    assert (cache.pool, cache.owner, cache.offset) == (pool, -1, 0)
    assert cache.keys is None and cache.values is None and cache.empty()
    assert cache.keys_and_values() == (None, None)
    assert cache.state[:3] == (None, None, 0)
    assert (cache.meta_state, cache.nbytes, cache.size()) == ("", 0, 0)
    assert not hasattr(cache, "__len__") and not hasattr(cache, "bits")
    assert cache, "an empty cache must be true, or a model forgets its mask"
    assert repr(cache).startswith(f"{kind.cls.__name__}(owner=-1, offset=0")


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_returns_all_tokens_so_far(kind, block_size):
    cache = kind.make(make_pool(n_blocks=2048, block_size=block_size), 1)
    for n in (5, 1, 1, 300, 7):
        keys, values = append(cache, n)
        assert kind.same(keys, rows(cache.offset))
        assert kind.same(values, rows(cache.offset))
    assert cache.size() == cache.offset == 314
    assert not cache.empty() and cache.nbytes > 0
    kind.check(cache)


def test_keys_and_values_may_differ_in_dims_and_dtype(kind):
    cache = kind.make(make_pool(), 1)
    keys, values = cache.update_and_fetch(
        rows(3, dims=6, dtype=mx.bfloat16), rows(3, dims=2, dtype=mx.float16)
    )
    assert (keys.shape[3], values.shape[3]) == (6, 2)
    assert (keys.dtype, values.dtype) == (mx.bfloat16, mx.float16)
    formats = {(b.stream, b.format) for b in cache.pool.blocks_for(1)}
    assert formats == {("k", kind.format or "bf16"), ("v", kind.format or "fp16")}


@pytest.mark.parametrize(
    ("n", "as_array", "window"),
    [(1, False, None), (4, False, None), (4, True, None), (1, False, 3)],
)
def test_the_mask_is_that_of_mlx_lm(kind, n, as_array, window):
    cache, stock = kind.make(make_pool(), 1), kind.stock()
    append(cache, 6), append(stock, 6)
    expected = stock.make_mask(n, return_array=as_array, window_size=window)
    mask = cache.make_mask(n, return_array=as_array, window_size=window)
    if isinstance(expected, mx.array):
        assert mx.array_equal(mask, expected)
    else:
        assert mask == expected


def test_a_state_can_be_set(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 20)
    mx.eval([cache.state])
    keys = rows(20)
    for state in (cache.state, kind.state(keys, keys, 20), list(kind.state(keys, keys, 20))):
        twin = kind.make(pool, 2)
        twin.state = state
        assert twin.offset == 20
        assert kind.same(twin.keys_and_values()[0], keys)
        kind.check(twin)
    twin.state = kind.state(None, None, 0)
    assert twin.empty() and twin.n_blocks_held() == 0


@pytest.mark.parametrize("bad", [None, (None,), "ab", (1, 2), (None, None, 1)])
def test_a_bad_state_is_refused_and_changes_nothing(kind, bad):
    cache = kind.make(make_pool(), 1)
    append(cache, 20)
    name = kind.cls.__name__
    with pytest.raises((ValueError, TypeError), match=rf"\[{name}::state\]"):
        cache.state = bad
    assert cache.offset == 20
    kind.check(cache)
    with pytest.raises((ValueError, TypeError), match=rf"\[{name}::state\]"):
        kind.cls.from_state(bad)


def test_field_H1_an_offset_below_the_buffer_is_kept(kind):
    cache = kind.cls.from_state(kind.state(rows(256), rows(256), 5))
    assert cache.offset == 5
    assert kind.same(cache.keys_and_values()[0], rows(5))


def test_arrays_handed_out_keep_what_they_show(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    given = rows(20)
    keys, values = cache.update_and_fetch(given, given)
    cache.trim(15)
    other = rows(9, start=99)
    cache.update_and_fetch(other, other)
    kept = cache.keys_and_values()[0]
    cache.release()
    stranger = kind.make(pool, 2)
    data = rows(200, start=1000)
    mx.eval(stranger.update_and_fetch(data, data))
    assert mx.array_equal(given, rows(20))
    assert kind.same(keys, rows(20)) and kind.same(values, rows(20))
    assert kind.same(kept, mx.concatenate([rows(5), other], axis=2))
    del keys, values, kept
    assert in_use(pool) == stranger.n_blocks_held()


def test_a_state_is_out_of_reach_of_writes(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 20)
    state = cache.state
    cache.trim(3)
    cache.update_and_fetch(rows(1, start=99), rows(1, start=99))
    twin = kind.make(pool, 2)
    twin.state = state
    twin.trim(1)
    twin.update_and_fetch(rows(1, start=77), rows(1, start=77))
    assert kind.same(kind.cls.from_state(state).keys_and_values()[0], rows(20))


def test_from_state_needs_attach_before_it_can_grow(kind):
    pool = make_pool()
    loose = kind.cls.from_state(kind.state(rows(20), rows(20), 20))
    assert loose.pool is None and loose.size() == 20 and in_use(pool) == 0
    with pytest.raises(RuntimeError, match=rf"\[{kind.cls.__name__}::update_and_fetch\].*attach"):
        append(loose, 1)
    assert loose.trim(2) == 2
    loose.attach(pool, 3)
    assert (loose.pool, loose.owner) == (pool, 3)
    assert in_use(pool) == 4
    assert mx.array_equal(append(loose, 1)[0], rows(19))
    loose.check_invariants()
    with pytest.raises(ValueError, match="has a pool already"):
        loose.attach(pool, 3)


def test_attaching_a_list_makes_one_group_or_changes_nothing(kind):
    pool = make_pool(n_blocks=10)
    loose = [kind.cls.from_state(kind.state(rows(40), rows(40), 40)) for _ in range(2)]
    with pytest.raises(BlockPoolExhaustedError):
        attach_caches(loose, pool, 3)
    assert in_use(pool) == 0
    assert [cache.pool for cache in loose] == [None, None]
    assert [cache.offset for cache in loose] == [40, 40]
    pool = make_pool(n_blocks=12)
    attach_caches(loose, pool, 3)
    loose[1].release()
    assert in_use(pool) == 0 and loose[0].empty()


@pytest.mark.parametrize("bad", [None, "pool", 4096])
def test_a_pool_to_attach_to_must_be_one(kind, bad):
    loose = kind.cls.from_state(kind.state(rows(20), rows(20), 20))
    with pytest.raises(TypeError, match=rf"\[{kind.cls.__name__}::attach\] pool must be"):
        loose.attach(bad)
    with pytest.raises(TypeError, match="owner must be an int, got None"):
        loose.attach(make_pool(), None)
    assert loose.pool is None and loose.size() == 20


def test_keys_may_be_set_to_what_depends_on_the_values(kind):
    """As models do to order their communication."""
    cache = kind.make(make_pool(), 1)
    append(cache, 20)
    cache.keys = mx.depends(cache.keys, cache.values)
    assert kind.same(cache.keys_and_values()[0], rows(20))
    kind.check(cache)
    cache.keys = cache.values = None
    assert cache.offset == 0 and cache.n_blocks_held() == 0
    append(cache, 2)
    kind.check(cache)


def test_meta_state_stays_empty(kind):
    cache = kind.make(make_pool())
    cache.meta_state = ""
    with pytest.raises(ValueError, match=rf"\[{kind.cls.__name__}::meta_state\].*'x'"):
        cache.meta_state = "x"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [None, "pool", 4096])
def test_a_pool_must_be_one(kind, pool):
    with pytest.raises(TypeError, match=rf"\[{kind.cls.__name__}\] pool must be .*{pool!r}"):
        kind.make(pool, 1)


@pytest.mark.parametrize(
    ("owner", "error"),
    [(None, TypeError), (True, TypeError), (1.0, TypeError), (2**63, ValueError)],
)
def test_an_owner_is_an_int_of_64_bits(kind, owner, error):
    with pytest.raises(error, match=rf"\[{kind.cls.__name__}\] owner must be .*{owner}"):
        kind.make(make_pool(), owner)


def test_numpy_ints_become_ints(kind):
    assert type(kind.make(make_pool(), np.int64(3)).owner) is int


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([1], [2], TypeError),
        (rows(2), None, TypeError),
        (rows(2)[0], rows(2)[0], ValueError),
        (rows(2), rows(3), ValueError),
    ],
)
@pytest.mark.parametrize("n_before", [0, 3])
def test_what_is_no_pair_of_keys_and_values_is_refused(kind, keys, values, error, n_before):
    _refuses(kind, n_before, keys, values, error)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (rows(2, batch=2), rows(2, batch=2)),
        (rows(2, dims=5), rows(2)),
        (rows(2), rows(2, dims=5)),
        (rows(2)[:, :1], rows(2)[:, :1]),
    ],
)
def test_what_does_not_fit_the_tokens_there_is_refused(kind, keys, values):
    _refuses(kind, 3, keys, values, ValueError)


def _refuses(kind, n_before, keys, values, error):
    cache = kind.make(make_pool(), 1)
    if n_before:
        append(cache, n_before)
    with pytest.raises(error, match=r"\[(P\w+Cache|PagedLayer)::update_and_fetch\]"):
        cache.update_and_fetch(keys, values)
    assert cache.offset == n_before
    kind.check(cache)
    assert kind.same(append(cache, 1)[0], rows(n_before + 1))
    kind.check(cache)


def test_no_tokens_are_no_step(kind):
    cache = kind.make(make_pool(), 1)
    append(cache, 0)
    assert cache.empty()
    append(cache, 3)
    assert append(cache, 0)[0].shape[2] == 3


# --- the books ------------------------------------------------------------------------------------


def test_fault_F28_caches_with_the_default_owner_free_their_own_blocks(kind):
    pool = make_pool()
    first, second = kind.make(pool), kind.make(pool)
    append(first, 20)
    append(second, 20)
    first.release()
    assert in_use(pool) == second.n_blocks_held() > 0
    append(second, 1)
    kind.check(second)


def test_fault_F30_keys_do_not_grow_without_values(kind):
    pool = make_pool(n_blocks=8)
    pool.allocate("v", 33, owner=9)  # one block of values is left, and four of keys
    cache = kind.make(pool, 1)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        append(cache, 17)
    assert caught.value.tokens_that_fit == 16
    assert cache.n_blocks_held() == 0 and pool.n_free("k") == 4
    append(cache, 16)
    kind.check(cache)


def test_fault_F33_unused_slots_show(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 1)
    assert pool.stats.unused_slots() == 16 * cache.n_blocks_held() - 2
    assert pool.stats.fragmentation() == 2 / 256
    append(cache, 15)
    assert pool.stats.unused_slots() == 16 * cache.n_blocks_held() - 32
    assert pool.stats.fragmentation() == 0.0


def test_fault_F34_trim_gives_blocks_back(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 300)
    assert cache.trim(200) == 200
    assert in_use(pool) == blocks_for(100)
    kind.check(cache)
    assert kind.same(append(cache, 1)[0], rows(101))


@pytest.mark.parametrize("again", [True, False])
def test_fault_F26_and_F36_a_released_cache_is_empty(kind, again):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 20)
    cache.release()
    if again:
        cache.release()
    assert cache.empty() and cache.offset == 0 and in_use(pool) == 0
    assert kind.same(append(cache, 3)[0], rows(3))
    kind.check(cache)


def test_fault_F39_a_copy_has_its_own_owner_and_goes_its_own_way(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 20)
    held = cache.n_blocks_held()
    twin = copy.deepcopy(cache)
    assert type(twin) is kind.cls and twin.pool is pool and twin.owner != 1
    assert in_use(pool) == (held if kind.paged else 2 * held)
    assert kind.same(append(twin, 1)[0], rows(21))
    assert kind.same(cache.keys_and_values()[0], rows(20))
    append(cache, 300)
    twin.release()
    assert in_use(pool) == cache.n_blocks_held()
    kind.check(cache)
    shallow = copy.copy(cache)
    assert shallow.owner != cache.owner and shallow.n_blocks_held() == cache.n_blocks_held()


def test_freeing_behind_the_cache_is_a_typed_error_until_release(kind):
    pool = make_pool()
    cache = kind.make(pool, 7)
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
    kind.check(cache)


@pytest.mark.parametrize(
    "options",
    [
        {"n_blocks": 32, "separate_kv": False},
        {"n_blocks": 2, "grow_on_exhaustion": True, "max_blocks": 40},
    ],
    ids=["one stream", "growing"],
)
def test_pools_of_other_kinds(kind, options):
    cache = kind.make(make_pool(**options), 1)
    append(cache, 200)
    append(cache, 48)
    kind.check(cache)
    with pytest.raises(BlockPoolExhaustedError):
        append(cache, 400)
    kind.check(cache)


# --- field cases ----------------------------------------------------------------------------------


def test_field_C8_an_offset_taken_before_an_update_stays(kind):
    cache = kind.make(make_pool(), 1)
    append(cache, 2)
    offset = cache.offset
    append(cache, 3)
    assert (offset, cache.offset) == (2, 5)


def test_field_D14_a_quantised_replacement_is_charged_and_the_old_blocks_go_back(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    if kind.ring:
        with pytest.raises(NotImplementedError, match="rings are not quantised"):
            cache.to_quantized()
        return
    mx.random.seed(2)
    data = mx.random.normal((1, 2, 20, 64))
    mx.eval(cache.update_and_fetch(data, data))
    held = cache.n_blocks_held()
    narrow = cache.to_quantized(group_size=64, bits=8)
    mx.eval(narrow.keys)
    assert (narrow.owner, narrow.offset) == (1, 20)
    if narrow is cache:  # it is that narrow already
        held = 0
    free = pool.n_free("k") + pool.n_free("v")
    del cache
    assert in_use(pool) == narrow.n_blocks_held() > 0
    assert pool.n_free("k") + pool.n_free("v") == free + held
    assert {block.format for block in pool.blocks_for(1)} == {"int8"}
    narrow.check_invariants()


def test_field_E15_a_full_pool_has_room_in_its_tails(kind):
    pool = make_pool(n_blocks=4)
    cache = kind.make(pool, 1)
    append(cache, 17)
    assert pool.n_free("k") == pool.n_free("v") == 0
    append(cache, 15)
    with pytest.raises(BlockPoolExhaustedError):
        append(cache, 16)
    assert cache.offset == 32
    kind.check(cache)


def test_field_F1_a_negative_trim_is_refused(kind):
    cache = kind.make(make_pool(), 1)
    append(cache, 10)
    call = rf"\[{kind.cls.__name__}::trim\] n must be "
    with pytest.raises(ValueError, match=call + ">= 0, got -5"):
        cache.trim(-5)
    for bad in (1.0, True, None):
        with pytest.raises(TypeError, match=call + f"an int, got {bad}"):
            cache.trim(bad)
    assert cache.offset == 10


def test_field_F2_trim_stops_at_zero(kind):
    pool = make_pool()
    cache = kind.make(pool, 1)
    append(cache, 10)
    assert cache.is_trimmable() and cache.trim(25) == 10
    assert (cache.offset, in_use(pool), cache.empty()) == (0, 0, True)
    assert cache.keys is None and cache.trim(1) == 0


def test_field_F15_what_is_shared_counts_in_tokens_not_in_capacity(kind):
    cache = kind.make(make_pool(), 1)
    append(cache, 300)
    assert cache.trim(300 - 200) == 100
    assert cache.offset == 200 and cache.n_blocks_held() == blocks_for(200)
    assert kind.same(append(cache, 1)[0], rows(201))


def test_field_F16_a_draft_is_rewound_by_what_was_rejected(kind):
    # Four drafts, one accepted: model and draft cache drop three and two.
    model, draft = kind.make(make_pool(), 1), kind.make(make_pool(), 2)
    for cache in (model, draft):
        append(cache, 10)
    append(model, 5)
    append(draft, 4)
    assert (model.trim(3), draft.trim(2)) == (3, 2)
    assert model.offset == draft.offset == 12
    assert kind.same(append(model, 1)[0], rows(13))
