"""PagedBatchKVCache: requests come and go, and nothing is copied."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
import pytest
from kvpool import _mlx, build_paged_caches
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.paged import PagedBatchKVCache, PagedKVCache
from mlx_lm.models.cache import BatchKVCache, KVCache


def make_pool(n_blocks: int = 512, block_size: int = 4) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))


def rows(n: int, start: int = 0) -> mx.array:
    ids = mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(ids, (1, 2, n, 4))


def filled(pool, n: int, owner: int, start: int = 0, **options) -> PagedKVCache:
    cache = PagedKVCache(pool, owner, **options)
    if n:
        cache.update_and_fetch(rows(n, start), rows(n, start))
    return cache


def tokens_of(cache) -> list[int]:
    return [] if cache.keys is None else cache.keys[0, 0, :, 0].tolist()


def step(batch, n: int, start: int = 1000):
    data = mx.concatenate([rows(n, start + 100 * i) for i in range(len(batch.row_owners))])
    return batch.update_and_fetch(data, data)


def test_merging_copies_nothing_and_keeps_owners():
    pool = make_pool()
    caches = [filled(pool, n, owner) for n, owner in ((10, 1), (3, 2), (6, 3))]
    held = pool.stats.blocks_in_use()
    batch = PagedKVCache.merge(caches)
    assert type(batch) is PagedBatchKVCache
    assert pool.stats.blocks_in_use() == held
    assert batch.row_owners == (1, 2, 3)
    assert batch.offset.tolist() == [10, 3, 6] and batch.size() == 10
    assert batch.left_padding.tolist() == [0, 7, 4]
    keys, values = step(batch, 1)
    assert keys.shape == values.shape == (3, 2, 11, 4)
    for i, n in enumerate((10, 3, 6)):
        expected = [0] * (10 - n) + list(range(n)) + [1000 + 100 * i]
        assert keys[i, 0, :, 0].tolist() == expected
        assert tokens_of(caches[i]) == list(range(n))  # the request's own cache stays as it was
    del caches
    batch.check_invariants()
    pool.check_invariants()


def test_the_layers_of_a_request_stay_one_group():
    pool = make_pool()
    model = SimpleNamespace(layers=[None] * 3)
    requests = [build_paged_caches(model, pool, owner) for owner in (1, 2)]
    batches = [PagedKVCache.merge(list(layer)) for layer in zip(*requests, strict=True)]
    groups = [[row._group for row in batch._rows] for batch in batches]
    assert groups[0] == groups[1] == groups[2] and groups[0][0] is not groups[0][1]
    # The same request twice, as a prompt that is kept may be.
    again = [PagedKVCache.merge([layer, layer]) for layer in requests[0]]
    groups = [[row._group for row in batch._rows] for batch in again]
    assert groups[0] == groups[1] == groups[2] and groups[0][0] is not groups[0][1]
    extracted = [batch.extract(1)._group for batch in again]
    assert extracted[0] is extracted[1] is extracted[2]


def test_requests_leave_and_join():
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, n, n) for n in (10, 3, 6)])
    step(batch, 1)
    alone = batch.extract(1)
    assert type(alone) is PagedKVCache and alone.owner == 3
    assert tokens_of(alone) == [0, 1, 2, 1100]
    batch.filter([0, 2])
    assert batch.row_owners == (10, 6)
    other = PagedKVCache.merge([filled(pool, 2, 9)])
    batch.extend(other)
    assert batch.row_owners == (10, 6, 9) and other.row_owners == ()
    keys, _ = step(batch, 2, start=2000)
    assert keys[2, 0, :, 0].tolist() == [0] * 9 + [0, 1, 2200, 2201]
    batch.filter(mx.array([1]))
    assert batch.offset.tolist() == [9]
    held = batch.n_blocks_held() + alone.n_blocks_held()
    del keys, _
    assert pool.stats.blocks_in_use() == held
    batch.filter([])
    assert batch.row_owners == () and batch.empty()
    assert pool.stats.blocks_in_use() == alone.n_blocks_held()
    for bad in ([1], [-1]):
        with pytest.raises(IndexError):
            batch.filter(bad)


def test_field_F6_a_batch_of_windows_is_as_wide_as_what_they_keep():
    pool = make_pool(n_blocks=1024, block_size=16)
    caches = [PagedKVCache(pool, owner, window=1024) for owner in (1, 2)]
    for cache, n in zip(caches, (1024, 59), strict=True):
        cache.update_and_fetch(rows(n), rows(n))
        cache.update_and_fetch(rows(1, n), rows(1, n))
    batch = PagedKVCache.merge(caches)
    keys, _ = batch.keys_and_values()
    assert keys.shape[2] == 1024
    assert (keys[1, 0, :, 0] == 0).sum().item() == 964 + 1  # token 0 of the short one is 0, too
    assert keys[1, 0, 964:, 0].tolist() == list(range(60))
    assert keys[0, 0, :, 0].tolist() == list(range(1, 1025))


@pytest.mark.parametrize("window_size", [None, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_the_mask_is_that_of_mlx_lm(n, window_size):
    pool = make_pool()
    lengths = (5, 2, 7)
    batch = PagedKVCache.merge([filled(pool, k, k) for k in lengths])
    stock = BatchKVCache.merge([_stock(k) for k in lengths])
    expected = stock.make_mask(n, return_array=False, window_size=window_size)
    mask = batch.make_mask(n, return_array=False, window_size=window_size)
    assert mx.array_equal(mask, mx.broadcast_to(expected, mask.shape))


def test_of_one_query_the_mask_hides_padding_alone(monkeypatch):
    told = []
    monkeypatch.setattr(_mlx, "padding_mask", lambda mask, n_rows: told.append(n_rows) or mask)
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, k, k) for k in (5, 2, 7)])
    batch.make_mask(1)
    batch.make_mask(1, window_size=8)
    assert told == [[6, 3, 8], [6, 3, 8]]
    for options in ({"N": 2}, {"N": 1, "window_size": 7}):  # it hides tokens, too
        batch.make_mask(**options)
    windows = PagedKVCache.merge([filled(pool, k, k, window=4) for k in (5, 2)])
    assert len(told) == 2
    windows.make_mask(1)
    assert told[2] == [4, 3]


def _stock(n: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(rows(n), rows(n))
    return cache


def test_even_requests_need_no_mask():
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, 5, 1), filled(pool, 5, 2)])
    assert batch.make_mask(1) is None and batch.make_mask(3) == "causal"
    assert batch.make_mask(3, return_array=True).shape == (2, 1, 3, 8)


def test_field_F9_before_anything_is_written_the_mask_counts_what_comes():
    pool = make_pool()
    batch = PagedKVCache.merge([PagedKVCache(pool, owner) for owner in (1, 2)])
    batch.prepare(lengths=[4, 1], right_padding=[0, 3])
    mask = batch.make_mask(4)
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].tolist() == [[c <= q for c in range(4)] for q in range(4)]
    assert mask[1, 0, 0].tolist() == [False, False, False, True]


def test_prompts_padded_on_the_right_leave_their_padding_out():
    pool = make_pool()
    batch = PagedKVCache.merge([PagedKVCache(pool, owner) for owner in (1, 2, 3)])
    batch.prepare(lengths=[7, 2, 4], right_padding=[0, 5, 3])
    for start, n in ((0, 3), (3, 3), (6, 1)):
        mask = batch.make_mask(n)
        data = mx.concatenate([rows(n, 100 * i + start) for i in range(3)])
        keys, _ = batch.update_and_fetch(data, data)
        assert mask.shape == (3, 1, n, keys.shape[2])
        for i, length in enumerate((7, 2, 4)):
            seen = min(start + n, length)
            width = keys.shape[2]
            assert keys[i, 0, width - seen :, 0].tolist() == [100 * i + j for j in range(seen)]
            for q in range(max(0, min(n, length - start))):
                columns = [c for c in range(width) if mask[i, 0, q, c].item()]
                assert keys[i, 0, :, 0][mx.array(columns)].tolist() == [
                    100 * i + j for j in range(start + q + 1)
                ]
    batch.finalize()
    assert batch.offset.tolist() == [7, 2, 4]
    assert batch.n_blocks_held() == 2 * (2 + 1 + 1)


def test_running_out_changes_no_request():
    pool = make_pool(n_blocks=2 * 4)
    batch = PagedKVCache.merge([filled(pool, 7, 1), filled(pool, 8, 2)])
    with pytest.raises(BlockPoolExhaustedError):
        step(batch, 1)  # the first has room, the second has not
    assert batch.offset.tolist() == [7, 8]
    pool.check_invariants()
    batch.check_invariants()
    batch.filter([0])
    keys, _ = step(batch, 5)
    assert keys.shape[2] == 12


def test_trim_drops_as_many_of_each():
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, 7, 1), filled(pool, 3, 2)])
    assert batch.is_trimmable() and batch.trim(2) == 2
    assert batch.offset.tolist() == [5, 1]
    assert batch.trim(9) == 1
    assert batch.offset.tolist() == [4, 0]
    with pytest.raises(ValueError, match="n must be >= 0"):
        batch.trim(-1)


def test_a_copy_is_a_batch_of_forks():
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, 7, 1), filled(pool, 3, 2)])
    held = pool.stats.blocks_in_use()
    twin = copy.deepcopy(batch)
    assert pool.stats.blocks_in_use() == held
    step(twin, 1)
    assert batch.offset.tolist() == [7, 3] and twin.offset.tolist() == [8, 4]


def test_state_can_be_evaluated_and_put_back():
    pool = make_pool()
    batch = PagedKVCache.merge([filled(pool, 7, 1), filled(pool, 3, 2)])
    mx.eval([batch.state])
    loose = PagedBatchKVCache.from_state(batch.state)
    assert loose.offset.tolist() == [7, 3] and loose.pool is None
    step(batch, 1)
    batch.state = loose.state
    assert batch.offset.tolist() == [7, 3]


def test_what_cannot_be_one_batch_is_refused():
    pool = make_pool()
    ours = filled(pool, 3, 1)
    for caches, error in (
        ([], ValueError),
        ([ours, KVCache()], TypeError),
        ([ours, filled(make_pool(), 3, 1)], ValueError),
        ([ours, filled(pool, 3, 1, window=8)], ValueError),
        ([PagedKVCache.from_state((rows(2), rows(2), 2))], RuntimeError),
    ):
        with pytest.raises(error, match=r"\[PagedKVCache::merge\]"):
            PagedKVCache.merge(caches)
    batch = PagedKVCache.merge([ours])
    with pytest.raises(TypeError, match=r"\[PagedBatchKVCache::extend\]"):
        batch.extend(BatchKVCache([0]))
    with pytest.raises(ValueError, match="2 requests"):
        PagedKVCache.merge([ours, ours]).update_and_fetch(rows(1), rows(1))
    with pytest.raises(ValueError, match="left_padding"):
        batch.prepare(left_padding=[3])
    with pytest.raises(ValueError, match="lengths"):
        batch.prepare(lengths=[1, 2])
