"""The cache that keeps keys and values as they come."""

from __future__ import annotations

from typing import Any

from kvpool import _native
from kvpool._arrays import float32_numbers, float32_vector, like
from kvpool.cache.base import KVCache
from kvpool.memory._config import checked_int

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _format_of(dtype: Any) -> str:
    """``fp16`` for "fp16", "float16", mx.float16 or numpy.float16, and so on."""
    name = getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]
    return _DTYPES.get(name, name)


class ExactKVCache(KVCache):
    """Exact attention over keys and values kept in float32, float16 or bfloat16.

    What the quantised caches are measured against, and the cache to use where memory is no
    concern. Scores, softmax and sums are float32 whatever is kept. Memory grows by doubling.

    Args:
        head_dim: Numbers in a key and in a value, >= 1.
        dtype: How they are kept: "fp32", "fp16" or "bf16", or a numpy or MLX dtype.
        capacity: Tokens kept; from then on each new token overwrites the oldest. None: no limit.

    Raises:
        ValueError: An argument is out of range.
        TypeError: head_dim or capacity is no int.

    Arrays may be MLX, numpy or lists. Keys and values that are NaN, infinite or beyond the range of
    ``dtype`` are refused with a ValueError, as are a value without a key and a second key; nothing
    has changed then.
    """

    def __init__(self, head_dim: int, dtype: Any = "fp16", capacity: int | None = None) -> None:
        self._head_dim = checked_int("ExactKVCache", "head_dim", head_dim, 1)
        if capacity is not None:
            capacity = checked_int("ExactKVCache", "capacity", capacity, 1)
        self._capacity = capacity
        self._dtype = _format_of(dtype)
        self._native = _native.ExactKVCache(self._head_dim, self._dtype, capacity)

    @property
    def head_dim(self) -> int:
        """Numbers in a key, and in a value."""
        return self._head_dim

    @property
    def dtype(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return self._dtype

    @property
    def capacity(self) -> int | None:
        """The most tokens the cache holds, None where there is no limit."""
        return self._capacity

    def append_key(self, k: Any) -> None:
        """Takes the key of the next token, shape ``(head_dim,)``."""
        self._native.append_key(self._row("append_key", "k", k))

    def append_value(self, v: Any) -> None:
        """Takes the value that belongs to the last key, shape ``(head_dim,)``."""
        self._native.append_value(self._row("append_value", "v", v))

    def append(self, k: Any, v: Any) -> None:
        """Takes a token: its key and its value, ``(head_dim,)`` each, or neither.

        Raises:
            ValueError: A shape does not fit, or a key waits for its value.
            TypeError: Something else than numbers.
        """
        self._native.append(self._row("append", "k", k), self._row("append", "v", v))

    def discard_key(self) -> None:
        """Forgets a key whose value has not come."""
        self._native.discard_key()

    def attend(self, q: Any) -> Any:
        """Attention over the tokens: softmax(q . k / sqrt(head_dim)) times the values.

        Args:
            q: Query ``(head_dim,)``, or several, ``(n, head_dim)``.

        Returns:
            An array of q's shape and kind, with q's dtype where that is a float; zeros from an
            empty cache. A key whose value has not come takes no part.
        """
        query = float32_numbers("ExactKVCache::attend", "q", q)
        if query.ndim not in (1, 2) or query.shape[-1] != self._head_dim:
            raise ValueError(
                f"[ExactKVCache::attend] q must have shape ({self._head_dim},) or "
                f"(n, {self._head_dim}), got {query.shape}"
            )
        output = self._native.attend(query.reshape(-1, self._head_dim))
        return like(output.reshape(query.shape), q)

    def memory_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._native.memory_bytes()

    def reset(self) -> None:
        """Forgets every token and keeps the memory for the next ones."""
        self._native.reset()

    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first thing that does not add up. For tests."""
        self._native.check_invariants()

    def __len__(self) -> int:
        return len(self._native)

    def __repr__(self) -> str:
        limit = "" if self._capacity is None else f", capacity={self._capacity}"
        return (
            f"ExactKVCache(head_dim={self._head_dim}, dtype={self._dtype!r}{limit}, "
            f"tokens={len(self)})"
        )

    def _row(self, call: str, name: str, value: Any) -> Any:
        return float32_vector(f"ExactKVCache::{call}", name, value, self._head_dim)
