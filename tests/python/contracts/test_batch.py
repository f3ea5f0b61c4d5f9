"""What every batch of requests keeps: whose tokens lie where, and the books of the pool."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from cache_kinds import REQUESTS, RING, WINDOW, WINDOWS, in_use, make_pool, offsets, rows
from kvpool.core.exceptions import BlockPoolExhaustedError
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

over_requests = pytest.mark.parametrize("kind", REQUESTS, ids=str)
over_all = pytest.mark.parametrize("kind", [*REQUESTS, *WINDOWS], ids=str)


def small_pool(n_blocks: int = 512, **options):
    return make_pool(n_blocks, 4, **options)


def filled(kind, pool, n: int, owner: int = 1):
    cache = kind.make(pool, owner)
    if n:
        cache.update_and_fetch(rows(n), rows(n))
    return cache


def merged(kind, pool, *lengths: int):
    """A batch of requests of owners 1, 2, ..."""
    caches = [filled(kind, pool, n, owner) for owner, n in enumerate(lengths, start=1)]
    return kind.cls.merge(caches)


def step(batch, n: int, start: int = 1000):
    """Appends tokens ``start + 100 * i + ...`` to request i."""
    data = mx.concatenate([rows(n, start=start + 100 * i) for i in range(len(batch.row_owners))])
    return batch.update_and_fetch(data, data)


def tokens_of(cache) -> list[int]:
    return [] if cache.empty() else cache.keys_and_values()[0][0, 0, :, 0].tolist()


def row_tokens(batch, i: int) -> list[int]:
    """The tokens of request ``i``, without the padding before them."""
    keys = batch.keys_and_values()[0]
    n = min(batch.offset[i].item(), keys.shape[2])
    return keys[i, 0, keys.shape[2] - n :, 0].tolist()


def check(pool, *caches) -> None:
    pool.check_invariants()
    for cache in caches:
        cache.check_invariants()


# --- requests come and go -------------------------------------------------------------------------


@over_all
def test_requests_that_are_merged(kind):
    pool = small_pool()
    caches = [filled(kind, pool, n, owner) for n, owner in ((7, 1), (3, 2), (6, 3))]
    batch = kind.cls.merge(caches)
    assert batch.row_owners == (1, 2, 3)
    assert batch.offset.tolist() == [7, 3, 6] and batch.size() == 7
    assert batch.left_padding.tolist() == [0, 4, 1]
    assert not batch.empty() and batch.pool is pool and batch.nbytes > 0
    keys, values = step(batch, 1)
    assert keys.shape == values.shape == (3, 2, 8, 4)
    for i, n in enumerate((7, 3, 6)):
        assert row_tokens(batch, i) == [*range(n), 1000 + 100 * i]
        assert tokens_of(caches[i]) == list(range(n))  # the request's own cache stays as it was
    del caches
    check(pool, batch)


@over_all
def test_requests_leave_and_join(kind):
    pool = small_pool()
    batch = merged(kind, pool, 5, 3, 4)
    step(batch, 1)
    alone = batch.extract(1)
    assert type(alone) is kind.cls and alone.owner == 2
    assert tokens_of(alone) == [0, 1, 2, 1100]
    batch.filter([0, 2])
    assert batch.row_owners == (1, 3) and batch.offset.tolist() == [6, 5]
    other = kind.cls.merge([filled(kind, pool, 2, 9)])
    batch.extend(other)
    del other
    assert batch.row_owners == (1, 3, 9)
    step(batch, 2, start=2000)
    assert row_tokens(batch, 2) == [0, 1, 2200, 2201]
    assert row_tokens(batch, 1) == [0, 1, 2, 3, 1200, 2100, 2101]
    batch.filter(mx.array([1]))
    assert batch.row_owners == (3,) and batch.offset.tolist() == [7]
    assert in_use(pool) == batch.n_blocks_held() + alone.n_blocks_held()
    check(pool, batch, alone)
    batch.filter([])
    assert batch.row_owners == () and batch.empty()
    assert in_use(pool) == alone.n_blocks_held()
    alone.release()
    assert in_use(pool) == 0


@over_requests
def test_the_layers_of_a_request_stay_one_group(kind):
    pool = small_pool()
    requests = [kind.layers(pool, owner=owner) for owner in (1, 2)]
    for caches in requests:
        for cache in caches:
            cache.update_and_fetch(rows(5), rows(5))
    batches = [kind.cls.merge(list(layer)) for layer in zip(*requests, strict=True)]
    parts = [batch.extract(1) for batch in batches]
    assert offsets(parts) == [5, 5, 5] and {part.owner for part in parts} == {2}
    parts[0].release()
    assert [part.empty() for part in parts] == [True, True, True]
    # The same request twice, as a prompt that is kept may be.
    again = [kind.cls.merge([layer, layer]) for layer in requests[0]]
    pairs = [[batch.extract(i) for batch in again] for i in range(2)]
    pairs[0][2].release()
    assert [part.empty() for part in pairs[0]] == [True, True, True]
    assert offsets(pairs[1]) == [5, 5, 5]
    check(pool, *batches, *again, *pairs[1])


@over_all
def test_a_copy_goes_its_own_way(kind):
    pool = small_pool()
    batch = merged(kind, pool, 7, 3)
    held = in_use(pool)
    twin = copy.deepcopy(batch)
    assert twin.row_owners == (1, 2)
    assert in_use(pool) == (held if kind.paged else 2 * held - _of_requests(pool))
    step(twin, 1)
    assert batch.offset.tolist() == [7, 3] and twin.offset.tolist() == [8, 4]
    check(pool, batch, twin)


def _of_requests(pool) -> int:
    return sum(len(pool.blocks_for(owner)) for owner in (1, 2))


@over_all
def test_state_can_be_evaluated_and_put_back(kind):
    pool = small_pool()
    batch = merged(kind, pool, 7, 3)
    mx.eval([batch.state])
    loose = type(batch).from_state(batch.state)
    assert loose.offset.tolist() == [7, 3] and loose.pool is None
    step(batch, 1)
    batch.state = loose.state
    assert batch.offset.tolist() == [7, 3] and batch.row_owners == (1, 2)
    assert [row_tokens(batch, i) for i in range(2)] == [list(range(7)), list(range(3))]
    check(pool, batch)


@over_all
@pytest.mark.parametrize("bad", [None, 5, (), "ab"])
def test_a_bad_state_is_refused_and_changes_nothing(kind, bad):
    pool = small_pool()
    batch = merged(kind, pool, 7, 3)
    with pytest.raises((TypeError, ValueError), match=rf"\[{type(batch).__name__}::state\]"):
        batch.state = bad
    assert batch.offset.tolist() == [7, 3]
    check(pool, batch)


@over_requests
def test_trim_drops_as_many_of_each(kind):
    pool = small_pool()
    batch = merged(kind, pool, 7, 3)
    assert batch.is_trimmable() and batch.trim(2) == 2
    assert batch.offset.tolist() == [5, 1]
    step(batch, 1)
    assert row_tokens(batch, 0) == [0, 1, 2, 3, 4, 1000]
    for bad, error in ((-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=rf"\[{type(batch).__name__}::trim\] n must be"):
            batch.trim(bad)
    check(pool, batch)


# --- masks and padding ----------------------------------------------------------------------------


@over_requests
@pytest.mark.parametrize("window_size", [None, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_the_mask_is_that_of_mlx_lm(kind, n, window_size):
    batch = merged(kind, small_pool(), 5, 2, 7)
    stock = BatchKVCache.merge([_stock(k) for k in (5, 2, 7)])
    expected = stock.make_mask(n, return_array=False, window_size=window_size)
    mask = batch.make_mask(n, return_array=False, window_size=window_size)
    assert mx.array_equal(mask, mx.broadcast_to(expected, mask.shape))


def _stock(n: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(rows(n), rows(n))
    return cache


@over_all
@pytest.mark.parametrize("n_tokens", [6, 7, 8, 9, 13])
def test_field_F13_a_mask_is_as_wide_as_the_keys(kind, n_tokens):
    pool = small_pool()
    batch = kind.cls.merge([kind.make(pool, owner) for owner in (1, 2)])
    for chunk in (n_tokens, 1, 1, 3, 1):
        mask = batch.make_mask(chunk, return_array=True)
        keys, _ = step(batch, chunk)
        assert mask.shape[-2:] == (chunk, keys.shape[2])
    check(pool, batch)


@over_requests
def test_prompts_that_are_padded_on_the_right(kind):
    pool = small_pool()
    batch = kind.cls.merge([kind.make(pool, owner) for owner in (1, 2, 3)])
    lengths = (7, 2, 4)
    batch.prepare(lengths=list(lengths), right_padding=[0, 5, 3])
    for start, n in ((0, 3), (3, 3), (6, 1)):
        mask = batch.make_mask(n, return_array=True)
        data = mx.concatenate([rows(n, start=100 * i + start) for i in range(3)])
        keys, _ = batch.update_and_fetch(data, data)
        width = keys.shape[2]
        assert mask.shape[-2:] == (n, width)
        mask = mx.broadcast_to(mask, (3, 1, n, width))
        for i, length in enumerate(lengths):
            for q in range(max(0, min(n, length - start))):
                seen = [c for c in range(width) if mask[i, 0, q, c].item()]
                assert keys[i, 0, :, 0][mx.array(seen)].tolist() == [
                    100 * i + j for j in range(start + q + 1)
                ]
    batch.finalize()
    assert batch.offset.tolist() == list(lengths)
    for i, length in enumerate(lengths):
        assert row_tokens(batch, i) == [100 * i + j for j in range(length)]
    check(pool, batch)


@over_requests
def test_a_step_cut_short_is_taken_back_in_every_request(kind):
    pool = small_pool()
    requests = [kind.layers(pool, n_layers=2, owner=owner) for owner in (1, 2)]
    for caches, n in zip(requests, (9, 2), strict=True):
        for cache in caches:
            cache.update_and_fetch(rows(n), rows(n))
    batches = [kind.cls.merge(list(layer)) for layer in zip(*requests, strict=True)]
    step(batches[0], 2, start=7000)  # and the model raised before the second layer
    batches[0].make_mask(1)  # the next step begins
    assert [batch.offset.tolist() for batch in batches] == 2 * [[9, 2]]
    for batch in batches:
        step(batch, 1, start=8000)
    assert [row_tokens(batch, 1) for batch in batches] == 2 * [[0, 1, 8100]]
    check(pool, *batches)


@pytest.mark.parametrize("kind", [RING, WINDOW], ids=str)
def test_field_F6_a_merge_goes_by_the_rows_that_are_kept(kind):
    pool = make_pool(n_blocks=1024)
    long, short = kind.make(pool, 1), kind.make(pool, 2)
    for cache, n in ((long, 1024), (short, 59)):
        cache.update_and_fetch(rows(n), rows(n))
        cache.update_and_fetch(rows(1, start=n), rows(1, start=n))
    batch = kind.cls.merge([long, short])
    keys, _ = batch.keys_and_values()
    assert keys.shape[2] == 1024
    assert keys[0, 0, :, 0].tolist() == list(range(1, 1025))
    assert keys[1, 0, 964:, 0].tolist() == list(range(60))
    assert (keys[1, 0, :964] == 0).all()
    check(pool, batch)


# --- where the pool is too small ------------------------------------------------------------------


@over_requests
def test_running_out_changes_no_request(kind):
    pool = small_pool(n_blocks=2 * (2 + 2))
    batch = merged(kind, pool, 8, 7)
    with pytest.raises(BlockPoolExhaustedError):
        step(batch, 1)  # there is no room for the first
    assert batch.offset.tolist() == [8, 7]
    check(pool, batch)
    assert [row_tokens(batch, i) for i in range(2)] == [list(range(8)), list(range(7))]
    batch.filter([0])
    step(batch, 5)
    assert row_tokens(batch, 0) == [*range(8), *range(1000, 1005)]
    check(pool, batch)


@over_requests
def test_a_step_of_several_layers_that_does_not_fit_moves_none(kind):
    pool = small_pool(n_blocks=2 * 2 * 2 * 3)
    by_rows = {} if kind.paged else {"step": 1}
    requests = [kind.layers(pool, n_layers=2, owner=owner, **by_rows) for owner in (1, 2)]
    for caches in requests:
        for cache in caches:
            cache.update_and_fetch(rows(10), rows(10))
    batches = [kind.cls.merge(list(layer)) for layer in zip(*requests, strict=True)]
    del requests, caches, cache
    with pytest.raises(BlockPoolExhaustedError, match="2 tokens fit") as raised:
        step(batches[0], 3)
    assert raised.value.tokens_that_fit == 2
    assert [batch.offset.tolist() for batch in batches] == 2 * [[10, 10]]
    assert [batch.n_blocks_held() for batch in batches] == 2 * [2 * 2 * 3]
    for batch in batches:
        step(batch, 2)
    assert [batch.offset.tolist() for batch in batches] == 2 * [[12, 12]]
    check(pool, *batches)


# --- bad input ------------------------------------------------------------------------------------


@over_all
def test_what_cannot_be_one_batch_is_refused(kind):
    pool = small_pool()
    ours = filled(kind, pool, 3)
    other = {str(k): k for k in [*REQUESTS, *WINDOWS] if k is not kind}
    for caches, error in (
        ([], ValueError),
        ([ours, QuantizedKVCache()], TypeError),
        ([ours, None], TypeError),
        ([kind.stock()], TypeError),
        ([ours, KVCache() if kind.window else RotatingKVCache(8)], TypeError),
        ([ours, filled(kind, small_pool(), 3)], ValueError),
        ([kind.cls.from_state(ours.state)], RuntimeError),
        *(([ours, filled(k, pool, 3)], (TypeError, ValueError)) for k in other.values()),
    ):
        with pytest.raises(error, match=rf"\[{kind.cls.__name__}::merge\]"):
            kind.cls.merge(caches)
    batch = kind.cls.merge([ours])
    name = type(batch).__name__
    for wrong, error in (
        (BatchKVCache([0]), TypeError),
        (ours, TypeError),
        (kind.cls.merge([filled(kind, small_pool(), 3)]), ValueError),
    ):
        with pytest.raises(error, match=rf"\[{name}::extend\]"):
            batch.extend(wrong)
    check(pool, batch)


@over_all
def test_requests_of_other_heads_or_dims_are_refused(kind):
    pool = small_pool()
    ours = filled(kind, pool, 3)
    batch = kind.cls.merge([ours])
    for other in (rows(3, dims=5), rows(3)[:, :1]):
        wide = kind.make(pool, 2)
        wide.update_and_fetch(other, other)
        with pytest.raises(ValueError, match=r"::merge\] the caches differ in heads or dims"):
            kind.cls.merge([ours, wide])
        with pytest.raises(ValueError, match=r"::extend\] the caches differ in heads or dims"):
            batch.extend(kind.cls.merge([wide]))
    assert batch.row_owners == (1,)
    check(pool, batch)


@over_all
@pytest.mark.parametrize("idx", [2, -3])
def test_a_row_that_is_not_there(kind, idx):
    pool = small_pool()
    batch = merged(kind, pool, 7, 2)
    with pytest.raises(IndexError, match=rf"extract\] there are 2 \w+, got {idx}"):
        batch.extract(idx)
    with pytest.raises(IndexError, match=rf"filter\] there are 2 \w+, got {idx}"):
        batch.filter([0, idx])
    with pytest.raises(TypeError, match=r"extract\] idx must be an int, got 1.0"):
        batch.extract(1.0)
    assert len(batch.row_owners) == 2
    check(pool, batch)


@over_all
def test_tokens_and_lengths_of_another_number_of_requests(kind):
    pool = small_pool()
    batch = merged(kind, pool, 7, 2)
    with pytest.raises(ValueError, match=r"::update_and_fetch\]"):
        batch.update_and_fetch(rows(1, batch=3), rows(1, batch=3))
    with pytest.raises(ValueError, match=r"::prepare\] lengths must have 2 items"):
        batch.prepare(lengths=[1, 2, 3])
    assert batch.offset.tolist() == [7, 2]
    check(pool, batch)
