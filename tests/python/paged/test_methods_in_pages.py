"""Quantisation methods in the pages of real models' caches."""

from __future__ import annotations

import itertools

import kvpool
import mlx.core as mx
import pytest
from cache_kinds import needs_method_kernels
from kvpool import BlockPoolAllocator, PoolConfig, build_paged_caches
from kvpool.cache import METHODS
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import VOCABULARY, all_models, tiny_llama

pytestmark = needs_method_kernels
PROMPT = [(7 * i * i + 3 * i) % VOCABULARY for i in range(250)]

# Distance of the logits to stock's, over stock's norm, at 8 bits; measured and doubled. qjl does
# not read the width.
ERROR_BUDGETS = {
    "turboquant_mse": 0.10,
    "turboquant_prod": 0.14,
    "polar": 0.12,
    "spectral": 0.10,
    "kivi": 0.03,
}


def make_pool(block_size: int = 32) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=1024))


def logits(model, cache, chunk: int = 80) -> mx.array:
    """Of every position; the prompt goes in pieces, and its last tokens one by one."""
    cuts = [*range(0, 240, chunk), *range(240, len(PROMPT)), len(PROMPT)]
    pieces = [
        model(mx.array([PROMPT[first:last]]), cache=cache)
        for first, last in itertools.pairwise(cuts)
    ]
    found = mx.concatenate(pieces, axis=1)
    mx.eval(found)
    return found


def error(found: mx.array, expected: mx.array) -> float:
    return float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))


@pytest.mark.parametrize("method", ERROR_BUDGETS)
def test_a_model_stays_close_to_stock(method):
    model, pool = tiny_llama(), make_pool()
    caches = build_paged_caches(model, pool, 1, method=method, bits=8)
    before = kvpool.attention_stats()
    with kvpool.attention():
        found = logits(model, caches)
    answered = kvpool.attention_stats().since(before)
    assert answered.kernel == answered.total > 0
    formats = {block.format for block in pool.blocks_for(1)}
    assert formats == {"fp32", f"{method}-8"}
    assert error(found, logits(model, make_prompt_cache(model))) < ERROR_BUDGETS[method]
    for cache in caches:
        cache.check_invariants()
    caches[0].release()
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_hook_reads_codes_as_gathering_decodes_them(method):
    model = tiny_llama()
    plain = logits(model, build_paged_caches(model, make_pool(), 1, method=method, bits=2))
    with kvpool.attention():
        hooked = logits(model, build_paged_caches(model, make_pool(), 1, method=method, bits=2))
    # Rounding now and then turns a number into its neighbouring code.
    assert error(hooked, plain) < 2e-3


@pytest.mark.parametrize("name", all_models())
def test_every_kind_of_model_takes_a_method(name):
    model, pool = all_models()[name](), make_pool(8)
    caches = build_paged_caches(model, pool, 1, method="turboquant_mse", bits=4)
    with kvpool.attention():
        steps = generate_step(mx.array(PROMPT), model, max_tokens=12, prompt_cache=caches)
        assert len([token for token, _ in steps]) == 12
    for cache in caches:
        if hasattr(cache, "check_invariants"):
            cache.check_invariants()


def test_codes_take_fewer_bytes():
    model = tiny_llama()
    sizes = {}
    for method, bits in ((None, None), ("turboquant_mse", 2), ("kivi", 2), ("spectral", 2)):
        caches = build_paged_caches(model, make_pool(), 1, method=method, bits=bits)
        logits(model, caches)
        sizes[method] = caches[0].nbytes
    # Of 250 tokens of 2 heads of 64 fp32 numbers, 224 are in full blocks; kivi keeps 128 exact.
    assert sizes["turboquant_mse"] < 0.25 * sizes[None]
    assert sizes["spectral"] < 0.25 * sizes[None]
    assert sizes["kivi"] < 0.70 * sizes[None]


def test_copies_and_trims_go_on_from_the_codes():
    model, pool = tiny_llama(), make_pool(8)
    caches = build_paged_caches(model, pool, 1, method="turboquant_mse", bits=3)
    with kvpool.attention():
        model(mx.array([PROMPT[:100]]), cache=caches)
        for cache in caches:
            assert cache.trim(43) == 43
        once = model(mx.array([PROMPT[57:70]]), cache=caches)
        for cache in caches:
            assert cache.trim(13) == 13
        again = model(mx.array([PROMPT[57:70]]), cache=caches)
        mx.eval(once, again)
    assert error(again, once) < 1e-5


@pytest.mark.parametrize("method", ERROR_BUDGETS)
def test_bfloat16_tokens_past_the_range_of_half_floats(method):
    cache = PagedKVCache(make_pool(), method=method, bits=8)
    mx.random.seed(3)
    keys, values = (1e6 * mx.random.normal((1, 2, 200, 64)) for _ in range(2))
    found = cache.update_and_fetch(keys.astype(mx.bfloat16), values.astype(mx.bfloat16))
    for given, kept in zip((keys, values), found, strict=True):
        assert error(kept.astype(mx.float32), given) < 0.05


def test_kivi_needs_blocks_of_whole_groups():
    message = "block_size must be a multiple of the 32 tokens that kivi-2 encodes together, got 16"
    with pytest.raises(ValueError, match=message):
        build_paged_caches(tiny_llama(), make_pool(16), 1, method="kivi", bits=2)
