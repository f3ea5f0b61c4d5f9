"""PoolBackedKVCache: mlx-lm's plain KV cache, its growth charged to a block pool."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvpool import _native
from kvpool.caches._arguments import checked_buffers, checked_fit, format_name
from kvpool.caches._group import CacheGroup
from kvpool.caches._linear import LinearLayerCache
from kvpool.caches.quantized_kv_cache import PoolBackedQuantizedKVCache
from kvpool.memory.block_pool import BlockPoolAllocator


class PoolBackedKVCache(LinearLayerCache):
    """A drop-in replacement for ``mlx_lm.models.cache.KVCache`` that a pool keeps the books of.

    Keys and values lie in contiguous buffers, as attention over MLX ops needs them. The pool is
    charged for exactly what the buffers hold: ``batch * ceil(rows / block_size)`` blocks of keys
    and as many of values, with ``n_used`` of each block following the tokens. A cache that is
    collected gives its blocks back; ``release`` does it sooner.

    Caches made by ``build_pooled_caches`` are a group: see there.

    Args:
        pool: The pool to draw on.
        owner: Whom the blocks belong to. A cache frees its own blocks only, so caches may share an
            owner.
        step: Rows to grow by, exactly. By default buffers grow by half again, rounded up to
            ``max(block_size, 256)`` rows, so that copies stay few, and by less where the pool is
            short, down to single blocks.

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``step`` is below 1, or ``owner`` does not fit 64 bits.
    """

    def __init__(self, pool: BlockPoolAllocator, owner: int = -1, step: int | None = None) -> None:
        self._start(pool, owner, step)

    @classmethod
    def _member(cls, group: CacheGroup, step: int | None) -> PoolBackedKVCache:
        cache = cls.__new__(cls)
        cache._step = step
        cache._clear()
        cache._join(group)
        return cache

    def _tag(self, lease: _native.LayerLease) -> None:
        if self._keys is not None and self._values is not None:
            lease.set_formats(format_name(self._keys.dtype), format_name(self._values.dtype))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens and returns all that there are.

        Args:
            keys: New keys, (batch, heads, tokens, key dims).
            values: New values, (batch, heads, tokens, value dims).

        Returns:
            The keys and the values so far, (batch, heads, offset, dims) each.

        Raises:
            BlockPoolExhaustedError: The tokens do not fit; no cache of the group has moved where
                this is the first that would have. ``tokens_that_fit`` says how many do.
            ValueError: A shape does not fit, or the blocks were freed behind the cache
                (``pool.free_all``). Nothing has changed.
            TypeError: Something else than arrays.
        """
        # Decoding runs through here once a layer and token: the shapes are compared with those of
        # the last call, and checked where they differ.
        try:
            known = (keys.shape, values.shape) == self._fitting
        except AttributeError:
            known = False
        if not known:
            self._check_fit(keys, values)
        batch, _, n_tokens, _ = keys.shape
        if n_tokens == 0:
            return (keys, values) if self._keys is None else self.keys_and_values()
        start = self._advance(batch, n_tokens)
        end = start + n_tokens
        if end > self._rows:
            self._grow(self._lease.rows, start, keys, values)
        else:
            self._keys[..., start:end, :] = keys
            self._values[..., start:end, :] = values
        return self._keys[..., :end, :], self._values[..., :end, :]

    def _check_fit(self, keys: Any, values: Any) -> None:
        self._check_new(keys, values)
        for name, new, old in (("keys", keys, self._keys), ("values", values, self._values)):
            checked_fit(self._where("update_and_fetch"), name, new, old)
        self._fitting = keys.shape, values.shape

    def _grow(self, rows: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Longer buffers of ``rows`` rows, with the new tokens at ``start`` in them."""
        spare = rows - start - keys.shape[2]
        dtypes = None if self._keys is None else (self._keys.dtype, self._values.dtype)
        grown = []
        for buffer, new in ((self._keys, keys), (self._values, values)):
            parts = [] if buffer is None else [buffer[..., :start, :]]
            parts.append(new)
            if spare > 0:
                # A broadcast zero: the spare rows are written once, in the new buffer.
                zero = mx.array(0, new.dtype)
                parts.append(mx.broadcast_to(zero, (*new.shape[:2], spare, new.shape[3])))
            grown.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else new[...])
        self._keys, self._values, self._rows = *grown, rows
        if (self._keys.dtype, self._values.dtype) != dtypes:
            self._tag(self._lease)

    @property
    def state(self) -> tuple[Any, Any, int]:
        """``(keys, values, offset)``, cut to the offset; ``(None, None, 0)`` while empty.

        The setter takes two or three of them and charges the pool for the new buffers.
        """
        return *self.keys_and_values(), self._lease.offset

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        if not isinstance(state, (tuple, list)) or len(state) not in (2, 3):
            raise ValueError(f"[{where}] must be (keys, values) or (keys, values, offset)")
        keys, values, *offset = state
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
        self._place(keys, values, offset[0] if offset else None, where)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PoolBackedQuantizedKVCache:
        """A quantised cache with the same tokens that takes this one's place in its group.

        It is charged on its own, for as many blocks; this cache keeps its own until it is dropped.
        Where the pool is too full for both, the blocks pass on and this cache is empty.
        """
        self._settle()
        return PoolBackedQuantizedKVCache._of(self, group_size, bits)
