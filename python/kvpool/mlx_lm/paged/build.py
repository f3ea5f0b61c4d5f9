"""build_paged_caches: the caches that a model asks for, in pages of a pool."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvpool import _mlx
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_int, checked_owner, checked_pool
from kvpool.mlx_lm.caches.build import own_caches
from kvpool.mlx_lm.paged._counts import uncounted
from kvpool.mlx_lm.paged._group import PagedGroup
from kvpool.mlx_lm.paged.age_policy import AgePolicy
from kvpool.mlx_lm.paged.kv_cache import PagedKVCache, _dims
from kvpool.mlx_lm.paged.page_format import PageFormat


def build_paged_caches(
    model: Any,
    pool: BlockPoolAllocator,
    owner: int,
    *,
    format: str = "auto",
    age_policy: AgePolicy | str | None = None,
    method: str | None = None,
    bits: int | None = None,
    byte_budget: int | None = None,
    backend: str | None = None,
) -> list[Any]:
    """The model's own prompt cache with its attention layers in pages of ``pool``.

    Starts from what ``model.make_cache()`` gives, or one plain cache a layer. Plain and
    sliding-window caches are replaced by paged ones; recurrent caches, lists of caches, rings that
    keep their first tokens and whatever else stay as they are and are not charged.

    The paged caches are a group. A step's growth, in blocks and bytes, is reserved for all of them
    when the first one moves, so that running out moves none; a step that was cut short by an
    exception is taken back when the model next runs; ``release`` on any of them releases all; a
    deep copy of the list is a group of its own that shares the blocks.

    Args:
        model: A model of mlx-lm.
        pool: The pool to draw on.
        owner: Whom the blocks belong to.
        format, age_policy, method, bits: What pages hold; see ``PagedKVCache``.
        byte_budget: Bytes that all paged caches of the pool may take, beside its number of blocks:
            whichever ends first is when the pool is exhausted. It is set before the pool's first
            paged cache; None leaves it as it is.
        backend: Where the pool's pages lie and who reads them, set before its first paged cache,
            too: "cpu", "cuda", or "gather" (as cpu, and attention is MLX's own over gathered keys
            and values). None: as the pool has it, or what fits MLX's default device.

    Returns:
        One cache for each that the model asks for (some share them between layers).

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or two of them contradict each other; the pool
            has another byte budget or backend already; or there is no such backend here.
    """
    where = "build_paged_caches"
    page_format = PageFormat.checked(where, format, age_policy, method, bits)
    checked_pool(where, pool)
    owner = checked_owner(where, owner)
    if byte_budget is not None:
        byte_budget = checked_int(where, "byte_budget", byte_budget, 1)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"[{where}] backend must be a str, got {backend!r}")
    try:
        _mlx.PagedPool.of(pool, byte_budget=byte_budget, backend=backend)
    except ValueError as error:
        raise ValueError(str(error).replace("[PagedPool::of]", f"[{where}]")) from None
    group = PagedGroup(pool, owner)
    caches = [_paged(cache, group, page_format) for cache in own_caches(model, where)]
    _shape(model, caches)
    return caches


def _paged(cache: Any, group: PagedGroup, page_format: PageFormat) -> Any:
    if type(cache) is KVCache:
        return PagedKVCache._member(group, page_format)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return PagedKVCache._member(group, page_format, cache.max_size)
    return cache


def _shape(model: Any, caches: list[Any]) -> None:
    """Tells the paged caches their shapes before the first step, so that it moves all or none.

    MLX is lazy: one token, never evaluated, shows them whatever the architecture. A model that
    wants more than tokens shows them as it runs.
    """
    probes = own_caches(model, "build_paged_caches")
    unable = (AttributeError, IndexError, KeyError, TypeError, ValueError)
    with uncounted(), contextlib.suppress(*unable):
        model(mx.zeros((1, 1), mx.int32), cache=probes)
    for mine, theirs in zip(caches, probes, strict=True):
        keys, values = getattr(theirs, "keys", None), getattr(theirs, "values", None)
        if isinstance(mine, PagedKVCache) and keys is not None and values is not None:
            mine._shape(_dims(keys, values), (keys.dtype, values.dtype))
