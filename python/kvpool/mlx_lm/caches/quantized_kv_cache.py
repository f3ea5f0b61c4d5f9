"""PoolBackedQuantizedKVCache: what a pooled cache becomes when mlx-lm quantises it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from kvpool import _native
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_fit, checked_int, checked_quantized
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches._linear import LinearLayerCache

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches.kv_cache import PoolBackedKVCache

Quantized = tuple[mx.array, mx.array, mx.array]


def attends_wrongly() -> bool:
    """Whether mlx-lm's attention over quantised caches is known to be wrong here (docs/gpu.md)."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and hasattr(mx, "cuda") and mx.cuda.is_available()


def warn_of_cuda() -> None:
    """Warns where ``attends_wrongly``. However quantised caches come, by ``to_quantized``, from
    a file or by hand, they pass here before a model attends over them."""
    if attends_wrongly():
        warnings.warn(
            "mlx-lm's attention over quantised caches is wrong for grouped queries on CUDA in MLX "
            "0.32.4; a paged cache with int8 or int4 pages is right",
            RuntimeWarning,
            stacklevel=3,
        )


def _checked_widths(where: str, group_size: Any, bits: Any) -> tuple[int, int]:
    """Both as ints that ``mx.quantize`` takes."""
    for name, value, known in (
        ("group_size", group_size, (32, 64, 128)),
        ("bits", bits, (2, 3, 4, 5, 6, 8)),
    ):
        if checked_int(where, name, value, 1) not in known:
            raise ValueError(f"[{where}] {name} must be one of {known}, got {value}")
    return int(group_size), int(bits)


class PoolBackedQuantizedKVCache(LinearLayerCache, QuantizedKVCache):
    """A layer's keys and values as MLX quantises them, charged to a pool.

    ``keys`` and ``values`` are tuples (codes, scales, biases) of arrays (batch, heads, rows, n). A
    block stands for ``block_size`` tokens here as everywhere; its format names the width of the
    codes ("int8", "int4", ...). Made by ``PoolBackedKVCache.to_quantized``.

    Args:
        pool, owner, step: As for ``PoolBackedKVCache``.
        group_size: Numbers that share a scale: 32, 64 or 128.
        bits: Width of a code: 2, 3, 4, 5, 6 or 8.

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``group_size`` or ``bits`` is none of MLX's, ``step`` is below 1, or ``owner``
            does not fit 64 bits.
    """

    _state_parts = ("keys", "values", "offset", "group_size", "bits")

    def __init__(
        self,
        pool: BlockPoolAllocator,
        owner: int = -1,
        step: int | None = None,
        *,
        group_size: int = 64,
        bits: int = 8,
    ) -> None:
        self.group_size, self.bits = _checked_widths(type(self).__name__, group_size, bits)
        self._start(pool, owner, step)
        self._tag(self._lease)

    @classmethod
    def _of(
        cls, plain: PoolBackedKVCache, group_size: int, bits: int
    ) -> PoolBackedQuantizedKVCache:
        where = plain._where("to_quantized")
        cache = cls.__new__(cls)
        cache.group_size, cache.bits = _checked_widths(where, group_size, bits)
        cache._step = plain._step
        cache._clear()
        if plain._keys is not None:
            cache._keys, cache._values = (
                cache._quantize(plain._keys),
                cache._quantize(plain._values),
            )
            cache._rows = plain._rows
        group = plain._group
        lease = plain._lease.supersede(cache._growth(group.pool), f"int{bits}")
        group.discard(plain)
        cache._join(group, lease)
        if plain._lease.rows == 0:
            plain._clear()
        plain._join(CacheGroup(group.pool, group.owner, plain._lease.group), plain._lease)
        return cache

    def _quantize(self, array: mx.array) -> Quantized:
        codes, scales, biases = mx.quantize(array, group_size=self.group_size, bits=self.bits)
        return codes, scales, biases

    @staticmethod
    def _each(function: Callable[[mx.array], mx.array], buffer: Any) -> Any:
        return tuple(function(array) for array in buffer)

    @staticmethod
    def _sizes(buffer: Any) -> tuple[int, int]:
        return buffer[0].shape[0], buffer[0].shape[2]

    def _tag(self, lease: _native.LayerLease) -> None:
        lease.set_formats(f"int{self.bits}", f"int{self.bits}")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Appends tokens, quantised, and returns all that there are, (codes, scales, biases) each.

        Takes and raises what ``PoolBackedKVCache.update_and_fetch`` does. Warns as
        ``PoolBackedKVCache.to_quantized`` does.
        """
        known = self._known_to_fit(keys, values)
        if not known:
            warn_of_cuda()
            self._check_new(keys, values)
        new_keys, new_values = self._quantize(keys), self._quantize(values)
        if not known:
            self._check_fit("keys", new_keys, self._keys)
            self._check_fit("values", new_values, self._values)
            self._fitting = keys.shape, values.shape
        batch, _, n_tokens, _ = keys.shape
        if n_tokens == 0:
            return (new_keys, new_values) if self._keys is None else self.keys_and_values()
        start, rows = self._advance(batch, n_tokens)
        end = start + n_tokens
        if rows != self._rows:
            grown_keys = self._grown(self._keys, new_keys, start, rows - end)
            grown_values = self._grown(self._values, new_values, start, rows - end)
            self._keys, self._values, self._rows = grown_keys, grown_values, rows
        else:
            for buffer, new in ((self._keys, new_keys), (self._values, new_values)):
                for array, part in zip(buffer, new, strict=True):
                    array[:, :, start:end] = part
        self._lease.commit()
        return self.keys_and_values()

    def _check_fit(self, name: str, new: Quantized, old: Any) -> None:
        if old is not None:
            for part, array in zip(new, old, strict=True):
                checked_fit(self._where("update_and_fetch"), f"quantised {name}", part, array)

    @staticmethod
    def _grown(buffer: Any, new: Quantized, start: int, spare: int) -> Quantized:
        grown = []
        for i, part in enumerate(new):
            parts = [] if buffer is None else [buffer[i][:, :, :start]]
            parts.append(part)
            if spare > 0:
                parts.append(mx.zeros((*part.shape[:2], spare, part.shape[3]), part.dtype))
            grown.append(mx.concatenate(parts, axis=2))
        codes, scales, biases = grown
        return codes, scales, biases

    @property
    def state(self) -> tuple[Any, Any, int, int, int]:
        """``(keys, values, offset, group_size, bits)``, cut to the offset."""
        return *self.keys_and_values(), self._lease.offset, self.group_size, self.bits

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        keys, values, offset, group_size, bits = self._parts_of(state)
        group_size, bits = _checked_widths(where, group_size, bits)
        if keys is not None or values is not None:
            checked_quantized(where, keys, values)
        before = {name: vars(self).get(name) for name in ("group_size", "bits")}
        self.group_size, self.bits = group_size, bits
        try:
            self._place(keys, values, offset, where)
        except BaseException:
            self.__dict__.update(before)
            raise
