"""PoolBackedBatchRotatingKVCache: mlx-lm's sliding-window cache of a batch, charged to a pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache, dynamic_roll

from kvpool.caches._arguments import checked_buffers, checked_int
from kvpool.caches._batch import BatchLayerCache
from kvpool.caches._group import CacheGroup
from kvpool.caches.rotating_kv_cache import PoolBackedRotatingKVCache
from kvpool.memory.block_pool import BlockPoolAllocator


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

    # Tokens of each sequence, those that the ring has overwritten included.
    _counts: tuple[int, ...]
    # Tokens that each sequence will have where its padding on the right begins, from prepare to
    # finalize.
    _lengths: tuple[int, ...] | None
    # The last array of counts, and what it was made of.
    _offsets: tuple[tuple[int, ...], mx.array] | None

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

    def _shape_like(self, *geometry: int) -> None:
        (max_size,) = geometry
        self._window(max_size, 0)

    @classmethod
    def from_state(cls, state: Any) -> PoolBackedBatchRotatingKVCache:
        """A cache with this state and no pool: ``attach`` it before it is used further."""
        return cls._loose(state, state[4])

    def _forget(self) -> None:
        super()._forget()
        self._counts = (0,) * len(self._owners)
        self._lengths = self._offsets = None

    def _single(self, group: CacheGroup) -> PoolBackedRotatingKVCache:
        return PoolBackedRotatingKVCache._member(group, self._step, self.max_size, 0)

    # --- to and from mlx-lm's own -----------------------------------------------------------------

    def _as_stock(self) -> BatchRotatingKVCache:
        stock = BatchRotatingKVCache(self.max_size, [])
        stock.keys, stock.values = self._view(self._keys), self._view(self._values)
        stock.left_padding, stock.offset = self.left_padding, mx.array(self._counts, mx.int32)
        stock._offset, stock._idx, stock.rotated = self._offset, self._idx, self.rotated
        stock._lengths = None if self._lengths is None else mx.array(self._lengths, mx.int32)
        return stock

    def _adopt(self, stock: Any, owners: Sequence[int], where: str) -> None:
        padding, counts = tuple(stock.left_padding.tolist()), tuple(stock.offset.tolist())
        lengths = None if stock._lengths is None else tuple(stock._lengths.tolist())
        self._hold(stock.keys, stock.values, len(padding), stock._offset, stock._idx, where)
        self._owners = tuple(owners)
        self._place(padding, counts, lengths)

    def _place(
        self,
        padding: tuple[int, ...],
        counts: tuple[int, ...],
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        self._padding, self._counts, self._lengths = padding, counts, lengths
        self._mark()

    def _mark(self) -> None:
        if self._lease.batch == len(self._padding):
            # The oldest rows of a ring that has turned are at its index.
            self._lease.set_padding(self._idx if self.rotated else 0, self._padding)

    def _refuse_unlike(self, where: str, other: Any) -> None:
        super()._refuse_unlike(where, other)
        if other.max_size != self.max_size:
            raise ValueError(
                f"[{where}] max_size must be {self.max_size} in all sequences, got {other.max_size}"
            )

    # --- the decode path --------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens and returns those that they may attend to, in the order of the buffers.

        Takes and raises what ``PoolBackedKVCache.update_and_fetch`` does.

        Raises:
            RuntimeError: A single token while the sequences are padded on the right: ``finalize``
                first.
        """
        if (keys.shape, values.shape) != self._fitting:
            self._check_fit(keys, values)
        n_tokens = keys.shape[2]
        if n_tokens == 1:
            if self._lengths is not None:
                where = self._where("update_and_fetch")
                raise RuntimeError(f"[{where}] call finalize before single tokens")
            fetched = super().update_and_fetch(keys, values)
            turn = 1 if self._offset > self.max_size else 0
            self._place(
                tuple(padding - turn for padding in self._padding),
                tuple(count + 1 for count in self._counts),
            )
            return fetched
        if n_tokens == 0:
            return super().update_and_fetch(keys, values)
        return self._append_chunk(keys, values)

    def _append_chunk(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        lease = self._lease
        if lease.is_torn:
            self._group.roll_back()
        # Padding on the right of sequences that have ended goes to the left: it must not push
        # tokens out of the window.
        shifts = (0,) * len(self._counts)
        if self._lengths is not None and self._keys is not None:
            ends = zip(self._counts, self._lengths, strict=True)
            shifts = tuple(max(0, count - length) for count, length in ends)
        kept = []
        if self._keys is not None:
            kept = [self._temporal_order(buffer) for buffer in (self._keys, self._values)]
            if any(shifts):
                shift = mx.array(shifts)[:, None]
                kept = [dynamic_roll(buffer, shift, axis=2) for buffer in kept]
        self._pending = True
        n_tokens = keys.shape[2]
        lease.append(keys.shape[0], n_tokens)
        dropped = 0
        if kept:
            dropped = kept[0].shape[2] - (lease.rows - n_tokens)
            kept = [buffer[..., dropped:, :] for buffer in kept]
            self._keys, self._values = (
                mx.concatenate([old, new], axis=2)
                for old, new in zip(kept, (keys, values), strict=True)
            )
        else:
            self._keys, self._values = self._view(keys), self._view(values)
        self._rows = lease.rows
        self._pending = False
        if not kept:
            self._tag(lease)
        self._place(
            tuple(p + s - dropped for p, s in zip(self._padding, shifts, strict=True)),
            tuple(c - s + n_tokens for c, s in zip(self._counts, shifts, strict=True)),
            self._lengths,
        )
        return self.keys_and_values()

    def _check_fit(self, keys: Any, values: Any) -> None:
        super()._check_fit(keys, values)
        self._fitting = None
        self._check_batch(keys)
        self._fitting = keys.shape, values.shape

    def _narrow(self) -> None:
        dropped = self._rows - self.max_size
        super()._narrow()
        self._padding = tuple(padding - dropped for padding in self._padding)

    def _undo(self) -> None:
        written, offset = not self._pending, self._offset
        super()._undo()
        undone = offset - self._offset
        if written and undone > 0:
            # The row that the next token goes over holds nothing.
            gap = 1 if self.rotated else 0
            self._place(
                tuple(padding + gap for padding in self._padding),
                tuple(count - undone for count in self._counts),
                self._lengths,
            )

    def trim(self, n: int) -> int:
        """Drops the newest ``n`` tokens of every sequence; see ``PoolBackedKVCache.trim``."""
        dropped = super().trim(n)
        self._counts = tuple(count - dropped for count in self._counts)
        return dropped

    # --- what mlx-lm asks -------------------------------------------------------------------------

    @property
    def _offset(self) -> int:
        return self._lease.offset

    @property
    def rotated(self) -> bool:
        """Whether the oldest rows lie in the middle of the buffers."""
        return self._idx < min(self._rows, self._offset)

    @property
    def offset(self) -> mx.array:  # type: ignore[override]
        """Tokens of each sequence, an array; negative before the padding is passed."""
        known = self._offsets
        if known is None or known[0] is not self._counts:
            known = self._offsets = (self._counts, mx.array(self._counts, dtype=mx.int32))
        return known[1]

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
        """``(keys, values, offset, left_padding, max_size, columns, index, rotated)``."""
        keys, values = self._view(self._keys), self._view(self._values)
        # Columns: tokens that the longest sequence would have.
        place = self.max_size, self._offset, self._idx, self.rotated
        return keys, values, self.offset, self.left_padding, *place

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        keys, values, counts, left_padding, max_size, offset, index, _ = state
        if max_size != self.max_size:
            raise ValueError(f"[{where}] max_size must be {self.max_size}, got {max_size}")
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
        padding, counts = tuple(left_padding.tolist()), tuple(counts.tolist())
        rows = 0 if keys is None else keys.shape[2]
        offset = checked_int(where, "offset", offset, 0)
        index = checked_int(where, "index", index, 0, rows)
        self._settle()
        self._hold(self._view(keys), self._view(values), len(padding), offset, index, where)
        if len(padding) != len(self._owners):
            self._owners = (self.owner,) * len(padding)
        self._place(padding, counts)
