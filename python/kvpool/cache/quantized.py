"""The cache that keeps keys and values quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import _native
from kvpool._arrays import float32_numbers, float32_vector, is_bfloat16, like
from kvpool.cache.base import KVCache
from kvpool.cache.config import KVCacheConfig, native_arguments, precision_of
from kvpool.core.exceptions import QuantizerConfigError

__all__ = ["QuantizedKVCache"]

_AXES = (1, 3, 4)

Calibration = tuple[Any, Any, Any, Any, Any, Any]


def make_native_method(config: KVCacheConfig, **changes: Any) -> _native.Method:
    """The method that ``config`` describes. Raises QuantizerConfigError."""
    arguments = {"spectral_calibration": None, **native_arguments(config), **changes}
    try:
        return _native.Method(arguments.pop("method"), **arguments)
    except ValueError as error:
        raise QuantizerConfigError(str(error)) from None


class QuantizedKVCache(KVCache):
    """Keys and values as packed codes of one of ``kvpool.cache.METHODS``, attended where they lie.

    A token at a time through ``append_key``, ``append_value`` and ``attend``, as every ``KVCache``;
    or many tokens of many heads and sequences through ``append`` and ``attend``. Scores, softmax
    and sums are float32. Memory grows as tokens come and ``memory_bytes()`` is what they take.

    Made by ``KVCacheFactory.create`` or ``KVCacheBuilder``. Arrays may be MLX, numpy or lists.
    Numbers that are NaN or infinite are refused with a ValueError, as are a value without a key and
    a second key; nothing has changed then.

    Raises:
        QuantizerConfigError: The config cannot work.
    """

    def __init__(self, config: KVCacheConfig, *, method: _native.Method | None = None) -> None:
        """``method``, where given, was made from an equal config: layers of a model share one."""
        self._config = config
        self._method = method or make_native_method(config)
        self._native = _native.QuantizedKVCache(self._method)
        self._arguments = native_arguments(config)
        self._head_dim: int = self._arguments["head_dim"]
        self._calibration: tuple[Any, Any, int, int] | None = None
        # The first token decides what exact ones are kept in, unless the config does.
        self._first_decides = self._precision_is_open = precision_of(config.dtype) is None

    @property
    def config(self) -> KVCacheConfig:
        """What the cache was built from."""
        return self._config

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self._arguments["method"])

    @property
    def head_dim(self) -> int:
        """Numbers in a key, and in a value."""
        return self._head_dim

    @property
    def capacity(self) -> int | None:
        """The most tokens the cache holds, None where there is no limit."""
        return self._arguments["capacity"]

    @property
    def offset(self) -> int:
        """Tokens appended since the last reset, those that were overwritten among them."""
        return self._native.offset

    @property
    def n_exact(self) -> int:
        """Newest tokens that are held as they came, not as codes."""
        return self._native.n_exact

    def append_key(self, k: Any) -> None:
        """Takes the key of the next token, shape ``(head_dim,)``."""
        row = self._row("append_key", "k", k)
        self._choose_precision(k)
        self._native.append_key(row)

    def append_value(self, v: Any) -> None:
        """Takes the value that belongs to the last key, shape ``(head_dim,)``."""
        self._native.append_value(self._row("append_value", "v", v))

    def append(self, k: Any, v: Any) -> None:
        """Takes tokens: keys and values of one shape, all of them or none.

        Args:
            k: Keys: ``(head_dim,)`` of a token, ``(n_kv_heads, n_tokens, head_dim)`` or ``(batch,
                n_kv_heads, n_tokens, head_dim)``.
            v: Values, shaped as the keys.

        Raises:
            ValueError: The shapes are not those of the tokens held, or a number is not finite.
        """
        keys = self._heads("append", "k", k)
        values = self._heads("append", "v", v)
        if keys.shape != values.shape:
            raise ValueError(
                f"[QuantizedKVCache::append] k and v must have one shape, "
                f"got {np.shape(k)} and {np.shape(v)}"
            )
        self._choose_precision(k)
        self._native.append(keys, values)

    def discard_key(self) -> None:
        """Forgets a key whose value has not come."""
        self._native.discard_key()

    def attend(
        self, q: Any, *, causal_offset: int | None = None, scale: float | None = None
    ) -> Any:
        """Attention over the tokens: softmax(scale * q . k) times the values.

        Args:
            q: Query ``(head_dim,)``, ``(n_heads, n_queries, head_dim)`` or ``(batch, n_heads,
                n_queries, head_dim)``. ``n_heads`` is a multiple of the keys' heads; those that
                share keys lie next to each other.
            causal_offset: Query i sees the tokens up to position ``causal_offset + i``, counted as
                ``offset`` does. None: every token.
            scale: None: 1 / sqrt(head_dim).

        Returns:
            An array of q's shape and kind, with q's dtype where that is a float; zeros where a
            query sees no token. A key whose value has not come takes no part.
        """
        queries = self._heads("attend", "q", q)
        output = self._native.attend(queries, causal_offset, scale)
        return like(output.reshape(np.shape(q)), q)

    def calibrate(self, calibration: Calibration) -> None:
        """Gives spectral its basis; see ``spectral_calibration``.

        Args:
            calibration: ``(key_U, val_U, key_ev, val_ev, key_ds, val_ds)``: eigenvectors of the
                covariance of keys and of values as columns, most variance first, ``(head_dim,
                head_dim)``; their eigenvalues; and how many carry the signal, None to count them
                by the participation ratio of the eigenvalues.

        Raises:
            ValueError: The method is another one, or the cache holds tokens.
            QuantizerConfigError: The shapes do not fit.
        """
        if self.method != "spectral":
            raise ValueError(
                f"[QuantizedKVCache::calibrate] is for spectral, this cache is {self.method}"
            )
        if self.offset > 0 or self._native.has_pending_key:
            raise ValueError("[QuantizedKVCache::calibrate] needs an empty cache")
        key_vectors, value_vectors, key_variances, value_variances, key_dims, value_dims = (
            calibration
        )
        self._calibration = (
            float32_numbers("QuantizedKVCache::calibrate", "key_U", key_vectors),
            float32_numbers("QuantizedKVCache::calibrate", "val_U", value_vectors),
            self._signal_dims(key_dims, key_variances),
            self._signal_dims(value_dims, value_variances),
        )
        self._remake(spectral_calibration=self._calibration)

    def memory_bytes(self) -> int:
        """Bytes allocated for the tokens."""
        return self._native.memory_bytes()

    def constant_bytes(self) -> int:
        """Bytes of rotations and projections, which caches of one method share."""
        return self._method.constant_bytes()

    def reset(self) -> None:
        """Forgets every token and gives the memory back. The next token may be of another shape."""
        self._native.reset()
        self._precision_is_open = self._first_decides

    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first thing that does not add up. For tests."""
        self._native.check_invariants()

    def __len__(self) -> int:
        return len(self._native)

    def __repr__(self) -> str:
        return (
            f"QuantizedKVCache(method={self.method!r}, head_dim={self._head_dim}, "
            f"bits={self._arguments['bit_width_inlier']}, tokens={len(self)})"
        )

    def _signal_dims(self, given: Any, variances: Any) -> int:
        if given is not None:
            return int(given)
        values = np.maximum(np.asarray(variances, np.float64), 0)
        ratio = values.sum() ** 2 / max(float(np.square(values).sum()), 1e-300)
        return int(min(max(np.ceil(ratio), 1), self._head_dim - 1))

    def _remake(self, **changes: Any) -> None:
        self._method = make_native_method(self._config, **changes)
        self._native = _native.QuantizedKVCache(self._method)

    def _choose_precision(self, first: Any) -> None:
        """Exact tokens are kept in bfloat16 where the first one is: half floats end sooner."""
        if not self._precision_is_open:
            return
        wanted = "bf16" if is_bfloat16(first) else "fp16"
        if wanted != self._arguments["precision"]:
            self._remake(spectral_calibration=self._calibration, precision=wanted)
            self._arguments["precision"] = wanted
        self._precision_is_open = False

    def _row(self, call: str, name: str, value: Any) -> npt.NDArray[np.float32]:
        return float32_vector(f"QuantizedKVCache::{call}", name, value, self._head_dim)

    def _heads(self, call: str, name: str, value: Any) -> npt.NDArray[np.float32]:
        """As (batch, n_heads, n_tokens, head_dim)."""
        numbers = float32_numbers(f"QuantizedKVCache::{call}", name, value)
        if numbers.ndim not in _AXES or numbers.shape[-1] != self._head_dim:
            raise ValueError(
                f"[QuantizedKVCache::{call}] {name} must have shape (head_dim,), (n_heads, n, "
                f"head_dim) or (batch, n_heads, n, head_dim) with head_dim {self._head_dim}, "
                f"got {numbers.shape}"
            )
        return numbers.reshape((1,) * (4 - numbers.ndim) + numbers.shape)


def spectral_calibration(keys: Any, values: Any) -> Calibration:
    """What ``QuantizedKVCache.calibrate`` takes, from calibration data.

    Args:
        keys: ``(..., head_dim)``, as many as there are; at least some times head_dim.
        values: The same.

    Returns:
        Eigenvectors of both covariances (about zero, since scores are), most variance first, their
        eigenvalues, and None for the signal's size, which ``calibrate`` then counts.
    """
    bases: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    for name, data in (("keys", keys), ("values", values)):
        rows = float32_numbers("spectral_calibration", name, data)
        rows = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
        variances, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
        bases.append((vectors[:, ::-1], variances[::-1]))
    (key_vectors, key_variances), (value_vectors, value_variances) = bases
    return key_vectors, value_vectors, key_variances, value_variances, None, None


def shared_caches(config: KVCacheConfig, n: int) -> Sequence[QuantizedKVCache]:
    """``n`` caches that share the rotations and codebooks of one method."""
    method = make_native_method(config)
    return [QuantizedKVCache(config, method=method) for _ in range(n)]
