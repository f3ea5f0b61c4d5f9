"""Pages in files: formats come back, and mlx-lm's own save is refused."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_kinds import make_pool, prompt
from kvpool import build_paged_caches, load_prompt_cache, save_prompt_cache
from kvpool.core.exceptions import PromptCacheError
from mlx_lm.models import cache as stock_cache
from tiny_models import tiny_llama

PROMPT = prompt(40)


def test_formats_go_through_a_file(tmp_path):
    file = tmp_path / "prompt.safetensors"
    model, pool = tiny_llama(), make_pool()
    caches = build_paged_caches(model, pool, 1, age_policy="fp16:16,int8")
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    model(mx.array([[5]]), cache=caches)
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file, make_pool())
    assert loaded[0]._format == caches[0]._format
    near = mx.max(mx.abs(loaded[0].keys - caches[0].keys)).item()
    assert near < 0.1
    with pytest.raises(PromptCacheError, match="block_size"):
        load_prompt_cache(file, make_pool(block_size=8))


def test_mlx_lms_own_save_refuses_paged_caches(tmp_path):
    model = tiny_llama()
    caches = build_paged_caches(model, make_pool(), 1)
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    with pytest.raises(ValueError, match="not serializable"):
        stock_cache.save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
