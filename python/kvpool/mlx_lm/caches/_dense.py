"""DenseLayerCache: a pooled cache that keeps keys and values as they come."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvpool import _native
from kvpool.mlx_lm.caches._arguments import checked_fit, format_name
from kvpool.mlx_lm.caches._linear import LinearLayerCache


class DenseLayerCache(LinearLayerCache):
    """What caches of one sequence and of a batch share: unquantised buffers, growth at the end."""

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
        if not self._known_to_fit(keys, values):
            self._check_fit(keys, values)
        batch, _, n_tokens, _ = keys.shape
        if n_tokens == 0:
            return (keys, values) if self._keys is None else self.keys_and_values()
        start, rows = self._advance(batch, n_tokens)
        end = start + n_tokens
        if rows != self._rows:
            self._grow(rows, start, keys, values)
        else:
            self._keys[:, :, start:end] = keys
            self._values[:, :, start:end] = values
        self._lease.commit()
        return self._keys[:, :, :end], self._values[:, :, :end]

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
            parts = [] if buffer is None else [buffer[:, :, :start]]
            parts.append(new)
            if spare > 0:
                # A broadcast zero: the spare rows are written once, in the new buffer.
                zero = mx.array(0, new.dtype)
                parts.append(mx.broadcast_to(zero, (*new.shape[:2], spare, new.shape[3])))
            grown.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else new[...])
        self._keys, self._values, self._rows = *grown, rows
        if (self._keys.dtype, self._values.dtype) != dtypes:
            self._tag(self._lease)
