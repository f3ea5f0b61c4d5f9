"""Saving the caches of a processed prompt to a file, and loading them into a pool."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from kvpool import _prompt_file
from kvpool.core.exceptions import PromptCacheError
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches import PoolBackedRotatingKVCache, attach_caches
from kvpool.mlx_lm.caches._arguments import checked_int, checked_owner, checked_pool
from kvpool.mlx_lm.caches._layer import PooledLayerCache
from kvpool.mlx_lm.caches.build import attachable_among, layers_among, own_caches
from kvpool.mlx_lm.caches.quantized_kv_cache import warn_of_cuda

__all__ = ["PromptCacheError", "load_prompt_cache", "save_prompt_cache"]


def save_prompt_cache(
    file: str | os.PathLike[str],
    cache: Iterable[Any],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Saves the caches of a prompt, all layers, to a safetensors file.

    Only rows that hold tokens are written, with checksums. The file appears at once: whoever reads
    it meanwhile sees the old one. The caches go on being used.

    Args:
        file: The file, replaced if it is there. By custom it ends in ``.safetensors``.
        cache: The caches of a request: pooled or paged ones, and mlx-lm's own among them.
        metadata: Whatever JSON can hold, given back when the file is loaded.

    Raises:
        PromptCacheError: A cache is of a kind that could not be loaded again.
        TypeError: ``metadata`` has something in it that JSON cannot hold, or an argument is of
            another type.
        OSError: The file cannot be written; what was there is as before.
    """
    where = "[save_prompt_cache]"
    arrays: dict[str, mx.array] = {}
    path = _checked_path("save_prompt_cache", file)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"{where} metadata must be a mapping, got {metadata!r}")
    if not isinstance(cache, Iterable):
        raise TypeError(f"{where} cache must be a list of caches, got {cache!r}")
    caches = list(cache)
    record = {
        "caches": [_encoded(where, layer, arrays) for layer in caches],
        "block_size": _block_size(where, caches),
        "metadata": dict(metadata or {}),
    }
    try:
        json.dumps(record["metadata"])
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} metadata must be what JSON can hold: {error}") from error
    _prompt_file.write(path, record, arrays)


def load_prompt_cache(
    file: str | os.PathLike[str],
    pool: BlockPoolAllocator,
    owner: int = -1,
    *,
    model: Any = None,
    step: int | None = None,
    return_metadata: bool = False,
) -> Any:
    """Loads the caches of a prompt, charged to ``pool``.

    The pool, the caches' owner and the process may be others than when they were saved. The pooled
    caches are a group, as ``build_pooled_caches`` makes one, and so are the paged ones; mlx-lm's
    own caches come back as they were saved. A file that fits is all that is needed to go on:
    ``generate(..., prompt_cache=...)`` with the rest of the prompt.

    Args:
        file: A file of ``save_prompt_cache``. It is checked before any of it is used.
        pool: The pool to draw on, with blocks of as many tokens as the one the file is from.
        owner: Whom the blocks belong to.
        model: Where given, the caches must be what this model of mlx-lm would make: as many layers,
            of the same kinds, windows, heads, dims and types.
        step: Rows to grow by, exactly; see ``PoolBackedKVCache``.
        return_metadata: Return the metadata, too.

    Returns:
        The caches, one a layer; with ``return_metadata`` a pair of them and a dict.

    Raises:
        PromptCacheError: The file is damaged, or does not fit the pool or the model.
        BlockPoolExhaustedError: The pool has too few blocks.
        TypeError: An argument is of another type.
        OSError: The file cannot be read.

        In all cases nothing was charged.

    Warns where the file has caches that MLX quantised and mlx-lm attends over them wrongly, as
    ``PoolBackedKVCache.to_quantized`` does.
    """
    checked_pool("load_prompt_cache", pool)
    owner = checked_owner("load_prompt_cache", owner)
    if step is not None:
        step = checked_int("load_prompt_cache", "step", step, 1)
    path = _checked_path("load_prompt_cache", file)
    where = f"[load_prompt_cache] {path}"
    record, arrays = _prompt_file.read(path)
    try:
        caches = [_decoded(layer, arrays) for layer in record["caches"]]
        block_size, metadata = record["block_size"], record["metadata"]
    except Exception as error:  # whatever a state can do to a cache's setter
        raise PromptCacheError(f"{where} holds no usable caches: {error}") from error
    if block_size not in (None, pool.config.block_size):
        raise PromptCacheError(
            f"{where} does not fit: block_size is {block_size} in the file, "
            f"{pool.config.block_size} in the pool"
        )
    if model is not None:
        _refuse_other_model(where, caches, model)
    if any(isinstance(cache, stock.QuantizedKVCache) for cache in layers_among(caches)):
        warn_of_cuda()
    for layer in attachable_among(caches):
        layer._step = step
    attach_caches(caches, pool, owner)
    return (caches, metadata) if return_metadata else caches


def _checked_path(call: str, file: Any) -> Path:
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"[{call}] file must be a path, got {file!r}")
    return Path(file)


# --- caches and their records ---------------------------------------------------------------------


def _encoded(where: str, cache: Any, arrays: dict[str, mx.array]) -> dict[str, Any]:
    name = type(cache).__name__
    if _loadable(name) is not type(cache):
        raise PromptCacheError(f"{where} a {name} could not be loaded again")
    if isinstance(cache, stock.CacheList):
        return {"class": name, "caches": [_encoded(where, c, arrays) for c in cache.caches]}
    try:
        return {"class": name, "state": _prompt_file.encode(_live_state(cache), arrays)}
    except TypeError as error:
        raise PromptCacheError(f"{where} the state of a {name} cannot be saved: {error}") from error


def _decoded(record: dict[str, Any], arrays: Mapping[str, mx.array]) -> Any:
    name = record["class"]
    cls = _loadable(name)
    if cls is None:
        raise ValueError(f"class {name!r} is unknown")
    if issubclass(cls, stock.CacheList):
        return cls(*(_decoded(inner, arrays) for inner in record["caches"]))
    make = getattr(cls, "_from_saved", cls.from_state)
    return make(_prompt_file.decode(record["state"], arrays))


def _loadable(name: str) -> Any:
    """The cache class that mlx-lm, too, would find under this name; None where there is none."""
    if name == "PagedKVCache":
        importlib.import_module("kvpool.mlx_lm.paged.kv_cache")  # makes the name known
    cls = getattr(stock, name, None)
    if not isinstance(cls, type):
        return None
    ours = issubclass(cls, (stock._BaseCache, PooledLayerCache)) or hasattr(cls, "_from_saved")
    return cls if ours else None


def _live_state(cache: Any) -> Any:
    """The state of a cache without rows that wait for tokens to come."""
    if hasattr(cache, "_saved"):
        return cache._saved()
    if isinstance(cache, PooledLayerCache):
        cache._settle()
    if isinstance(cache, _WITH_SPARE_ROWS) and not cache.empty():
        return (*cache.keys_and_values(), *cache.state[2:])
    return cache.state


# Whose state is the buffers as they are.
_WITH_SPARE_ROWS = (
    stock.KVCache,
    stock.QuantizedKVCache,
    stock.RotatingKVCache,
    PoolBackedRotatingKVCache,
)


def _block_size(where: str, caches: Iterable[Any]) -> int | None:
    sizes = {
        cache.pool.config.block_size for cache in attachable_among(caches) if cache.pool is not None
    }
    if len(sizes) > 1:
        raise PromptCacheError(f"{where} the caches are over pools of block_size {sorted(sizes)}")
    return sizes.pop() if sizes else None


# --- what a model expects -------------------------------------------------------------------------


def _refuse_other_model(where: str, caches: list[Any], model: Any) -> None:
    expected = own_caches(model, "load_prompt_cache")
    if len(caches) != len(expected):
        raise PromptCacheError(
            f"{where} does not fit the model: it has {len(caches)} layers, not {len(expected)}"
        )
    # One token, never evaluated, shows shapes and types whatever the architecture; a model that
    # wants more than tokens still has the kinds of its caches.
    with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
        model(mx.zeros((1, 1), mx.int32), cache=expected)
    for i, (found, wanted) in enumerate(zip(caches, expected, strict=True)):
        mine, theirs = _geometry(found), _geometry(wanted)
        for name in mine:
            if name in theirs and mine[name] != theirs[name]:
                raise PromptCacheError(
                    f"{where} does not fit the model: {name} of layer {i} is {mine[name]} in the "
                    f"file, {theirs[name]} in the model"
                )


def _geometry(cache: Any) -> dict[str, Any]:
    """What caches of one layer have in common, as far as it shows."""
    kind = type(cache).__name__.removeprefix("PoolBacked").removeprefix("Quantized")
    window = getattr(cache, "max_size", getattr(cache, "window", None))
    if kind == "PagedKVCache":
        kind = "KVCache" if window is None else "RotatingKVCache"
    geometry: dict[str, Any] = {"kind": kind}
    if window is not None:
        geometry["window"] = (window, getattr(cache, "keep", 0))
    keys: Any = getattr(cache, "keys", None)
    values: Any = getattr(cache, "values", None)
    if isinstance(keys, tuple):
        per_code = 32 // cache.bits
        geometry["heads and dims"] = (
            keys[0].shape[1],
            keys[0].shape[3] * per_code,
            values[0].shape[3] * per_code,
        )
        geometry["type"] = _prompt_file.type_name(keys[1])
    elif keys is not None:
        geometry["heads and dims"] = (keys.shape[1], keys.shape[3], values.shape[3])
        geometry["type"] = _prompt_file.type_name(keys)
    return geometry
