"""Groups of pooled caches: their spare rows, steps taken back, and copies that do not fit."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest
from cache_kinds import REQUESTS, append, decode, make_pool, offsets, prompt
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
from kvpool.mlx_lm.caches import rewind_step
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from tiny_models import tiny_gemma3, tiny_llama

POOLED = REQUESTS[0]
PROMPT = prompt(9, first=2)


def feed(caches, n: int) -> None:
    for cache in caches:
        append(cache, n)


def check(caches) -> None:
    for cache in caches:
        cache.check_invariants()
    caches[0].pool.check_invariants()


# --- running out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_model", "n_pairs", "held"),
    # The second is past its window of 16 tokens: nothing can be trimmed.
    [(tiny_llama, 39, 20), (tiny_gemma3, 24, 8)],
)
def test_fault_F29_decoding_goes_on_after_a_step_was_rewound(make_model, n_pairs, held):
    model = make_model()
    expected = decode(model, make_prompt_cache(model), PROMPT, 40)
    pool = make_pool(2 * n_pairs, 4)
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
    assert rewind_step(caches) == 1
    tokens += decode(model, caches, tokens[-1:], 40 - len(tokens))
    assert tokens == expected
    check(caches)


def test_spare_rows_are_given_back_before_a_step_fails():
    pool = make_pool(2 * 80, 4)
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


# --- steps cut short ------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])
def test_ctrl_c_inside_an_update_is_taken_back(make_model, monkeypatch):
    """Between charging the pool and writing the buffers, in the last layer."""
    model = make_model()
    pool = make_pool(4096, 4)
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


def test_rewinding_takes_back_one_step_and_no_more():
    caches = POOLED.layers(make_pool(block_size=4))
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


def test_a_copy_that_does_not_fit_charges_nothing():
    model, pool = tiny_llama(), make_pool(3 * 2 * 64 + 200, 4)
    caches = build_pooled_caches(model, pool, owner=1)
    decode(model, caches, PROMPT, 1)
    before = pool.stats.blocks_in_use()
    try:
        copy.deepcopy(caches)
    except BlockPoolExhaustedError:
        pass
    else:
        raise AssertionError("256 rows in three layers do not fit twice")
    gc.collect()
    assert pool.stats.blocks_in_use() == before


@pytest.mark.parametrize(("step", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_step_is_a_number_of_rows(step, error):
    with pytest.raises(error, match=rf"\[build_pooled_caches\] step must be .*{step}"):
        build_pooled_caches(tiny_llama(), make_pool(), 1, step)
