"""PoolBackedRotatingKVCache: mlx-lm's sliding-window cache, charged to a block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from kvpool import _native
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_buffers, checked_fit, checked_int, format_name
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches._layer import STOCK_STEP, PooledLayerCache

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches.batch_rotating_kv_cache import PoolBackedBatchRotatingKVCache


class PoolBackedRotatingKVCache(PooledLayerCache):
    """A drop-in replacement for ``mlx_lm.models.cache.RotatingKVCache``.

    Holds a window of ``max_size`` tokens, the first ``keep`` of which stay. A single token goes
    over the oldest one. After a chunk of S tokens the buffers hold ``max_size - 1 + S`` rows, so
    that each of them has a full window, and the pool is charged for as many; the next single token
    cuts them to the window.

    Args:
        pool: The pool to draw on.
        max_size: Tokens in the window, >= 1.
        owner: Whom the blocks belong to.
        keep: First tokens that are never overwritten, below ``max_size``.
        step: Rows that the buffers grow by until the window is full, 256 by default.
    """

    _state_parts: ClassVar[tuple[str, ...]] = (
        "keys",
        "values",
        "offset",
        "keep",
        "max_size",
        "index",
    )

    def __init__(
        self,
        pool: BlockPoolAllocator,
        max_size: int,
        owner: int = -1,
        keep: int = 0,
        step: int | None = None,
    ) -> None:
        self._window(max_size, keep)
        self._start(pool, owner, step)

    @classmethod
    def _member(
        cls, group: CacheGroup, step: int | None, max_size: int, keep: int
    ) -> PoolBackedRotatingKVCache:
        cache = cls.__new__(cls)
        cache._window(max_size, keep)
        cache._step = step
        cache._clear()
        cache._join(group)
        return cache

    def _window(self, max_size: Any, keep: Any) -> None:
        where = type(self).__name__
        self.max_size = checked_int(where, "max_size", max_size, 1)
        self.keep = checked_int(where, "keep", keep, 0, self.max_size - 1)

    def _growth(self, pool: BlockPoolAllocator | None) -> _native.BufferGrowth:
        if self._step is not None:
            return _native.BufferGrowth.ring(self.max_size, self.keep, self._step)
        block_size = 1 if pool is None else pool.config.block_size
        return _native.BufferGrowth.ring(self.max_size, self.keep, STOCK_STEP, block_size)

    @classmethod
    def _unattached(cls, state: Any) -> PoolBackedRotatingKVCache:
        _, _, _, keep, max_size, _ = cls._parts_of(state)
        return cls._member(CacheGroup(None, 0), None, max_size, keep)

    @property
    def _idx(self) -> int:
        return self._lease.index

    def _tag(self, lease: _native.LayerLease) -> None:
        if self._keys is not None and self._values is not None:
            lease.set_formats(format_name(self._keys.dtype), format_name(self._values.dtype))

    # --- the decode path --------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens and returns those that they may attend to, in the order of the buffers.

        Takes and raises what ``PoolBackedKVCache.update_and_fetch`` does.
        """
        if not self._known_to_fit(keys, values):
            self._check_fit(keys, values)
        batch, _, n_tokens, _ = keys.shape
        if n_tokens == 0:
            return (keys, values) if self._keys is None else self.keys_and_values()
        lease = self._lease
        if lease.is_torn:
            self._group.roll_back()
        if n_tokens == 1 and self._rows > self.max_size:
            self._narrow()
        ranges = self._ranges()
        self._append(batch, n_tokens)
        rows, at = lease.rows, lease.index - n_tokens
        remade = n_tokens > 1 or rows > self._rows
        if n_tokens > 1:
            ranges = _without_oldest(ranges, self.keep, rows - n_tokens)
            grown = [
                self._chosen(self._keys, ranges, keys),
                self._chosen(self._values, ranges, values),
            ]
            self._keys, self._values, self._rows = *grown, rows
        elif rows > self._rows:
            spare = rows - self._rows - 1
            grown = [_longer(self._keys, keys, spare), _longer(self._values, values, spare)]
            self._keys, self._values, self._rows = *grown, rows
        else:
            self._keys[:, :, at : at + 1] = keys
            self._values[:, :, at : at + 1] = values
        lease.commit()
        if remade:
            self._tag(lease)
        return self.keys_and_values()

    def _check_fit(self, keys: Any, values: Any) -> None:
        where = self._where("update_and_fetch")
        self._refuse_unattached("update_and_fetch")
        checked_buffers(where, keys, values)
        if keys.shape[0] < 1:
            raise ValueError(f"[{where}] batch must be >= 1, got {keys.shape[0]}")
        for name, new, old in (("keys", keys, self._keys), ("values", values, self._values)):
            checked_fit(where, name, new, old)
        self._fitting = keys.shape, values.shape

    def _ranges(self) -> list[tuple[int, int]]:
        """Ranges of rows that hold the tokens, oldest first."""
        rows, index = self._rows, self._lease.index
        if index == rows:
            return [(0, rows)]
        if index < self._lease.offset:
            return [(0, self.keep), (index, rows), (self.keep, index)]
        return [(0, index)]

    @staticmethod
    def _chosen(buffer: Any, ranges: list[tuple[int, int]], new: mx.array | None = None) -> Any:
        parts = [] if buffer is None else [buffer[:, :, a:b] for a, b in ranges if a < b]
        if new is not None:
            parts.append(new)
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0][...]

    def _temporal_order(self, buffer: mx.array) -> mx.array:
        """The rows of ``buffer`` that hold tokens, oldest first."""
        return self._chosen(buffer, self._ranges())

    def _narrow(self) -> None:
        """Cuts what a chunk left beyond the window."""
        ranges = _without_oldest(self._ranges(), self.keep, self.max_size)
        keys, values = self._chosen(self._keys, ranges), self._chosen(self._values, ranges)
        lease = self._lease
        lease.replace(lease.batch, lease.offset, self.max_size, self.max_size)
        self._keys, self._values, self._rows = keys, values, self.max_size

    def keys_and_values(self) -> tuple[Any, Any]:
        """The buffers, without rows that no token has reached yet; (None, None) while empty."""
        if self._keys is None or self._values is None:
            return self._keys, self._values
        end = min(self._lease.offset, self._rows)
        return self._keys[:, :, :end], self._values[:, :, :end]

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[Any, Any, int, int, int, int]:
        """``(keys, values, offset, keep, max_size, index)``: the buffers as they lie."""
        lease = self._lease
        keys, values = self._view(self._keys), self._view(self._values)
        return keys, values, lease.offset, self.keep, self.max_size, lease.index

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        keys, values, offset, keep, max_size, index = self._parts_of(state)
        if (keep, max_size) != (self.keep, self.max_size):
            raise ValueError(
                f"[{where}] keep and max_size must be {self.keep} and {self.max_size}, "
                f"got {keep} and {max_size}"
            )
        batch = rows = 0
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
            batch, _, rows, _ = keys.shape
        offset = checked_int(where, "offset", offset, 0)
        index = checked_int(where, "index", index, 0, rows)
        self._settle()
        self._lease.replace(batch, offset, rows, index, where)
        self._clear()
        if rows > 0:
            self._keys, self._values, self._rows = self._view(keys), self._view(values), rows
            self._tag(self._lease)

    def size(self) -> int:
        """Tokens that can still be attended to."""
        return min(self._lease.offset, self.max_size)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """mlx-lm's attention mask for ``N`` tokens that come after those here."""
        if self._lease.is_torn:  # a model asks for its mask at the start of a step
            self._group.roll_back()
        return RotatingKVCache.make_mask(self, N, window_size, return_array)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PoolBackedBatchRotatingKVCache:
        """A batch of these caches' sequences; see ``PoolBackedKVCache.merge``.

        Raises:
            ValueError: The windows differ in size, too.
        """
        from kvpool.mlx_lm.caches.batch_rotating_kv_cache import PoolBackedBatchRotatingKVCache

        return PoolBackedBatchRotatingKVCache._merged(PoolBackedRotatingKVCache, caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Not supported, as in mlx-lm."""
        raise NotImplementedError(f"[{self._where('to_quantized')}] rings are not quantised")


def _without_oldest(ranges: list[tuple[int, int]], keep: int, n_rows: int) -> list[tuple[int, int]]:
    """``ranges`` cut to ``n_rows`` rows: the oldest go, but for the first ``keep``."""
    surplus = sum(b - a for a, b in ranges) - n_rows
    if surplus <= 0:
        return ranges
    kept = []
    for a, b in ranges:
        stay = min(keep, b - a)
        keep -= stay
        drop = min(surplus, b - a - stay)
        surplus -= drop
        kept += [(a, a + stay), (a + stay + drop, b)]
    return kept


def _longer(buffer: mx.array | None, new: mx.array, spare: int) -> mx.array:
    parts = [new] if buffer is None else [buffer, new]
    if spare > 0:
        parts.append(mx.zeros((*new.shape[:2], spare, new.shape[3]), new.dtype))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else new[...]
