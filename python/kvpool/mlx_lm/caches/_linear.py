"""LinearLayerCache: a pooled cache whose rows lie in the order of their tokens."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import create_attention_mask

from kvpool import _native
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_buffers, checked_int
from kvpool.mlx_lm.caches._layer import STOCK_STEP, PooledLayerCache


class LinearLayerCache(PooledLayerCache):
    """What plain and quantised caches share: token i lies in row i, growth is at the end."""

    def _growth(self, pool: BlockPoolAllocator | None) -> _native.BufferGrowth:
        if self._step is not None:
            return _native.BufferGrowth.exact(self._step)
        block_size = 1 if pool is None else pool.config.block_size
        return _native.BufferGrowth.spare(max(block_size, STOCK_STEP), block_size)

    def _advance(self, batch: int, n_tokens: int) -> tuple[int, int]:
        """Charges the pool for more tokens: the row where they start, the rows there are to be."""
        start = self._append(batch, n_tokens)
        return (start, self._rows) if start >= 0 else (-2 - start, self._lease.rows)

    def _check_new(self, keys: Any, values: Any) -> None:
        """Refuses new keys and values that no cache could take."""
        where = self._where("update_and_fetch")
        self._refuse_unattached("update_and_fetch")
        checked_buffers(where, keys, values)
        if keys.shape[0] < 1:
            raise ValueError(f"[{where}] batch must be >= 1, got {keys.shape[0]}")
        lengths = {0 if b is None else self._sizes(b)[1] for b in (self._keys, self._values)}
        if lengths != {self._rows}:
            raise ValueError(f"[{where}] the buffers of keys and values differ in length")

    def _place(self, keys: Any, values: Any, offset: Any, where: str) -> None:
        """Puts buffers of one length in place and charges the pool for them."""
        batch, rows = (0, 0) if keys is None else self._sizes(keys)
        offset = rows if offset is None else checked_int(where, "offset", offset, 0, rows)
        self._settle()
        self._lease.replace(batch, offset, rows, offset, where)
        self._clear()
        if rows > 0:
            self._keys, self._values, self._rows = self._view(keys), self._view(values), rows
            self._tag(self._lease)

    def keys_and_values(self) -> tuple[Any, Any]:
        """The keys and the values so far, without the spare rows; (None, None) while empty."""
        if self._keys is None or self._values is None:
            return self._keys, self._values
        end = self._lease.offset
        keys = self._each(lambda array: array[:, :, :end], self._keys)
        return keys, self._each(lambda array: array[:, :, :end], self._values)

    @PooledLayerCache.offset.setter  # type: ignore[attr-defined, untyped-decorator]
    def offset(self, offset: int) -> None:
        offset = checked_int(self._where("offset"), "offset", offset, 0, self._rows)
        self._lease.replace(self._lease.batch, offset, self._rows, offset)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's attention mask for tokens that come after those here."""
        lease = self._lease
        if lease.is_torn:  # a model asks for its mask at the start of a step
            self._group.roll_back()
        return create_attention_mask(*args, offset=lease.offset, **kwargs)
