"""AllocationStats made by hand: the dataclass that dashboards and tests build."""

from __future__ import annotations

import pickle

import pytest
from kvpool.memory import AllocationStats


def test_constructor_has_the_published_arguments_in_order() -> None:
    stats = AllocationStats(10, 7, 3, 2, 1, 4, 5, 6, 8, 9)
    assert (stats.n_blocks, stats.n_allocations, stats.n_frees, stats.n_reused) == (10, 7, 3, 2)
    assert (stats.n_exhausted, stats.n_grown, stats.n_retired) == (1, 4, 5)
    assert (stats.peak_blocks_in_use, stats._fragmented_count) == (6, 8)
    assert AllocationStats(n_blocks=3) == AllocationStats(3, 0, 0, 0, 0, 0, 0, 0, 0)


def test_derived_figures() -> None:
    stats = AllocationStats(n_blocks=10, n_allocations=7, n_frees=3, _fragmented_count=2)
    assert (stats.blocks_in_use(), stats.fragmentation(), stats.unused_slots()) == (4, 0.2, 0)
    assert AllocationStats(0, _fragmented_count=2).fragmentation() == 0.0


def test_snapshot_is_independent() -> None:
    stats = AllocationStats(10)
    snapshot = stats.snapshot()
    stats.n_frees = 4
    assert snapshot == AllocationStats(10)
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert stats.to_prometheus("p").endswith("p_unused_slots 0\n")


def test_any_numbers_render() -> None:
    assert "p_fragmentation -0.125000\n" in AllocationStats(8, _fragmented_count=-1).to_prometheus(
        "p"
    )
    with pytest.raises(
        TypeError, match=r"^\[AllocationStats::to_prometheus\] prefix must be a str"
    ):
        AllocationStats(8).to_prometheus(None)
