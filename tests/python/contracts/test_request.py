"""What the caches of a request keep together: exhaustion, steps cut short, release, replacement."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
import pytest
from cache_kinds import REQUESTS, append, decode, in_use, make_pool, offsets, prompt, rows
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
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
from tiny_models import tiny_gemma3, tiny_gpt2, tiny_gpt_oss, tiny_llama

pytestmark = pytest.mark.parametrize("kind", REQUESTS, ids=str)
PROMPT = prompt(9)


def small_pool(n_blocks: int = 512, **options) -> BlockPoolAllocator:
    return make_pool(n_blocks, 4, **options)


def feed(caches, n: int, layers: int | None = None) -> None:
    for cache in caches[:layers]:
        append(cache, n)


def check(caches) -> None:
    for cache in caches:
        cache.check_invariants()
    caches[0].pool.check_invariants()


# --- running out ----------------------------------------------------------------------------------


def test_fault_F29_running_out_moves_no_layer_and_says_what_fits(kind):
    pool = small_pool(n_blocks=2 * 3 * 3)
    caches = kind.by_default().layers(pool)
    feed(caches, 10)
    before = pool.stats.snapshot()
    with pytest.raises(BlockPoolExhaustedError, match="2 tokens fit") as caught:
        feed(caches, 3)
    assert caught.value.tokens_that_fit == 2
    assert (caught.value.owner, caught.value.available) == (1, 0)
    assert offsets(caches) == [10, 10, 10]
    assert in_use(pool) == before.blocks_in_use()
    assert pool.stats.n_exhausted == before.n_exhausted + 1
    assert pool.n_available("k") == pool.n_free("k")
    feed(caches, 2)
    assert offsets(caches) == [12, 12, 12]
    check(caches)


def test_fault_F29_decoding_goes_on_after_something_was_released(kind):
    """The recipe: release something, take the last token back, feed the last delivered one."""
    model = tiny_llama()
    expected = decode(model, make_prompt_cache(model), PROMPT, 40)
    pool = small_pool(n_blocks=2 * 39)
    other = kind.layers(pool, n_layers=1, owner=2)
    feed(other, 4 * 20)
    caches = kind.by_default().build(model, pool)
    tokens = []
    with kind.attention():
        with pytest.raises(BlockPoolExhaustedError, match=r"\d+ tokens? fit"):
            for token, _ in generate_step(mx.array(PROMPT), model, prompt_cache=caches):
                tokens.append(int(token))
        assert 10 < len(tokens) < 35
        assert len(set(offsets(caches))) == 1
        other[0].release()
        assert trim_prompt_cache(caches, 1) == 1
        tokens += decode(model, caches, tokens[-1:], 40 - len(tokens))
    assert tokens == expected
    check(caches)


@pytest.mark.parametrize("chunk", [1, 256, 500])
def test_fault_F29_every_block_of_the_documented_pool_can_be_used(kind, chunk):
    pool = make_pool(n_blocks=4096, block_size=16)
    caches = kind.by_default().layers(pool, n_layers=28)
    if chunk == 1:
        feed(caches, 900)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        while True:
            feed(caches, chunk)
    if caught.value.tokens_that_fit > 0:
        feed(caches, caught.value.tokens_that_fit)
    assert offsets(caches) == 28 * [4096 // 2 // 28 * 16]
    assert pool.stats.n_exhausted == 1
    check(caches)


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3, tiny_gpt_oss])
def test_a_pool_sized_for_a_model_holds_the_tokens_it_was_sized_for(kind, make_model):
    model = make_model()
    config = PoolConfig.for_model(
        model, max_tokens=300, prefill_step=64, block_size=4, paged=kind.paged
    )
    own = SimpleNamespace(make_cache=lambda: make_prompt_cache(model))
    for chunks in ((64, 64, 64, 3, 1, 1, 64), (64, 64, 64, 64, 44)):
        caches = kind.by_default().build(own, pool := BlockPoolAllocator(config))
        for n in chunks:
            feed(caches, n)
        while caches[0].offset < 300:
            feed(caches, 1)
        check(caches)
        assert pool.stats.n_exhausted == 0 or not kind.paged


def test_a_request_that_does_not_fit_leaves_the_pool_to_others(kind):
    pool = small_pool(n_blocks=2 * 3 * 8)
    small, large = kind.layers(pool, owner=1), kind.layers(pool, owner=2)
    feed(small, 5)
    with pytest.raises(BlockPoolExhaustedError):
        feed(large, 100)
    feed(small, 5)
    feed(large, 4)
    check(small + large)


def test_requests_of_one_owner_that_take_each_others_reservation_move_whole_or_not_at_all(kind):
    pool = small_pool(n_blocks=2 * 3)
    first, second = kind.layers(pool, n_layers=2), kind.layers(pool, n_layers=2)
    data = rows(4)
    first[0].update_and_fetch(data, data)
    second[0].update_and_fetch(data, data)
    first[1].update_and_fetch(data, data)
    with pytest.raises(BlockPoolExhaustedError):
        second[1].update_and_fetch(data, data)
    assert offsets(first + second) == [4, 4, 0, 0]
    assert in_use(pool) == 4
    check(first)
    check(second)


def test_a_reservation_made_for_the_owner_is_drawn_on(kind):
    pool = small_pool(n_blocks=2 * 3 * 8)
    pool.reserve(1, 4 * 8, layers=3)
    with pytest.raises(BlockPoolExhaustedError):
        feed(kind.layers(pool, owner=2), 1)
    caches = kind.layers(pool, owner=1)
    feed(caches, 20)
    assert pool.n_reserved("k", 1) == 3 * 3
    check(caches)


# --- steps cut short ------------------------------------------------------------------------------


def interrupted(layer):
    """An attention that is interrupted when its layer's turn comes."""
    original = type(layer).__call__

    def call(self, *args, **kwargs):
        if self is layer:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    return call


@pytest.mark.parametrize("failing_layer", [1, 2])
@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])
def test_ctrl_c_between_layers_is_taken_back_by_the_next_step(
    kind, make_model, failing_layer, monkeypatch
):
    model, pool = make_model(), small_pool(n_blocks=4096)
    caches, stock = kind.build(model, pool), make_prompt_cache(model)
    # Past the window, with a chunk and with single tokens, and growing (256 rows) in between.
    for tokens in ([1, 2, 3] * 6, [4], [5], [6, 7, 8], [9] * 240, [10], [11]):
        layer = model.layers[failing_layer].self_attn
        monkeypatch.setattr(type(layer), "__call__", interrupted(layer))
        with kind.attention(), pytest.raises(KeyboardInterrupt):
            model(mx.array([[90, *tokens]]), cache=caches)
        monkeypatch.undo()
        with kind.attention():
            ours = model(mx.array([tokens]), cache=caches)
        theirs = model(mx.array([tokens]), cache=stock)
        # A ring that was taken back may lie in another order, and sums round by the order.
        assert mx.allclose(ours, theirs, atol=1e-4)
        assert offsets(caches) == offsets(stock)
        check(caches)
        del ours
        assert in_use(pool) == sum(cache.n_blocks_held() for cache in caches)


def test_a_model_that_reads_an_offset_before_its_mask_starts_where_the_last_step_did(
    kind, monkeypatch
):
    model = tiny_gpt2()
    caches, stock = kind.build(model, small_pool(n_blocks=1024)), make_prompt_cache(model)
    for tokens in ([1, 2, 3], [4], [5, 6]):
        layer = model.model.h[1].attn
        monkeypatch.setattr(type(layer), "__call__", interrupted(layer))
        with pytest.raises(KeyboardInterrupt):
            model(mx.array([tokens]), cache=caches)
        monkeypatch.undo()
        assert caches[0].offset > stock[0].offset  # looking at it takes nothing back
        ours, theirs = (model(mx.array([tokens]), cache=cache) for cache in (caches, stock))
        assert mx.allclose(ours, theirs, atol=1e-5)


def test_trim_and_a_copy_take_a_torn_step_back(kind):
    caches = kind.layers(small_pool())
    feed(caches, 10)
    held = in_use(caches[0].pool)
    feed(caches, 5, layers=2)
    twins = copy.deepcopy(caches)
    assert trim_prompt_cache(caches, 1) == 1
    assert offsets(caches) == [9, 9, 9]
    feed(twins, 1)
    assert offsets(twins) == [11, 11, 11]
    check(caches)
    check(twins)
    del twins
    assert in_use(caches[0].pool) == held


def test_a_layer_that_a_caller_leaves_out_does_not_hold_the_others_back(kind):
    caches = kind.layers(small_pool())
    for _ in range(3):
        feed(caches[1:], 2)
    assert offsets(caches) == [0, 6, 6]
    check(caches)


# --- members --------------------------------------------------------------------------------------


def test_release_of_any_member_releases_all(kind):
    pool = small_pool()
    caches, others = kind.layers(pool), kind.layers(pool, owner=1)
    feed(caches, 10)
    feed(others, 10)
    caches[2].release()
    assert [cache.empty() for cache in caches] == [True, True, True]
    assert in_use(pool) == sum(cache.n_blocks_held() for cache in others)
    feed(others, 1)
    feed(caches, 2)
    check(caches + others)


def test_dropping_or_replacing_one_member_gives_its_blocks_back_and_no_others(kind):
    pool = small_pool()
    caches = kind.layers(pool)
    feed(caches, 10)
    held = caches[0].n_blocks_held()
    caches[1] = KVCache()
    assert in_use(pool) == 2 * held
    for _ in range(3):
        feed(caches, 1)
    assert offsets(caches) == [13, 3, 13]
    del caches[0]
    assert in_use(pool) == caches[-1].n_blocks_held()


def test_a_deep_copy_of_the_list_is_one_new_group_with_one_new_owner(kind):
    pool = small_pool()
    caches = kind.layers(pool)
    feed(caches, 10)
    before = in_use(pool)
    twins = copy.deepcopy(caches)
    assert in_use(pool) == (before if kind.paged else 2 * before)
    assert {twin.owner for twin in twins} != {1} and len({twin.owner for twin in twins}) == 1
    twins[2].release()
    assert [twin.empty() for twin in twins] == [True, True, True]
    assert offsets(caches) == [10, 10, 10]
    assert in_use(pool) == len(pool.blocks_for(1)) == before


def test_field_F23_layers_are_trimmed_alike(kind):
    caches = kind.layers(small_pool())
    feed(caches, 10)
    keys = mx.zeros((1, 2, 7, 4))
    caches[2].state = (keys, keys)
    assert [cache.trim(9) for cache in caches] == [7, 7, 7]
    assert offsets(caches) == [3, 3, 0]
    check(caches)


def test_a_group_with_a_window_that_has_wrapped_is_not_trimmed(kind):
    model = tiny_gemma3()
    caches = kind.build(model, small_pool())
    decode(model, caches, PROMPT, 20)
    before = offsets(caches)
    assert trim_prompt_cache(caches, 3) == 0
    assert [cache.trim(3) for cache in caches] == [0, 0, 0]
    assert offsets(caches) == before


def test_field_F18_each_layer_sees_its_own_window(kind):
    model = SimpleNamespace(make_cache=lambda: [RotatingKVCache(4), RotatingKVCache(4), KVCache()])
    caches = kind.build(model, small_pool())
    feed(caches, 10)
    for _ in range(3):
        feed(caches, 1)
    assert [cache.keys_and_values()[0].shape[2] for cache in caches] == [4, 4, 13]
    check(caches)


# --- building -------------------------------------------------------------------------------------


def test_fault_F38_other_kinds_of_caches_stay(kind):
    others = [ArraysCache(2), CacheList(KVCache(), KVCache()), ChunkedKVCache(16)]
    own = [KVCache(), RotatingKVCache(max_size=8), RotatingKVCache(max_size=8, keep=2), *others]
    caches = kind.build(SimpleNamespace(make_cache=lambda: own), small_pool())
    assert type(caches[0]) is kind.cls
    assert caches[3:] == others
    if kind.paged:
        assert type(caches[1]) is kind.cls and caches[1].window == 8
        assert caches[2] is own[2]
    else:
        assert {type(cache).__name__ for cache in caches[1:3]} == {"PoolBackedRotatingKVCache"}
        assert [(cache.max_size, cache.keep) for cache in caches[1:3]] == [(8, 0), (8, 2)]


def test_a_model_whose_make_cache_builds_them_can_be_built_from(kind):
    model, pool = tiny_llama(), small_pool()
    model.make_cache = lambda: kind.build(model, pool, pool.new_owner())
    try:
        caches = make_prompt_cache(model)
        assert [type(cache) for cache in caches] == 3 * [kind.cls]
    finally:
        del model.make_cache


def test_layers_may_lie_one_level_down(kind):
    model = SimpleNamespace(model=SimpleNamespace(layers=[None] * 2))
    assert len(kind.build(model, small_pool())) == 2


def test_a_pool_and_an_owner_are_checked(kind):
    call = rf"\[build_{'paged' if kind.paged else 'pooled'}_caches\]"
    for pool in (None, "pool"):
        with pytest.raises(TypeError, match=f"{call} pool must be .*{pool!r}"):
            kind.build(tiny_llama(), pool)
    with pytest.raises(TypeError, match=f"{call} owner must be an int, got None"):
        kind.build(tiny_llama(), small_pool(), None)
