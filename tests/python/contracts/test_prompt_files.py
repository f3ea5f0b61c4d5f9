"""Prompts go through files and on in a pool, whatever kind of cache holds them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_kinds import DECODING, append, decode, in_use, make_pool, offsets, prompt
from kvpool import (
    BlockPoolExhaustedError,
    PromptCacheError,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import all_models, tiny_gemma3, tiny_llama

pytestmark = pytest.mark.parametrize("kind", [DECODING[0], DECODING[2]], ids=str)
PROMPT = prompt(21)


def processed(kind, model, pool, n_tokens: int = 20):
    caches = kind.build(model, pool)
    with kind.attention():
        model(mx.array([PROMPT[:n_tokens]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def books(pool) -> tuple[int, int, int]:
    return in_use(pool), pool.n_free("k"), pool.n_available("v")


@pytest.mark.parametrize("name", all_models())
def test_generation_goes_on_with_the_same_tokens(kind, tmp_path, name):
    model, file = all_models()[name](), tmp_path / "prompt.safetensors"
    expected = decode(model, make_prompt_cache(model), PROMPT, 16)
    saved, pool = processed(kind, model, make_pool(4096, 4)), make_pool(4096, 4)
    save_prompt_cache(file, saved, {"name": "tiny"})
    loaded, metadata = load_prompt_cache(file, pool, 7, model=model, return_metadata=True)
    assert metadata == {"name": "tiny"}
    assert [type(cache) for cache in loaded] == [type(cache) for cache in saved]
    for attribute in ("window", "max_size", "keep"):
        both = [[getattr(cache, attribute, None) for cache in caches] for caches in (loaded, saved)]
        assert both[0] == both[1]
    assert {cache.owner for cache in loaded} == {7}
    assert in_use(pool) == sum(cache.n_blocks_held() for cache in loaded) > 0
    with kind.attention():
        assert decode(model, loaded, PROMPT[20:], 16) == expected
        assert decode(model, saved, PROMPT[20:], 16) == expected  # saving left them as they were
    pool.check_invariants()
    loaded[0].release()
    assert in_use(pool) == 0


def test_a_step_cut_short_is_not_saved(kind, tmp_path):
    caches = processed(kind, tiny_llama(), make_pool(4096, 4))
    append(caches[0], 3, dims=64)  # and the model raised before the second layer
    save_prompt_cache(tmp_path / "prompt", caches)
    loaded = load_prompt_cache(tmp_path / "prompt", make_pool(4096, 4), 2)
    assert offsets(loaded) == 3 * [20]


def test_field_H3_a_pool_with_other_blocks_is_refused(kind, tmp_path):
    save_prompt_cache(tmp_path / "prompt", processed(kind, tiny_llama(), make_pool(4096, 4)))
    other = make_pool(4096, 32)
    before = books(other)
    with pytest.raises(PromptCacheError, match="block_size is 4 in the file, 32 in the pool"):
        load_prompt_cache(tmp_path / "prompt", other, 2)
    assert books(other) == before and not other.blocks_for(2)


def test_field_H3_another_model_is_refused(kind, tmp_path):
    pool, file = make_pool(4096, 4), tmp_path / "prompt"
    llama, gemma = tiny_llama(), tiny_gemma3()
    of_llama, of_gemma = (processed(kind, model, pool) for model in (llama, gemma))
    before = books(pool)
    for saved, other, message in (
        (of_llama, tiny_llama(n_layers=2, seed=5), "it has 3 layers, not 2"),
        (of_llama, gemma, "does not fit the model: "),
        (of_gemma, llama, "does not fit the model: "),
        (of_gemma, tiny_gemma3(window=8), "window of layer 0 is "),
    ):
        save_prompt_cache(file, saved)
        with pytest.raises(PromptCacheError, match=message):
            load_prompt_cache(file, pool, 2, model=other)
        assert books(pool) == before


def test_nothing_is_charged_where_the_pool_is_too_small(kind, tmp_path):
    file = tmp_path / "prompt"
    save_prompt_cache(file, processed(kind, tiny_llama(), make_pool(4096, 4)))
    small = make_pool(2 * 3 * 5 - 1, 4)
    before = books(small)
    with pytest.raises(BlockPoolExhaustedError):
        load_prompt_cache(file, small, 2)
    assert books(small) == before and not small.blocks_for(2)
    small.check_invariants()
    assert load_prompt_cache(file, make_pool(2 * 3 * 5, 4), 2)[0].offset == 20
