"""pool_model: every request to a model draws on one pool, wherever mlx-lm makes its cache."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches import build_pooled_caches
from kvpool.mlx_lm.caches._arguments import checked_int, checked_pool
from kvpool.mlx_lm.caches.build import own_caches

if TYPE_CHECKING:
    from kvpool.mlx_lm.admission import Admission

_MISSING = object()


class PooledModel:
    """A model whose requests are charged to a pool, until ``undo`` or the end of a ``with``.

    Made by ``pool_model``.

    Attributes:
        admission: Who may begin, where the caches are paged: see ``PagedBatchGenerator``.
    """

    def __init__(
        self,
        model: Any,
        pool: BlockPoolAllocator,
        build: Callable[..., list[Any]],
        admission: Admission | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.pool = pool
        self.admission = admission
        self._before = vars(model).get("make_cache", _MISSING)
        self._build, self._options = build, options
        # Whoever has the model finds this object by it.
        self._installed = model.make_cache = self._make_cache

    def _make_cache(self) -> list[Any]:
        return self._build(self.model, self.pool, self.pool.new_owner(), **self._options)

    def undo(self) -> None:
        """Gives the model back the caches that it had; requests under way keep theirs.

        Raises:
            RuntimeError: Another ``make_cache`` was put in place since: undo that one first.
        """
        if vars(self.model).get("make_cache") is not self._installed:
            raise RuntimeError("[PooledModel::undo] the model has another make_cache now")
        if self._before is _MISSING:
            del self.model.make_cache
        else:
            self.model.make_cache = self._before

    def __enter__(self) -> PooledModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def pool_model(
    model: Any,
    pool: BlockPoolAllocator,
    step: int | None = None,
    *,
    paged: bool = False,
    **options: Any,
) -> PooledModel:
    """Charges every request to ``model`` to ``pool``, wherever mlx-lm makes the request's cache.

    ``mlx_lm.generate``, ``batch_generate`` and ``mlx_lm.server`` make the cache of a request by
    ``model.make_cache()``, which is replaced by ``build_pooled_caches`` or ``build_paged_caches``
    with an owner of its own (``pool.new_owner()``) for each request.

        with pool_model(model, pool):
            batch_generate(model, tokenizer, prompts)

    Args:
        model: A model of mlx-lm.
        pool: The pool to draw on.
        step: Rows to grow by, exactly; see ``PoolBackedKVCache``.
        paged: Make paged caches; the attention hook is another matter (``kvpool.attention``).
        options: Of ``build_paged_caches``, with ``paged``.

    Returns:
        What takes it back: a context manager with ``undo()``.

    Raises:
        TypeError: An argument is of another type, or of the other kind of caches.
        ValueError: ``step`` is below 1, or an option is out of range.
    """
    checked_pool("pool_model", pool)
    own_caches(model, "pool_model")
    if not paged:
        if options:
            raise TypeError(f"[pool_model] {', '.join(options)} need paged=True")
        if step is not None:
            step = checked_int("pool_model", "step", step, 1)
        return PooledModel(model, pool, build_pooled_caches, step=step)
    if step is not None:
        raise TypeError(f"[pool_model] paged caches have no step, got {step!r}")
    from kvpool.mlx_lm.admission import Admission
    from kvpool.mlx_lm.paged import build_paged_caches

    # Refuses options now, not at the first request.
    caches = build_paged_caches(model, pool, 0, **options)
    return PooledModel(model, pool, build_paged_caches, Admission(pool, caches), **options)
