"""What every cache of a sliding window keeps: which tokens are there, and that none is trimmed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_kinds import WINDOWS, append, make_pool

pytestmark = pytest.mark.parametrize("kind", WINDOWS, ids=str)


def window_cache(kind, window: int = 8, n_blocks: int = 256):
    name = "max_size" if kind.ring else "window"
    return kind.cls(pool=make_pool(n_blocks, block_size=4), owner=1, **{name: window})


def tokens(keys: mx.array) -> list[int]:
    """Which tokens these keys are of, in the order in which they lie."""
    return [int(row) for row in keys[0, 0, :, 0].tolist()]


def in_order(cache) -> list[int]:
    """The tokens of a cache, oldest first: a ring is turned back."""
    keys = cache._temporal_order(cache.keys) if hasattr(cache, "_temporal_order") else cache.keys
    return tokens(keys)


def test_what_is_behind_the_window_goes_back(kind):
    cache = window_cache(kind)
    for _ in range(50):
        keys, values = append(cache, 1)
        end = cache.offset
        assert in_order(cache) == sorted(tokens(keys)) == list(range(max(0, end - 8), end))
        assert mx.array_equal(keys, values)
    assert cache.n_blocks_held() <= 2 * 3
    assert (cache.offset, cache.size()) == (50, 8)
    cache.check_invariants()


def test_field_E18_positions_behind_the_window_are_gone(kind):
    cache = window_cache(kind)
    for _ in range(9):
        keys, _ = append(cache, 1)
    assert sorted(tokens(keys)) == list(range(1, 9))


def test_field_F3_and_F4_a_window_that_has_closed_over_tokens_is_not_trimmed(kind):
    cache = window_cache(kind)
    for _ in range(20):
        append(cache, 1)
    assert not cache.is_trimmable()
    assert cache.trim(5) == 0
    assert cache.offset == 20 and in_order(cache) == list(range(12, 20))
    young = window_cache(kind)
    append(young, 6)
    assert young.is_trimmable() and young.trim(2) == 2
    assert tokens(append(young, 1)[0]) == list(range(5))
    assert young.n_blocks_held() == 2 * 2
    young.check_invariants()


def test_field_F14_chunks_on_a_window_that_is_full(kind):
    cache = window_cache(kind)
    widths = []
    for n in (8, 3, 3, 3, 1):
        keys, _ = append(cache, n)
        widths.append(keys.shape[2])
        assert sorted(tokens(keys)) == list(range(cache.offset - keys.shape[2], cache.offset))
    assert widths == [8, 10, 10, 10, 8]


@pytest.mark.parametrize("n_prompt", range(1023, 1029))
def test_field_F13_the_mask_is_as_wide_as_the_keys_around_a_window_of_1024(kind, n_prompt):
    cache = window_cache(kind, 1024, n_blocks=1200)
    for n in (n_prompt, 1, 2):
        mask = cache.make_mask(n, return_array=True, window_size=1024)
        keys, _ = append(cache, n)
        if mask is not None:
            assert mask.shape == (n, keys.shape[2])


def test_field_F11_rows_of_a_window_mask_see_as_many_as_the_window(kind):
    cache = window_cache(kind, 128)
    append(cache, 126)
    mask = cache.make_mask(4, return_array=True)
    assert mask.sum(axis=1).tolist() == [127, 128, 128, 128]


def test_a_narrower_window_than_the_cache_masks_single_tokens_too(kind):
    cache = window_cache(kind)
    for _ in range(12):
        append(cache, 1)
    mask = cache.make_mask(1, window_size=5)
    keys, _ = append(cache, 1)
    assert mask.shape == (keys.shape[2],)
    seen = [token for token, shown in zip(tokens(keys), mask.tolist(), strict=True) if shown]
    assert sorted(seen) == list(range(8, 13))


def test_field_F5_a_window_is_read_in_the_order_of_its_tokens(kind):
    cache = window_cache(kind)
    for _ in range(12):
        append(cache, 1)
    assert in_order(cache) == list(range(4, 12))
    assert cache.trim(2) == 0  # the first ten are not what is left


def test_field_F10_the_mask_counts_what_is_left_of_the_front(kind):
    cache = window_cache(kind, 61)
    append(cache, 100)
    mask = cache.make_mask(4, return_array=True)
    keys, _ = append(cache, 4)
    assert keys.shape[2] == 64 and mask.shape == (4, 64)


@pytest.mark.parametrize(
    ("window", "error"), [(0, ValueError), (8.0, TypeError), (True, TypeError), ("8", TypeError)]
)
def test_a_window_is_a_number_of_tokens(kind, window, error):
    with pytest.raises(error, match=rf"\[{kind.cls.__name__}\] \w+ must be .*{window!r}"):
        window_cache(kind, window)


def test_a_full_window_survives_its_state(kind):
    cache = window_cache(kind)
    for _ in range(21):
        append(cache, 1)
    loaded = kind.cls.from_state(cache.state)
    assert (loaded.offset, in_order(loaded)) == (21, in_order(cache))
    loaded.attach(make_pool(block_size=4), 2)
    for n in (1, 3, 1):
        append(loaded, n), append(cache, n)
        assert in_order(loaded) == in_order(cache)
    loaded.check_invariants()
