"""PoolBackedBatchRotatingKVCache: mlx-lm's sliding-window cache of a batch, charged to a pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache, dynamic_roll

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._batch import BatchLayerCache
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches.rotating_kv_cache import PoolBackedRotatingKVCache


class PoolBackedBatchRotatingKVCache(BatchLayerCache, PoolBackedRotatingKVCache):
    """A drop-in replacement for ``mlx_lm.models.cache.BatchRotatingKVCache``.

    Made by ``PoolBackedRotatingKVCache.merge``, which mlx-lm calls to put requests into a batch.
    Charged as ``PoolBackedRotatingKVCache`` is, for all sequences.

    Args:
        pool: The pool to draw on.
        max_size: Tokens in the window, >= 1.
        left_padding: Rows of padding before each sequence.
        owner: Whom the blocks belong to.
        step: Rows that the buffers grow by until the window is full, 256 by default.
    """

    _stock = BatchRotatingKVCache
    _stock_single = RotatingKVCache
    _state_parts = (
        "keys",
        "values",
        "offset",
        "left_padding",
        "max_size",
        "rows appended",
        "index",
        "rotated",
    )

    # Tokens that each sequence will have where its padding on the right begins, from prepare to
    # finalize.
    _lengths: tuple[int, ...] | None

    def __init__(
        self,
        pool: BlockPoolAllocator,
        max_size: int,
        left_padding: Sequence[int],
        owner: int = -1,
        step: int | None = None,
    ) -> None:
        self._shape_like(max_size)
        self._begin(pool, left_padding, owner, step)

    @classmethod
    def _geometry_of(cls, caches: Sequence[Any]) -> tuple[int, ...]:
        sizes = {cache.max_size for cache in caches}
        if len(sizes) > 1:
            raise ValueError(f"[{cls.__name__}] max_size differs between caches: {sorted(sizes)}")
        return (caches[0].max_size,)

    def _shape_like(self, *geometry: int) -> None:
        (max_size,) = geometry
        self._window(max_size, 0)

    @classmethod
    def _unattached(cls, state: Any) -> PoolBackedBatchRotatingKVCache:
        max_size = cls._parts_of(state)[4]
        return cls._empty(CacheGroup(None, 0), None, (), max_size)

    def _forget(self) -> None:
        super()._forget()
        self._lengths = None

    def _single(self, group: CacheGroup) -> PoolBackedRotatingKVCache:
        return PoolBackedRotatingKVCache._member(group, self._step, self.max_size, 0)

    def _as_stock(self) -> BatchRotatingKVCache:
        stock = BatchRotatingKVCache(self.max_size, [])
        stock.keys, stock.values = self._view(self._keys), self._view(self._values)
        stock.left_padding, stock.offset = self.left_padding, self.offset
        stock._offset, stock._idx, stock.rotated = self._offset, self._idx, self.rotated
        if self._lengths is not None:
            stock._lengths = mx.array(self._lengths, mx.int32)
        return stock

    def _adopt(self, stock: Any, owners: Sequence[int], where: str) -> None:
        padding, counts = stock.left_padding.tolist(), stock.offset.tolist()
        lengths = None if stock._lengths is None else tuple(stock._lengths.tolist())
        self._hold(stock.keys, stock.values, len(padding), stock._offset, stock._idx, where)
        self._settle_rows(padding, counts, owners)
        self._lengths = lengths

    # --- the decode path --------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens and returns those that they may attend to, in the order of the buffers.

        Takes and raises what ``PoolBackedKVCache.update_and_fetch`` does.

        Raises:
            RuntimeError: A single token while the sequences are padded on the right: ``finalize``
                first.
        """
        if not self._known_to_fit(keys, values):
            self._check_fit(keys, values)
        batch, _, n_tokens, _ = keys.shape
        if n_tokens > 1:
            return self._append_chunk(keys, values)
        if n_tokens == 1 and self._lengths is not None:
            where = self._where("update_and_fetch")
            raise RuntimeError(f"[{where}] call finalize before single tokens")
        marked = self._lease.batch == batch and max(self._padding, default=0) <= 0
        fetched = super().update_and_fetch(keys, values)
        if not marked:
            self._mark()
        return fetched

    def _append_chunk(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        lease = self._lease
        if lease.is_torn:
            self._group.roll_back()
        padding, moves = self._padding, self._moves()
        kept = []
        if self._keys is not None:
            kept = [self._temporal_order(buffer) for buffer in (self._keys, self._values)]
            if any(moves):
                kept = [dynamic_roll(b, mx.array(moves)[:, None], axis=2) for b in kept]
        n_tokens = keys.shape[2]
        self._append(keys.shape[0], n_tokens)
        rows, offset = lease.rows, lease.offset
        dropped = 0
        if kept:
            dropped = kept[0].shape[2] - (rows - n_tokens)
            self._keys, self._values = (
                mx.concatenate([old[:, :, dropped:], new], axis=2)
                for old, new in zip(kept, (keys, values), strict=True)
            )
        else:
            self._keys, self._values = self._view(keys), self._view(values)
        self._rows = rows
        if any(moves):
            self._settle_rows(
                [p + move - dropped for p, move in zip(padding, moves, strict=True)],
                [offset - lag - move for lag, move in zip(self._lags, moves, strict=True)],
                self._owners,
            )
        else:
            self._mark()
        lease.commit()
        if not kept:
            self._tag(lease)
        return self.keys_and_values()

    def _moves(self) -> list[int]:
        """Rows of padding on the right of each sequence that has ended.

        They go to the left before the next chunk: they must not push tokens out of the window.
        """
        if self._lengths is None or self._keys is None:
            return [0] * len(self._lags)
        ends = zip(self._lags, self._lengths, strict=True)
        return [max(0, self._offset - lag - length) for lag, length in ends]

    def _check_fit(self, keys: Any, values: Any) -> None:
        super()._check_fit(keys, values)
        self._check_batch(keys)

    # --- what mlx-lm asks -------------------------------------------------------------------------

    @property
    def _offset(self) -> int:
        return self._lease.offset

    @property
    def rotated(self) -> bool:
        """Whether the oldest rows lie in the middle of the buffers."""
        return self._idx < min(self._rows, self._offset)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """mlx-lm's attention mask for ``N`` tokens a sequence that come after those here."""
        if self._lease.is_torn:  # a model asks for its mask at the start of a step
            self._group.roll_back()
        # A chunk finds the rows in the order of their tokens.
        straight = N > 1 and self.rotated
        return BatchRotatingKVCache.make_mask(
            SimpleNamespace(
                left_padding=self.left_padding,
                max_size=self.max_size,
                rotated=self.rotated and not straight,
                _offset=self._offset,
                _idx=self._rows if straight else self._idx,
            ),
            N,
            window_size,
            return_array,
        )

    @property
    def state(self) -> Any:
        """``(keys, values, offset, left_padding, max_size, rows appended, index, rotated)``."""
        keys, values = self._view(self._keys), self._view(self._values)
        place = self.max_size, self._offset, self._idx, self.rotated
        return keys, values, self.offset, self.left_padding, *place

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, counts, padding, max_size, offset, index, _ = self._parts_of(state)
        if max_size != self.max_size:
            raise ValueError(
                f"[{self._where('state')}] max_size must be {self.max_size}, got {max_size}"
            )
        self._restore(keys, values, counts, padding, offset, index)
        self._lengths = None
