"""AllocationStats: the counters of a pool, as values and as a live view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NoReturn

from kvpool import _native

Row = tuple[int, int, int, int, int, int, int, int, int, int]


@dataclass(repr=False)
class AllocationStats:
    """Counters and gauges of a ``BlockPoolAllocator``.

    Cumulative since the pool was made unless noted. They count blocks, not calls, and only blocks
    that really leave or re-enter a free list.

    Attributes:
        n_blocks: Blocks managed now, over all streams.
        n_allocations: Blocks handed out.
        n_frees: Blocks that came back.
        n_reused: Blocks handed out that had been handed out before.
        n_exhausted: Calls that failed because too few blocks were free.
        n_grown: Blocks that growth added (see ``PoolConfig.grow_on_exhaustion``).
        n_retired: Blocks that ``shrink`` removed.
        peak_blocks_in_use: The most blocks in use at any time.
    """

    n_blocks: int
    n_allocations: int = 0
    n_frees: int = 0
    n_reused: int = 0
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0
    peak_blocks_in_use: int = 0
    _fragmented_count: int = 0
    _unused_slot_count: int = 0

    def blocks_in_use(self) -> int:
        """Blocks in use now."""
        return self.n_allocations - self.n_frees

    def fragmentation(self) -> float:
        """Blocks that are partly filled (0 < n_used < block_size), as a share of the managed ones.

        0.0 for a pool without blocks.
        """
        return self._fragmented_count / self.n_blocks if self.n_blocks else 0.0

    def unused_slots(self) -> int:
        """Token slots of the blocks in use that hold no token."""
        return self._unused_slot_count

    def snapshot(self) -> AllocationStats:
        """An independent copy, all counters of one moment."""
        return AllocationStats(*_row(self))

    def to_prometheus(self, prefix: str = "veloxquant_block_pool") -> str:
        """The stats in the Prometheus text exposition format, newline at the end.

        The default prefix is the one under which existing dashboards look for these metrics.

        Raises:
            ValueError: ``prefix`` is no metric name.
            TypeError: ``prefix`` is no str.
        """
        if not isinstance(prefix, str):
            raise TypeError(
                f"[AllocationStats::to_prometheus] prefix must be a str, got {prefix!r}"
            )
        return _native.to_prometheus(_row(self), prefix)

    def __repr__(self) -> str:
        return f"AllocationStats({summary(self)})"


class LiveStats(AllocationStats):
    """The stats of a pool as they are when read. ``snapshot()`` reads all at one moment."""

    _read: Callable[[], Row]

    def __init__(self, read: Callable[[], Row]) -> None:
        self.__dict__["_read"] = read

    def snapshot(self) -> AllocationStats:
        return AllocationStats(*self._read())

    def blocks_in_use(self) -> int:
        return self.snapshot().blocks_in_use()

    def fragmentation(self) -> float:
        return self.snapshot().fragmentation()

    def to_prometheus(self, prefix: str = "veloxquant_block_pool") -> str:
        return self.snapshot().to_prometheus(prefix)

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LiveStats):
            other = other.snapshot()
        return self.snapshot() == other

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"[AllocationStats] {name} of a pool's stats is read-only: the pool keeps it"
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[type[AllocationStats], Row]:
        """A copy or pickle is a snapshot."""
        return AllocationStats, self._read()


def _live(index: int) -> property:
    return property(lambda self: self._read()[index])


_NAMES = tuple(field.name for field in fields(AllocationStats))
for _index, _name in enumerate(_NAMES):
    setattr(LiveStats, _name, _live(_index))


def _row(stats: AllocationStats) -> Row:
    return tuple(getattr(stats, name) for name in _NAMES)


def summary(stats: AllocationStats) -> str:
    """The counters as both reprs show them."""
    return (
        f"in_use={stats.blocks_in_use()}/{stats.n_blocks}, allocations={stats.n_allocations}, "
        f"frees={stats.n_frees}, reused={stats.n_reused}, exhausted={stats.n_exhausted}, "
        f"grown={stats.n_grown}, retired={stats.n_retired}, peak={stats.peak_blocks_in_use}, "
        f"fragmentation={stats.fragmentation():.3f}"
    )
