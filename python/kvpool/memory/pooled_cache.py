"""A pool's books around any cache of one head and one sequence."""

from __future__ import annotations

from typing import Any

from kvpool import _native
from kvpool.cache.base import KVCache
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator

__all__ = ["PooledKVCache"]

_NEEDED = ("append_key", "append_value", "attend", "memory_bytes", "reset", "__len__")


class PooledKVCache(KVCache):
    """Wraps a cache so that its tokens are charged to blocks of a shared pool.

    The wrapped cache keeps its own data in its own way; the pool keeps count. Keys and values are
    charged apart, a block of ``pool.config.block_size`` tokens at a time. The blocks held follow
    ``len(inner)``: where the wrapped cache forgets old tokens, their blocks go back.

    ``append`` is all or nothing: both blocks are checked out before the wrapped cache is touched,
    and go back if it refuses the pair. Running out of blocks never leaves a key without its value.

    The cache frees its own blocks and no others, so caches may share an owner, and gives them back
    when it is collected. After ``pool.free_all(owner)`` behind its back each use is a ValueError
    until ``release`` or ``reset``.

    Args:
        inner: Any object with ``append_key``, ``append_value``, ``attend``, ``memory_bytes``,
            ``reset`` and ``__len__`` (see ``kvpool.cache.KVCache``). Its attribute ``capacity``,
            where it has one, is the most tokens it holds.
        pool: The pool to draw on.
        owner: The request, any 64-bit int.
        format: Tag to record on each block.

    Raises:
        TypeError: ``inner`` lacks a method, or an argument is of the wrong type.
    """

    def __init__(
        self,
        inner: Any,
        pool: BlockPoolAllocator,
        owner: int = -1,
        format: str = "fp16",
    ) -> None:
        missing = [name for name in _NEEDED if not callable(getattr(inner, name, None))]
        if missing:
            raise TypeError(
                f"[PooledKVCache] inner must have {', '.join(_NEEDED)}, but "
                f"{type(inner).__name__} lacks {', '.join(missing)}"
            )
        if not isinstance(pool, BlockPoolAllocator):
            raise TypeError(
                f"[PooledKVCache] pool must be a BlockPoolAllocator, got {type(pool).__name__}"
            )
        self._inner = inner
        self._pool = pool
        self._lease = _native.StreamLease(pool, owner, format)
        self._format = format
        self._capacity = getattr(inner, "capacity", None)
        self._start_afresh()

    def _start_afresh(self) -> None:
        # Keys less values that the inner cache has taken through this wrapper.
        self._unpaired = 0
        # The inner cache has a key of append() whose value it refused.
        self._torn = False
        # The length at which the inner cache took a token without growing, while it stays there.
        self._full_at: int | None = None
        # The inner cache's length when the present pair began.
        self._length_before = 0

    @property
    def inner(self) -> Any:
        """The wrapped cache."""
        return self._inner

    @property
    def pool(self) -> BlockPoolAllocator:
        """The pool that is charged."""
        return self._pool

    @property
    def owner(self) -> int:
        """Whom the blocks belong to."""
        return self._lease.owner

    @property
    def format(self) -> str:
        """The format that its blocks are marked with."""
        return self._format

    def append_key(self, k: Any) -> None:
        """Checks out a K block if the last one is full, then appends to the wrapped cache.

        Raises:
            BlockPoolExhaustedError: No block is left; the wrapped cache was not touched.
        """
        self._refuse_torn("append_key")
        keys, values = self._charged()
        self._lease.resize(self._one_more(keys), values)
        try:
            self._inner.append_key(k)
        except BaseException:
            self._lease.resize(keys, values)
            raise
        self._unpaired += 1
        self._settle()

    def append_value(self, v: Any) -> None:
        """Checks out a V block if the last one is full, then appends to the wrapped cache.

        Raises:
            BlockPoolExhaustedError: No block is left; the wrapped cache was not touched.
        """
        keys, values = self._charged()
        self._lease.resize(keys, self._one_more(values))
        try:
            self._inner.append_value(v)
        except BaseException:
            self._lease.resize(keys, values)
            raise
        self._torn = False
        self._unpaired -= 1
        self._settle()

    def append(self, k: Any, v: Any) -> None:
        """Appends a token, or nothing.

        Where the wrapped cache takes the key, refuses the value and has no ``discard_key``, it
        keeps the key: ``append_value`` a good value then, or ``reset``; other appends are a
        ValueError.

        Raises:
            BlockPoolExhaustedError: A block is missing; the wrapped cache was not touched.
            ValueError: The last key has no value yet.
        """
        self._refuse_torn("append")
        if self._unpaired != 0:
            raise ValueError("[PooledKVCache::append] the last key and value are not a pair yet")
        keys, values = self._charged()
        self._lease.resize(self._one_more(keys), self._one_more(values))
        try:
            self._inner.append_key(k)
        except BaseException:
            self._lease.resize(keys, values)
            raise
        try:
            self._inner.append_value(v)
        except BaseException:
            discard = getattr(self._inner, "discard_key", None)
            if callable(discard):
                discard()
                self._lease.resize(keys, values)
            else:
                self._torn = True
                self._unpaired = 1
                self._lease.resize(self._one_more(keys), values)
            raise
        self._settle()

    def attend(self, q: Any) -> Any:
        """Attention by the wrapped cache: query in, output out, both ``(head_dim,)``."""
        self._lease.verify()
        return self._inner.attend(q)

    def memory_bytes(self) -> int:
        """Bytes that the wrapped cache takes."""
        return self._inner.memory_bytes()

    def n_blocks_held(self) -> int:
        """K and V blocks checked out to this cache."""
        return self._lease.n_blocks

    def release(self) -> None:
        """Gives every block back and empties the wrapped cache."""
        self._lease.release()
        self._start_afresh()
        self._inner.reset()

    def reset(self) -> None:
        """The same as ``release``: the cache is empty and holds no block."""
        self.release()

    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first thing that does not add up. For tests."""
        self._lease.check_invariants()
        unpaired = self._lease.n_keys - self._lease.n_values
        if self._full_at is None and self._lease.n_blocks and unpaired != self._unpaired:
            raise RuntimeError("[PooledKVCache] keys and values charged do not match the appends")

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return (
            f"PooledKVCache(inner={type(self._inner).__name__}, owner={self.owner}, "
            f"blocks={self.n_blocks_held()})"
        )

    def _refuse_torn(self, call: str) -> None:
        if self._torn:
            raise ValueError(
                f"[PooledKVCache::{call}] the wrapped cache holds a key whose value it refused: "
                "append_value it, or reset"
            )

    def _charged(self) -> tuple[int, int]:
        """Keys and values that have to be charged before the next one comes.

        Between pairs that is what the wrapped cache holds, also where it was changed without this
        wrapper.
        """
        if self._unpaired != 0:
            return self._lease.n_keys, self._lease.n_values
        length = self._length_before = len(self._inner)
        if length != self._full_at:
            self._full_at = None
        return length, length

    def _one_more(self, n: int) -> int:
        """What to charge for one token more than ``n``: no more than a full cache holds."""
        return n if n == self._full_at or n == self._capacity else n + 1

    def _settle(self) -> None:
        """Follows the wrapped cache once its keys and values are paired."""
        if self._unpaired != 0:
            return
        length = len(self._inner)
        self._full_at = length if 0 < length == self._length_before else None
        if length == self._lease.n_keys == self._lease.n_values:
            return
        try:  # noqa: SIM105
            self._lease.resize(length, length)
        except BlockPoolExhaustedError:
            # The wrapped cache grew by more than the token it was given. That cannot be undone; the
            # next append charges it before it touches anything.
            pass
