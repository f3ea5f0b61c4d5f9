"""The block pool: configuration, blocks, statistics and the allocator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from kvpool import _native
from kvpool._native import Block
from kvpool.memory._config import DEFAULT_BLOCK_SIZE, PoolConfig
from kvpool.memory._stats import AllocationStats, LiveStats, summary

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_HISTORY_SIZE",
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "PoolConfig",
]

DEFAULT_HISTORY_SIZE = 256


class BlockPoolAllocator(_native.BlockPool):
    """Hands out fixed-size blocks of token slots for KV caches and keeps the books.

    A block belongs to one owner (a request or sequence), or to more after ``fork``, and returns to
    its free list with the last reference. Free lists are stacks: the block freed last is handed out
    first. With ``PoolConfig.separate_kv`` keys and values draw on lists of their own.

    Keeps books, not bytes: ``MLXBlockStorage`` pairs a pool with arrays. Blocks keep their pool
    alive, so do not store a pool's blocks in the pool itself: such a circle is never collected.

    Every call is atomic and may be made from any thread, from a signal handler, from a finaliser
    and in a forked child. A call that raises has changed nothing. Owners are 64-bit ints.

        pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
        blocks = pool.allocate("k", n_tokens=40, owner=1)
        pool.mark_used(blocks[-1], 9)
        pool.free_all(owner=1)

    Args:
        config: Sizing and behaviour, ``PoolConfig()`` where None. Kept as ``pool.config``; its
            fields are fixed from now on.

    Raises:
        TypeError: ``config`` is no PoolConfig, or a field of it has the wrong type.
        ValueError: A field of ``config`` is out of range.
    """

    def __init__(self, config: PoolConfig | None = None) -> None:
        if config is None:
            config = PoolConfig()
        if not isinstance(config, PoolConfig):
            raise TypeError(f"[BlockPoolAllocator] config must be a PoolConfig, got {config!r}")
        config._check()
        super().__init__(
            config.block_size,
            config.n_blocks,
            config.separate_kv,
            config.grow_on_exhaustion,
            config.max_blocks,
        )
        config._adopt()
        self._config = config
        self._stats = LiveStats(self._stats_reader())

    @property
    def config(self) -> PoolConfig:
        """The config that the pool was made with, the very object."""
        return self._config

    @property
    def stats(self) -> AllocationStats:
        """The counters, live and read-only: each read asks the pool. Always the same object."""
        return self._stats

    @property
    def history(self) -> deque[AllocationStats]:
        """A new deque of the last 256 snapshots, oldest first.

        The pool takes one at the end of every allocation and reservation, met or not, every
        ``free`` and ``free_all``, and every ``shrink`` that retired a block.
        """
        rows = self._history()
        return deque((AllocationStats(*row) for row in rows), maxlen=DEFAULT_HISTORY_SIZE)

    def __repr__(self) -> str:
        return f"BlockPoolAllocator({summary(self._stats.snapshot())})"

    def __copy__(self) -> NoReturn:
        raise TypeError("[BlockPoolAllocator] a pool cannot be copied: blocks belong to one pool")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("[BlockPoolAllocator] a pool cannot be pickled: it lives in one process")


@dataclass
class _BlockFields:
    block_id: int
    stream: str = "kv"
    format: str = "fp16"
    n_used: int = 0
    owner: int | None = None
    ever_allocated: bool = False


# Block is a bare type for speed; dataclasses.asdict, fields and replace take it all the same.
Block.__dataclass_fields__ = _BlockFields.__dataclass_fields__
Block.__match_args__ = _BlockFields.__match_args__  # type: ignore[misc]
Block.__annotations__ = _BlockFields.__annotations__
for _public in (AllocationStats, Block, PoolConfig):
    _public.__module__ = __name__
