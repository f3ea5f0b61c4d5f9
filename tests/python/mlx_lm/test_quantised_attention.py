"""No way leads silently to mlx-lm's quantised attention where it is wrong: CUDA (docs/gpu.md).

Whether it is wrong is forced here, so that the ways are the same on every device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpool
import mlx.core as mx
import pytest
from kvpool import build_paged_caches, load_prompt_cache, save_prompt_cache
from kvpool.memory import BlockPoolAllocator, PoolBackedKVCache, PoolConfig, build_pooled_caches
from kvpool.mlx_lm.caches import PoolBackedQuantizedKVCache, attach_caches
from kvpool.mlx_lm.caches import quantized_kv_cache as module
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from tiny_models import needs_quantised_attention, tiny_llama

PROMPT = [1, 5, 2, 8, 13, 21, 34, 55, 3, 4, 7, 11]
OPTIONS = {"kv_bits": 8, "quantized_kv_start": 4, "max_tokens": 4}


@pytest.fixture(autouse=True)
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attends_wrongly", lambda: True)


def make_pool() -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=512))


def rows(n: int = 3) -> mx.array:
    return mx.random.normal((1, 2, n, 64))


def filled(pool: BlockPoolAllocator | None = None) -> PoolBackedKVCache:
    cache = PoolBackedKVCache(make_pool() if pool is None else pool, 1)
    cache.update_and_fetch(rows(), rows())
    return cache


def quietly_quantised() -> PoolBackedQuantizedKVCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return filled().to_quantized()


def file_of(path: Path, cache: Any) -> Path:
    file = path / "prompt.safetensors"
    save_prompt_cache(file, [cache])
    return file


def attached(state: Any) -> PoolBackedQuantizedKVCache:
    cache = PoolBackedQuantizedKVCache.from_state(state)
    attach_caches([cache], make_pool())
    return cache


WAYS: dict[str, Callable[[], Any]] = {
    "to_quantized": lambda: filled().to_quantized(),
    "by hand": lambda: PoolBackedQuantizedKVCache(make_pool()).update_and_fetch(rows(), rows()),
    "a state": lambda: attached(quietly_quantised().state).update_and_fetch(rows(1), rows(1)),
    "a copy": lambda: copy.deepcopy(quietly_quantised()).update_and_fetch(rows(1), rows(1)),
    "a cache that was made elsewhere": lambda: quietly_quantised().update_and_fetch(rows(), rows()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_pooled_quantised_cache_warns(way: str) -> None:
    with pytest.warns(RuntimeWarning, match="wrong for grouped queries on CUDA"):
        WAYS[way]()


@pytest.mark.parametrize("kind", ["pooled", "mlx-lm's", "in a list"])
def test_a_file_with_quantised_caches_warns(kind: str, tmp_path: Path) -> None:
    cache: Any = quietly_quantised()
    if kind != "pooled":
        cache = stock.QuantizedKVCache()
        cache.update_and_fetch(rows(), rows())
    if kind == "in a list":
        cache = stock.CacheList(cache)
    file, pool = file_of(tmp_path, cache), make_pool()
    with pytest.warns(RuntimeWarning, match="wrong for grouped queries on CUDA"):
        load_prompt_cache(file, pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_use = pool.stats.blocks_in_use()
        with pytest.raises(RuntimeWarning):
            load_prompt_cache(file, pool)
    assert pool.stats.blocks_in_use() == in_use


def test_kv_bits_over_pooled_caches_warns() -> None:
    needs_quantised_attention()
    model = tiny_llama()
    caches = build_pooled_caches(model, make_pool(), 1)
    with pytest.warns(RuntimeWarning, match="wrong for grouped queries on CUDA"):
        list(generate_step(mx.array(PROMPT), model, prompt_cache=caches, **OPTIONS))


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("source", ["built", "copied", "loaded"])
def test_paged_caches_never_take_that_way(
    hooked: bool, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("mlx-lm's quantised attention was asked")

    model, pool = tiny_llama(), make_pool()
    caches = build_paged_caches(model, pool, 1)
    prompt = mx.array(PROMPT)
    if source != "built":
        for _ in generate_step(prompt, model, prompt_cache=caches, **OPTIONS):
            pass
        if source == "copied":
            caches = copy.deepcopy(caches)
        else:
            save_prompt_cache(tmp_path / "paged.safetensors", caches)
            caches = load_prompt_cache(tmp_path / "paged.safetensors", pool, 2)
    monkeypatch.setattr(mx, "quantized_matmul", refuse)
    if hooked:
        kvpool.install_attention()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for _ in generate_step(prompt, model, prompt_cache=caches, **OPTIONS):
                pass
    finally:
        if hooked:
            kvpool.uninstall_attention()
    assert not any(hasattr(cache, "bits") for cache in caches)
    batch = [type(cache).merge([cache, copy.deepcopy(cache)]) for cache in caches]
    assert not any(hasattr(layer, "bits") for layer in batch)
    logits = model(mx.array([[1], [2]]), cache=batch)
    assert mx.isfinite(logits).all()


def test_elsewhere_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attends_wrongly", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled().to_quantized().update_and_fetch(rows(), rows())


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_it_is_wrong_on_every_cuda_device_and_nowhere_else(
    kind: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    device = mx.Device(getattr(mx, kind), index)
    for available in (True, False):
        fake = SimpleNamespace(
            default_device=lambda: device,
            DeviceType=mx.DeviceType,
            cuda=SimpleNamespace(is_available=lambda: available),  # noqa: B023
        )
        monkeypatch.setattr(module, "mx", fake)
        assert module.attends_wrongly() == (kind == "gpu" and available)
