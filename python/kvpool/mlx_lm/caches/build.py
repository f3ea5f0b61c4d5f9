"""build_pooled_caches: the caches that a model asks for, over a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_int, checked_owner, checked_pool
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches._layer import PooledLayerCache
from kvpool.mlx_lm.caches._request_cache import RequestCache
from kvpool.mlx_lm.caches.kv_cache import PoolBackedKVCache
from kvpool.mlx_lm.caches.rotating_kv_cache import PoolBackedRotatingKVCache

# Models (by id) whose make_cache is running: it may call build_pooled_caches in turn.
_asked: ContextVar[frozenset[int]] = ContextVar("_asked", default=frozenset())


def build_pooled_caches(
    model: Any, pool: BlockPoolAllocator, owner: int, step: int | None = None
) -> list[Any]:
    """The model's own prompt cache with its attention layers charged to ``pool``.

    Starts from what ``model.make_cache()`` gives, or one plain cache a layer. Plain and
    sliding-window caches are replaced by pooled ones; recurrent caches, lists of caches and
    whatever else stay as they are and are not charged.

    The pooled caches are a group. A step's growth is reserved for all of them when the first one
    moves, so that running out moves none; a step that was cut short by an exception is taken back
    when the model next runs; ``release`` on any of them releases all. Dropping one gives back its
    own blocks.

    Args:
        model: A model of mlx-lm.
        pool: The pool to draw on.
        owner: Whom the blocks belong to.
        step: Rows to grow by, exactly; see ``PoolBackedKVCache``.

    Returns:
        One cache for each that the model asks for (some share them between layers).

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``step`` is below 1, or ``owner`` does not fit 64 bits.
    """
    where = "build_pooled_caches"
    group = CacheGroup(checked_pool(where, pool), checked_owner(where, owner))
    step = None if step is None else checked_int(where, "step", step, 1)
    return [_pooled(cache, group, step) for cache in own_caches(model, where)]


def attach_caches(caches: Iterable[Any], pool: BlockPoolAllocator, owner: int = -1) -> None:
    """Charges caches made by ``from_state`` (loaded from a file) to ``pool``, as one group.

    Pooled caches and paged ones are a group each. Those in a list of caches (mlx-lm's
    ``CacheList``) are attached, too; caches of other kinds are left alone.

    Args:
        caches: A request's caches, one a layer.
        pool: The pool to draw on.
        owner: Whom the blocks belong to.

    Raises:
        TypeError: ``pool`` or ``owner`` is of another type.
        BlockPoolExhaustedError: The pool has too few blocks; no cache is attached.
        ValueError: A cache has a pool already; none is attached.
    """
    where = "attach_caches"
    checked_pool(where, pool)
    owner = checked_owner(where, owner)
    groups: dict[type, Any] = {}
    takes_back: list[Callable[[], None]] = []
    try:
        for cache in attachable_among(caches):
            kind = type(cache._group)
            if kind not in groups:
                groups[kind] = kind(pool, owner)
            takes_back.append(cache._attached_to(groups[kind]))
    except BaseException:
        for take_back in takes_back:
            take_back()
        raise


def rewind_step(caches: Iterable[Any]) -> int:
    """Takes back the last step of a model, whatever its caches: also where a window has wrapped.

    What ``trim_prompt_cache(caches, n)`` does for the ``n`` tokens of the last step, for models
    whose sliding-window layers cannot be trimmed any more. One step can be taken back; nothing but
    a step that did not fit may have come since.

    Args:
        caches: The model's caches, all of them pooled.

    Returns:
        The tokens that the step had appended; 0 where there is none to take back.

    Raises:
        ValueError: A cache is not pooled, so that its layer cannot follow.
    """
    layers = list(caches)
    for cache in layers:
        if not isinstance(cache, PooledLayerCache):
            raise ValueError(f"[rewind_step] caches must be pooled, got a {type(cache).__name__}")
    if not layers or not all(cache._lease.has_moved for cache in layers):
        return 0
    before = layers[0]._lease.offset
    for group in {id(cache._group): cache._group for cache in layers}.values():
        group.roll_back()
    return before - layers[0]._lease.offset


def layers_among(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of a prompt cache, those in lists of caches (mlx-lm's ``CacheList``) included."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from layers_among(cache.caches)
        else:
            yield cache


def attachable_among(caches: Iterable[Any]) -> list[Any]:
    """The pooled and the paged caches of a prompt cache, those in lists of caches included."""
    return [cache for cache in layers_among(caches) if isinstance(cache, RequestCache)]


def own_caches(model: Any, where: str) -> list[Any]:
    """The caches that ``model`` asks for, mlx-lm's own.

    Raises:
        TypeError: ``model`` is something else; the message starts with ``where``.
    """
    # The class's method first: an instance's may be the one that calls this function.
    if callable(make := getattr(type(model), "make_cache", None)):
        return make(model)
    if not hasattr(model, "layers") and hasattr(model, "model"):
        model = model.model
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        raise TypeError(f"[{where}] model must be a model of mlx-lm, got {model!r}")
    asked = _asked.get()
    if id(model) in asked:
        return [KVCache() for _ in model.layers]
    token = _asked.set(asked | {id(model)})
    try:
        return make_prompt_cache(model)
    finally:
        _asked.reset(token)


def _pooled(cache: Any, group: CacheGroup, step: int | None) -> Any:
    if type(cache) is KVCache:
        return PoolBackedKVCache._member(group, step)
    if type(cache) is RotatingKVCache:
        return PoolBackedRotatingKVCache._member(group, step, cache.max_size, cache.keep)
    return cache
