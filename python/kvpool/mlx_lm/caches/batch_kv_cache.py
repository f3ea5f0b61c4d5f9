"""PoolBackedBatchKVCache: mlx-lm's plain cache of a batch, charged to a block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._batch import BatchLayerCache
from kvpool.mlx_lm.caches._dense import DenseLayerCache
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches.kv_cache import PoolBackedKVCache


class PoolBackedBatchKVCache(BatchLayerCache, DenseLayerCache):
    """A drop-in replacement for ``mlx_lm.models.cache.BatchKVCache``.

    Made by ``PoolBackedKVCache.merge``, which mlx-lm calls to put requests into a batch. It grows
    as ``PoolBackedKVCache`` does, by whole rows of all sequences.

    Args:
        pool: The pool to draw on.
        left_padding: Rows of padding before each sequence.
        owner: Whom the blocks belong to.
        step: Rows to grow by, exactly; see ``PoolBackedKVCache``.
    """

    _stock = BatchKVCache
    _stock_single = KVCache
    _state_parts = ("keys", "values", "offset", "left_padding", "rows written")

    # Rows of padding after each sequence, from prepare to finalize.
    _right_padding: tuple[int, ...] | None

    def __init__(
        self,
        pool: BlockPoolAllocator,
        left_padding: Sequence[int],
        owner: int = -1,
        step: int | None = None,
    ) -> None:
        self._begin(pool, left_padding, owner, step)

    def _forget(self) -> None:
        super()._forget()
        self._right_padding = None

    def _single(self, group: CacheGroup) -> PoolBackedKVCache:
        return PoolBackedKVCache._member(group, self._step)

    def _as_stock(self) -> BatchKVCache:
        stock = BatchKVCache([])
        stock.keys, stock.values = self._view(self._keys), self._view(self._values)
        stock.left_padding, stock.offset = self.left_padding, self.offset
        stock._idx = self._idx
        if self._right_padding is not None:
            stock._right_padding = mx.array(self._right_padding)
        return stock

    def _adopt(self, stock: Any, owners: Sequence[int], where: str) -> None:
        padding, counts = stock.left_padding.tolist(), stock.offset.tolist()
        right = stock._right_padding
        right = None if right is None else tuple(right.tolist())
        self._hold(stock.keys, stock.values, len(padding), stock._idx, stock._idx, where)
        self._settle_rows(padding, counts, owners)
        self._right_padding = right

    def _check_fit(self, keys: Any, values: Any) -> None:
        super()._check_fit(keys, values)
        self._check_batch(keys)

    def _advance(self, batch: int, n_tokens: int) -> tuple[int, int]:
        charged = self._lease.batch
        place = super()._advance(batch, n_tokens)
        if charged != batch:
            self._mark()
        return place

    @property
    def _idx(self) -> int:
        return self._lease.offset

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        """mlx-lm's attention mask for ``N`` tokens a sequence that come after those here."""
        if self._lease.is_torn:  # a model asks for its mask at the start of a step
            self._group.roll_back()
        return BatchKVCache.make_mask(self, N, return_array, **kwargs)

    @property
    def state(self) -> Any:
        """``(keys, values, offset, left_padding, rows written)``, cut to the rows written."""
        return *self.keys_and_values(), self.offset, self.left_padding, self._idx

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, counts, padding, written = self._parts_of(state)
        self._restore(keys, values, counts, padding, written, written)
        self._right_padding = None
