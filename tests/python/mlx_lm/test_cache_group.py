"""The caches of one request move together: exhaustion, steps cut short, release, replacement."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
import pytest
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
from kvpool.mlx_lm.caches import rewind_step
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from tiny_models import VOCABULARY, tiny_gemma3, tiny_gpt2, tiny_gpt_oss, tiny_llama

PROMPT = [(5 * i + 2) % VOCABULARY for i in range(9)]


def make_pool(n_blocks: int = 512, block_size: int = 4, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def build(pool, n_layers: int = 3, step: int | None = 4, owner: int = 1):
    return build_pooled_caches(SimpleNamespace(layers=[None] * n_layers), pool, owner, step)


def feed(caches, n: int, layers: int | None = None) -> None:
    for cache in caches[:layers]:
        data = mx.zeros((1, 1, n, 4)) + cache.offset
        cache.update_and_fetch(data, data)


def offsets(caches) -> list[int]:
    return [cache.offset for cache in caches]


def check(caches) -> None:
    for cache in caches:
        cache.check_invariants()
    caches[0].pool.check_invariants()


def greedy(model, caches, prompt, n):
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=caches)
    return [int(token) for token, _ in steps]


# --- running out ----------------------------------------------------------------------------------


def test_fault_F29_running_out_moves_no_layer_and_says_what_fits():
    pool = make_pool(n_blocks=2 * 3 * 3)
    caches = build(pool, step=None)
    feed(caches, 10)
    before = pool.stats.snapshot()
    with pytest.raises(BlockPoolExhaustedError, match="2 tokens fit") as caught:
        feed(caches, 3)
    assert caught.value.tokens_that_fit == 2
    assert (caught.value.owner, caught.value.available) == (1, 0)
    assert offsets(caches) == [10, 10, 10]
    assert pool.stats.blocks_in_use() == before.blocks_in_use()
    assert pool.stats.n_exhausted == before.n_exhausted + 1
    assert pool.n_available("k") == pool.n_free("k")
    feed(caches, 2)
    assert offsets(caches) == [12, 12, 12]
    check(caches)


@pytest.mark.parametrize(
    ("make_model", "n_pairs", "held", "take_back"),
    [
        (tiny_llama, 39, 20, lambda caches: trim_prompt_cache(caches, 1)),
        (tiny_llama, 39, 20, rewind_step),
        (tiny_gemma3, 24, 8, rewind_step),  # past its window of 16 tokens: nothing can be trimmed
    ],
)
def test_fault_F29_decoding_goes_on_after_something_was_released(
    make_model, n_pairs, held, take_back
):
    """The recipe: release something, take the last token back, feed the last delivered one."""
    model = make_model()
    expected = greedy(model, make_prompt_cache(model), PROMPT, 40)
    pool = make_pool(n_blocks=2 * n_pairs)
    other = PoolBackedKVCache(pool, owner=2, step=4)
    feed([other], 4 * held)
    caches = build_pooled_caches(model, pool, owner=1)
    tokens = []
    with pytest.raises(BlockPoolExhaustedError):
        for token, _ in generate_step(mx.array(PROMPT), model, prompt_cache=caches):
            tokens.append(int(token))
    assert 10 < len(tokens) < 35
    assert len(set(offsets(caches))) == 1
    other.release()
    assert take_back(caches) == 1
    tokens += greedy(model, caches, tokens[-1:], 40 - len(tokens))
    assert tokens == expected
    check(caches)


@pytest.mark.parametrize("chunk", [1, 256, 500])
def test_fault_F29_every_block_of_the_documented_pool_can_be_used(chunk):
    pool = make_pool(n_blocks=4096, block_size=16)
    caches = build(pool, n_layers=28, step=None)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        while True:
            feed(caches, chunk)
    if caught.value.tokens_that_fit > 0:
        feed(caches, caught.value.tokens_that_fit)
    assert offsets(caches) == 28 * [4096 // 2 // 28 * 16]
    assert pool.stats.n_exhausted == 1
    check(caches)


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3, tiny_gpt_oss])
def test_a_pool_sized_for_a_model_holds_the_tokens_it_was_sized_for(make_model):
    model = make_model()
    config = PoolConfig.for_model(model, max_tokens=300, prefill_step=64, block_size=4)
    caches = build_pooled_caches(model, BlockPoolAllocator(config), 1)
    for n in (64, 64, 64, 3, 1, 1, 64):
        feed(caches, n)
    while caches[0].offset < 300:
        feed(caches, 1)
    check(caches)


def test_spare_rows_are_given_back_before_a_step_fails():
    pool = make_pool(n_blocks=2 * 80)
    caches = build_pooled_caches(tiny_gemma3(window=32), pool, 1)
    full = PoolBackedKVCache(pool, 2)
    feed([full], 5)  # 64 blocks a stream, of which it needs two
    with pytest.raises(BlockPoolExhaustedError):
        feed(caches, 60)
    assert full.n_blocks_held() == 2 * 64, "another request's spare rows are not ours to take"
    full.release()
    feed(caches, 5)
    feed(caches, 1)
    assert caches[2].n_blocks_held() > 2 * 2
    feed(caches, 30)
    for _ in range(200):
        feed(caches, 1)
    assert offsets(caches) == [236, 236, 236]
    assert pool.stats.blocks_in_use() <= 2 * 80
    with pytest.raises(BlockPoolExhaustedError) as caught:
        feed(caches, 200)
    feed(caches, caught.value.tokens_that_fit)
    check(caches)


def test_a_request_that_does_not_fit_leaves_the_pool_to_others():
    pool = make_pool(n_blocks=2 * 3 * 8)
    small, large = build(pool, owner=1), build(pool, owner=2)
    feed(small, 5)
    with pytest.raises(BlockPoolExhaustedError):
        feed(large, 100)
    feed(small, 5)
    feed(large, 4)
    check(small + large)


def test_requests_of_one_owner_that_take_each_others_reservation_still_move_whole_or_not_at_all():
    pool = make_pool(n_blocks=2 * 3)
    first, second = build(pool, n_layers=2), build(pool, n_layers=2)
    data = mx.zeros((1, 1, 4, 4))
    first[0].update_and_fetch(data, data)
    second[0].update_and_fetch(data, data)
    first[1].update_and_fetch(data, data)
    with pytest.raises(BlockPoolExhaustedError):
        second[1].update_and_fetch(data, data)
    assert offsets(first + second) == [4, 4, 0, 0]
    assert pool.stats.blocks_in_use() == 4
    check(first)
    check(second)


def test_a_reservation_made_for_the_owner_is_drawn_on():
    pool = make_pool(n_blocks=2 * 3 * 8)
    pool.reserve(1, 4 * 8, layers=3)
    with pytest.raises(BlockPoolExhaustedError):
        feed(build(pool, owner=2), 1)
    caches = build(pool, owner=1)
    feed(caches, 20)
    assert pool.n_reserved("k", 1) == 3 * 3
    check(caches)


# --- steps cut short ------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_layer", [1, 2])
@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])
def test_ctrl_c_between_layers_is_taken_back_by_the_next_step(
    make_model, failing_layer, monkeypatch
):
    model = make_model()
    pool = make_pool(n_blocks=4096)
    caches = build_pooled_caches(model, pool, 1)
    stock = make_prompt_cache(model)
    # Past the window, with a chunk and with single tokens, and growing (256 rows) in between.
    for tokens in ([1, 2, 3] * 6, [4], [5], [6, 7, 8], [9] * 240, [10], [11]):
        layer = model.layers[failing_layer].self_attn
        monkeypatch.setattr(type(layer), "__call__", interrupted(layer))
        with pytest.raises(KeyboardInterrupt):
            model(mx.array([[90, *tokens]]), cache=caches)
        monkeypatch.undo()
        ours = model(mx.array([tokens]), cache=caches)
        theirs = model(mx.array([tokens]), cache=stock)
        # A ring that was taken back may lie in another order, and sums round by the order.
        assert mx.allclose(ours, theirs, atol=1e-4)
        assert offsets(caches) == offsets(stock)
        check(caches)
        assert pool.stats.blocks_in_use() == sum(cache.n_blocks_held() for cache in caches)


def interrupted(layer):
    """An attention that is interrupted when its layer's turn comes."""
    original = type(layer).__call__

    def call(self, *args, **kwargs):
        if self is layer:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    return call


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])
def test_ctrl_c_inside_an_update_is_taken_back(make_model, monkeypatch):
    """Between charging the pool and writing the buffers, in the last layer."""
    model = make_model()
    pool = make_pool(n_blocks=4096)
    caches, stock = build_pooled_caches(model, pool, 1), make_prompt_cache(model)
    last = caches[-1]
    for tokens in ([1, 2, 3], [4], [5] * 30, [6]):

        class Interrupted:
            def __init__(self, lease):
                self.lease = lease

            def __getattr__(self, name):
                return getattr(self.lease, name)

            def append(self, *args):
                self.lease.append(*args)
                raise KeyboardInterrupt

        lease = last._lease
        last._lease = Interrupted(lease)
        with pytest.raises(KeyboardInterrupt):
            model(mx.array([[91, *tokens]]), cache=caches)
        last._lease = lease
        ours = model(mx.array([tokens]), cache=caches)
        assert mx.allclose(ours, model(mx.array([tokens]), cache=stock), atol=1e-4)
        check(caches)


def test_a_model_that_reads_an_offset_before_its_mask_starts_where_the_last_step_did(monkeypatch):
    model = tiny_gpt2()
    caches, stock = (
        build_pooled_caches(model, make_pool(n_blocks=1024), 1),
        make_prompt_cache(model),
    )
    for tokens in ([1, 2, 3], [4], [5, 6]):
        layer = model.model.h[1].attn
        monkeypatch.setattr(type(layer), "__call__", interrupted(layer))
        with pytest.raises(KeyboardInterrupt):
            model(mx.array([tokens]), cache=caches)
        monkeypatch.undo()
        assert caches[0].offset > stock[0].offset  # looking at it takes nothing back
        ours, theirs = (model(mx.array([tokens]), cache=cache) for cache in (caches, stock))
        assert mx.array_equal(ours, theirs)


def test_trim_and_a_copy_take_a_torn_step_back():
    caches = build(make_pool())
    feed(caches, 10)
    feed(caches, 5, layers=2)
    twins = copy.deepcopy(caches)
    assert trim_prompt_cache(caches, 1) == 1
    assert offsets(caches) == [9, 9, 9]
    feed(twins, 1)
    assert offsets(twins) == [11, 11, 11]
    check(caches)
    check(twins)


def test_a_layer_that_a_caller_leaves_out_does_not_hold_the_others_back():
    caches = build(make_pool())
    for _ in range(3):
        feed(caches[1:], 2)
    assert offsets(caches) == [0, 6, 6]
    check(caches)


def test_rewinding_takes_back_one_step_and_no_more():
    caches = build(make_pool())
    assert rewind_step(caches) == 0
    feed(caches, 10)
    feed(caches, 3)
    assert rewind_step(caches) == 3
    assert rewind_step(caches) == 0
    assert offsets(caches) == [10, 10, 10]
    feed(caches, 1)
    trim_prompt_cache(caches, 1)
    assert rewind_step(caches) == 0
    with pytest.raises(ValueError, match="KVCache"):
        rewind_step([*caches, KVCache()])


# --- members --------------------------------------------------------------------------------------


def test_release_of_any_member_releases_all():
    pool = make_pool()
    caches, others = build(pool), build(pool, owner=1)
    feed(caches, 10)
    feed(others, 10)
    caches[2].release()
    assert [cache.empty() for cache in caches] == [True, True, True]
    assert pool.stats.blocks_in_use() == sum(cache.n_blocks_held() for cache in others)
    feed(others, 1)
    feed(caches, 2)
    check(caches + others)


def test_dropping_or_replacing_one_member_gives_its_blocks_back_and_no_others():
    pool = make_pool()
    caches = build(pool)
    feed(caches, 10)
    held = caches[0].n_blocks_held()
    caches[1] = KVCache()
    assert pool.stats.blocks_in_use() == 2 * held
    for _ in range(3):
        feed(caches, 1)
    assert offsets(caches) == [13, 3, 13]
    del caches[0]
    assert pool.stats.blocks_in_use() == caches[-1].n_blocks_held()


def test_field_F23_layers_are_trimmed_alike():
    caches = build(make_pool())
    feed(caches, 10)
    keys = mx.zeros((1, 1, 7, 4))
    caches[2].state = (keys, keys)
    assert [cache.trim(9) for cache in caches] == [7, 7, 7]
    assert offsets(caches) == [3, 3, 0]
    check(caches)


def test_a_group_with_a_window_that_has_wrapped_is_not_trimmed():
    model = tiny_gemma3()
    caches = build_pooled_caches(model, make_pool(), 1)
    greedy(model, caches, PROMPT, 20)
    before = offsets(caches)
    assert trim_prompt_cache(caches, 3) == 0
    assert [cache.trim(3) for cache in caches] == [0, 0, 0]
    assert offsets(caches) == before


def test_field_F18_each_layer_sees_its_own_window():
    caches = build_pooled_caches(tiny_gemma3(window=4), make_pool(), 1)
    feed(caches, 10)
    for _ in range(3):
        feed(caches, 1)
    assert [cache.keys_and_values()[0].shape[2] for cache in caches] == [4, 4, 13]
    check(caches)


# --- building -------------------------------------------------------------------------------------


def test_fault_F38_other_kinds_of_caches_stay():
    class Hybrid:
        def make_cache(self):
            return [
                KVCache(),
                RotatingKVCache(max_size=8, keep=2),
                ArraysCache(2),
                CacheList(KVCache(), KVCache()),
                ChunkedKVCache(16),
            ]

    pool = make_pool()
    caches = build_pooled_caches(Hybrid(), pool, owner=1)
    assert [type(cache).__name__ for cache in caches] == [
        "PoolBackedKVCache",
        "PoolBackedRotatingKVCache",
        "ArraysCache",
        "CacheList",
        "ChunkedKVCache",
    ]
    assert (caches[1].max_size, caches[1].keep) == (8, 2)


def test_a_model_whose_make_cache_builds_pooled_ones_can_be_built_from():
    model = tiny_llama()
    pool = make_pool()
    model.make_cache = lambda: build_pooled_caches(model, pool, pool.new_owner())
    try:
        caches = make_prompt_cache(model)
        assert [type(cache) for cache in caches] == 3 * [PoolBackedKVCache]
    finally:
        del model.make_cache


def test_layers_may_lie_one_level_down():
    model = SimpleNamespace(model=SimpleNamespace(layers=[None] * 2))
    assert len(build_pooled_caches(model, make_pool(), 1)) == 2


@pytest.mark.parametrize(
    ("pool", "owner", "step", "error"),
    [(None, 1, None, TypeError), ("p", None, None, TypeError), ("p", 1, 0, ValueError)],
)
def test_arguments_are_checked(pool, owner, step, error):
    pool = make_pool() if pool else None
    with pytest.raises(error, match=r"\[build_pooled_caches\]"):
        build_pooled_caches(tiny_llama(), pool, owner, step)
