"""What is no model of mlx-lm, given where one is wanted."""

from __future__ import annotations

import pytest
from kvpool import build_paged_caches, build_pooled_caches, load_prompt_cache, save_prompt_cache
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import pool_model

NO_MODELS = [None, "smollm2", 5, (object(), object())]
NAMES = ["None", "name", "int", "pair"]


@pytest.mark.parametrize("model", NO_MODELS, ids=NAMES)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda model, pool: build_pooled_caches(model, pool, 1), "build_pooled_caches"),
        (lambda model, pool: build_paged_caches(model, pool, 1), "build_paged_caches"),
        (lambda model, pool: pool_model(model, pool), "pool_model"),
        (lambda model, pool: pool_model(model, pool, paged=True), "pool_model"),
    ],
    ids=["pooled", "paged", "pool_model", "pool_model-paged"],
)
def test_it_is_named_with_the_call(call, name, model):
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    with pytest.raises(TypeError, match=rf"^\[{name}\] model must be a model of mlx-lm, got "):
        call(model, pool)
    assert pool.stats.n_allocations == 0


@pytest.mark.parametrize("model", NO_MODELS[1:], ids=NAMES[1:])
def test_a_file_cannot_be_compared_with_it(tmp_path, model):
    save_prompt_cache(tmp_path / "prompt", [])
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    with pytest.raises(TypeError, match=r"^\[load_prompt_cache\] model must be a model of mlx-lm"):
        load_prompt_cache(tmp_path / "prompt", pool, model=model)
