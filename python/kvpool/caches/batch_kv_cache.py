"""PoolBackedBatchKVCache: mlx-lm's plain cache of a batch, charged to a block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvpool.caches._arguments import checked_buffers, checked_int
from kvpool.caches._batch import BatchLayerCache
from kvpool.caches._dense import DenseLayerCache
from kvpool.caches._group import CacheGroup
from kvpool.caches.kv_cache import PoolBackedKVCache
from kvpool.memory.block_pool import BlockPoolAllocator


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

    # Rows of padding after each sequence, from prepare to finalize.
    _right_padding: tuple[int, ...] | None
    # The last array of offsets, and what it was made of.
    _offsets: tuple[int, tuple[int, ...], mx.array] | None

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
        self._right_padding = self._offsets = None

    def _single(self, group: CacheGroup) -> PoolBackedKVCache:
        return PoolBackedKVCache._member(group, self._step)

    def _as_stock(self) -> BatchKVCache:
        stock = BatchKVCache([])
        stock.keys, stock.values = self._view(self._keys), self._view(self._values)
        stock.left_padding = self.left_padding
        stock.offset = self._lease.offset - self.left_padding
        stock._idx = self._lease.offset
        stock._right_padding = (
            None if self._right_padding is None else mx.array(self._right_padding)
        )
        return stock

    def _adopt(self, stock: Any, owners: Sequence[int], where: str) -> None:
        padding = tuple(stock.left_padding.tolist())
        right = stock._right_padding
        right = None if right is None else tuple(right.tolist())
        self._hold(stock.keys, stock.values, len(padding), stock._idx, stock._idx, where)
        self._padding, self._owners, self._right_padding = padding, tuple(owners), right
        self._mark()

    def _check_fit(self, keys: Any, values: Any) -> None:
        super()._check_fit(keys, values)
        self._fitting = None
        self._check_batch(keys)
        self._fitting = keys.shape, values.shape

    def _advance(self, batch: int, n_tokens: int) -> int:
        charged = self._lease.batch
        start = super()._advance(batch, n_tokens)
        if charged != batch:
            self._mark()
        return start

    @property
    def _idx(self) -> int:
        return self._lease.offset

    @property  # type: ignore[misc]
    def offset(self) -> mx.array:  # type: ignore[override]
        """Tokens of each sequence, an array; negative before the padding is passed."""
        end = self._lease.offset
        known = self._offsets
        if known is None or known[0] != end or known[1] is not self._padding:
            offsets = mx.array([end - padding for padding in self._padding], dtype=mx.int32)
            known = self._offsets = (end, self._padding, offsets)
        return known[2]

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        """mlx-lm's attention mask for ``N`` tokens a sequence that come after those here."""
        if self._lease.is_torn:  # a model asks for its mask at the start of a step
            self._group.roll_back()
        return BatchKVCache.make_mask(self, N, return_array, **kwargs)

    @property
    def state(self) -> tuple[Any, Any, mx.array, mx.array, int]:
        """``(keys, values, offset, left_padding, rows written)``, cut to the rows written."""
        return *self.keys_and_values(), self.offset, self.left_padding, self._lease.offset

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        keys, values, _, left_padding, written = state
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
        padding = tuple(left_padding.tolist())
        rows = 0 if keys is None else keys.shape[2]
        written = checked_int(where, "rows written", written, 0, rows)
        self._settle()
        self._hold(self._view(keys), self._view(values), len(padding), written, written, where)
        if len(padding) != len(self._owners):
            self._owners = (self.owner,) * len(padding)
        self._padding, self._right_padding = padding, None
        self._mark()
