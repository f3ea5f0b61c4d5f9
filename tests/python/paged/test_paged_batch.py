"""PagedBatchKVCache: requests come and go, and nothing is copied."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from cache_kinds import in_use, make_pool, rows
from kvpool import _mlx, build_paged_caches
from kvpool.mlx_lm.paged import PagedBatchKVCache, PagedKVCache


def small_pool():
    return make_pool(512, 4)


def filled(pool, n: int, owner: int, **options) -> PagedKVCache:
    cache = PagedKVCache(pool, owner, **options)
    cache.update_and_fetch(rows(n), rows(n))
    return cache


def step(batch, n: int):
    data = mx.concatenate([rows(n, start=1000 + 100 * i) for i in range(len(batch.row_owners))])
    return batch.update_and_fetch(data, data)


def test_merging_takes_no_blocks():
    pool = small_pool()
    caches = [filled(pool, n, owner) for n, owner in ((10, 1), (3, 2), (6, 3))]
    held = in_use(pool)
    batch = PagedKVCache.merge(caches)
    assert type(batch) is PagedBatchKVCache
    assert in_use(pool) == held == batch.n_blocks_held()
    keys, _ = step(batch, 1)
    for i, n in enumerate((10, 3, 6)):
        padded = [0] * (10 - n) + list(range(n)) + [1000 + 100 * i]
        assert keys[i, 0, :, 0].tolist() == padded


def test_a_batch_that_is_joined_to_another_is_empty():
    pool = small_pool()
    batch, other = (PagedKVCache.merge([filled(pool, 2, owner)]) for owner in (1, 9))
    batch.extend(other)
    assert batch.row_owners == (1, 9) and other.row_owners == ()


def test_a_trim_ends_with_the_shortest():
    pool = small_pool()
    batch = PagedKVCache.merge([filled(pool, 7, 1), filled(pool, 3, 2)])
    assert batch.trim(2) == 2
    assert batch.trim(9) == 1
    assert batch.offset.tolist() == [4, 0]


def test_padding_on_the_right_takes_no_blocks():
    pool = small_pool()
    batch = PagedKVCache.merge([PagedKVCache(pool, owner) for owner in (1, 2, 3)])
    batch.prepare(lengths=[7, 2, 4], right_padding=[0, 5, 3])
    keys, _ = step(batch, 7)
    assert batch.n_blocks_held() == 2 * (2 + 1 + 1)
    for i, n in enumerate((7, 2, 4)):
        assert keys[i, 0, 7 - n :, 0].tolist() == [1000 + 100 * i + j for j in range(n)]
    with pytest.raises(ValueError, match=r"\[PagedBatchKVCache::prepare\] left_padding must be"):
        batch.prepare(left_padding=[3])


def test_windows_that_differ_are_not_merged():
    pool = small_pool()
    with pytest.raises(ValueError, match=r"\[PagedKVCache::merge\] the caches differ in window"):
        PagedKVCache.merge([filled(pool, 3, 1), filled(pool, 3, 1, window=8)])


def test_of_one_query_the_mask_hides_padding_alone(monkeypatch):
    told = []
    monkeypatch.setattr(_mlx, "padding_mask", lambda mask, n_rows: told.append(n_rows) or mask)
    pool = small_pool()
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


def test_the_layers_of_a_step_show_one_array_of_offsets():
    pool = small_pool()
    model = SimpleNamespace(layers=[None] * 2)
    requests = [build_paged_caches(model, pool, owner) for owner in (1, 2)]
    batches = [PagedKVCache.merge(list(layer)) for layer in zip(*requests, strict=True)]
    for n in range(3):
        before = [batch.offset for batch in batches]
        assert before[0] is before[1] is batches[0].offset
        assert before[0].tolist() == [n, n]
        for batch in batches:
            step(batch, 1)
        assert before[0].tolist() == [n, n]
    for batch in batches:
        batch.trim(1)
    assert [batch.offset.tolist() for batch in batches] == [[2, 2], [2, 2]]
    batches[0].filter([])
    assert batches[0].offset.tolist() == []


def test_even_requests_need_no_mask():
    pool = small_pool()
    batch = PagedKVCache.merge([filled(pool, 5, 1), filled(pool, 5, 2)])
    assert batch.make_mask(1) is None and batch.make_mask(3) == "causal"
    assert batch.make_mask(3, return_array=True).shape == (2, 1, 3, 8)


def test_field_F9_before_anything_is_written_the_mask_counts_what_comes():
    pool = small_pool()
    batch = PagedKVCache.merge([PagedKVCache(pool, owner) for owner in (1, 2)])
    batch.prepare(lengths=[4, 1], right_padding=[0, 3])
    mask = batch.make_mask(4)
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].tolist() == [[c <= q for c in range(4)] for q in range(4)]
    assert mask[1, 0, 0].tolist() == [False, False, False, True]


def test_a_request_without_tokens_is_padding_alone():
    pool = small_pool()
    never, emptied = PagedKVCache(pool, 2), filled(pool, 3, 3)
    emptied.trim(3)
    batch = PagedKVCache.merge([filled(pool, 5, 1), never, emptied])
    keys, _ = batch.keys_and_values()
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3, 4], [0] * 5, [0] * 5]
    batch.prepare(lengths=[2, 0, 1])
    keys, values = step(batch, 2)
    assert keys[:, 1, :, 3].tolist() == [[0, 1, 2, 3, 4, 1000, 1001], [0] * 7, [0] * 6 + [1200]]
    assert mx.array_equal(keys, values)
    with pytest.raises(ValueError, match=r"\[fetch_batch\] layers must be PagedLayers, got None"):
        _mlx.fetch_batch([None])
