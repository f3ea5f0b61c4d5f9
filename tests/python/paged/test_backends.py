"""Pages lie where their maker says: a whole model through each backend that is here."""

from __future__ import annotations

from typing import Any

import kvpool
import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PoolConfig, _mlx, build_paged_caches
from kvpool.mlx_lm import pool_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny_llama

BACKENDS = sorted({"cpu", "gather", _mlx.default_backend()})
PROMPT = [1, 5, 2, 8, 13, 21, 34, 55, 3, 4, 7, 11]


def make_pool() -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=512))


def decode(caches: list[Any]) -> list[int]:
    steps = generate_step(mx.array(PROMPT), tiny_llama(), max_tokens=20, prompt_cache=caches)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_decodes_the_same_tokens_through_every_backend(backend: str) -> None:
    model, pool = tiny_llama(), make_pool()
    caches = build_paged_caches(model, pool, 1, backend=backend)
    assert _mlx.PagedPool.of(pool).backend == backend
    before = kvpool.attention_stats()
    with kvpool.attention():
        tokens = decode(caches)
    assert tokens == decode(make_prompt_cache(model))
    answered = kvpool.attention_stats().since(before)
    if backend == "gather":
        assert answered.kernel == 0
        assert set(answered.fell_back) == {"no kernels that read pages on this device"}
    elif _mlx.default_backend() == "cpu":
        assert answered.kernel > 0
    else:
        # On a GPU pages of another device are gathered, and so are the model's numbers of fp32.
        assert answered.kernel == 0
        assert answered.fell_back
    pool.check_invariants()


def test_a_pool_keeps_the_backend_of_its_first_cache() -> None:
    model, pool = tiny_llama(), make_pool()
    build_paged_caches(model, pool, 1, backend="gather", byte_budget=10**8)
    build_paged_caches(model, pool, 2)
    build_paged_caches(model, pool, 3, backend="gather", byte_budget=10**8)
    with pytest.raises(ValueError, match=r"\[build_paged_caches\] backend is gather .* got cpu"):
        build_paged_caches(model, pool, 4, backend="cpu")
    with pytest.raises(ValueError, match=r"\[build_paged_caches\] byte_budget .* got 5 and none"):
        build_paged_caches(model, pool, 4, byte_budget=5)
    assert _mlx.PagedPool.of(pool).byte_budget == 10**8


def test_a_backend_that_is_not_there_changes_nothing() -> None:
    model, pool = tiny_llama(), make_pool()
    with pytest.raises(ValueError, match=r"\[build_paged_caches\] backend must be cpu, cuda or"):
        build_paged_caches(model, pool, 1, backend="metal")
    with pytest.raises(TypeError, match=r"\[build_paged_caches\] backend must be a str, got 1"):
        build_paged_caches(model, pool, 1, backend=1)  # type: ignore[arg-type]
    build_paged_caches(model, pool, 1, backend="gather")
    assert _mlx.PagedPool.of(pool).backend == "gather"


def test_every_request_of_a_model_gets_it() -> None:
    model, pool = tiny_llama(), make_pool()
    with pool_model(model, pool, paged=True, backend="gather"):
        decode(model.make_cache())
    assert _mlx.PagedPool.of(pool).backend == "gather"
