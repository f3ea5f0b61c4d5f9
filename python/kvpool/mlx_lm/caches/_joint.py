"""Charging the layers of several requests together: what merging and extending batches share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_pool
from kvpool.mlx_lm.caches._group import CacheGroup

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches._layer import PooledLayerCache


def shared_pool(where: str, caches: Iterable[PooledLayerCache]) -> BlockPoolAllocator:
    """The one pool that all of ``caches`` are charged to."""
    pools = []
    for cache in caches:
        cache._refuse_unattached(where.partition("::")[2])
        pools.append(cache.pool)
    if any(pool is not pools[0] for pool in pools):
        raise ValueError(f"[{where}] the caches must share one pool, got {len(set(pools))} pools")
    return checked_pool(where, pools[0])


def reserve_or_take(
    group: CacheGroup, pairs: int, givers: Iterable[CacheGroup], where: str
) -> None:
    """Reserves ``pairs`` pairs of blocks for ``group``.

    Where the pool would have to grow for it, the layers of ``givers`` are left without blocks.
    Where it is too full all the same, they have theirs again and the call raises.
    """
    layers: list[PooledLayerCache] = []
    if not group.ledger.has_at_hand(pairs):
        layers = [layer for giver in dict.fromkeys(givers) for layer in giver.members()]
    for layer in layers:
        layer._uncharge()
    try:
        group.ledger.prepare(pairs, where)
    except BlockPoolExhaustedError:
        for layer in layers:
            # Another thread may have taken the blocks: then the layer's next step asks for them.
            with contextlib.suppress(BlockPoolExhaustedError):
                layer._recharge()
        raise


def pairs_of_merged(group: CacheGroup, parents: Sequence[CacheGroup], caches: Sequence[Any]) -> int:
    """Pairs of blocks that merging takes in all layers, ``caches`` being those of one of them."""
    layers = [parent.members() for parent in parents]
    alike = all(len(members) == len(layers[0]) for members in layers)
    rows = zip(*layers, strict=True) if alike else [caches]
    return sum(group.ledger.pairs_for(len(row), max(cache.size() for cache in row)) for row in rows)


def pairs_of_extended(group: CacheGroup, pairs: Iterable[tuple[Any, Any]]) -> int:
    """Pairs of blocks that extending the first of each pair, which is of ``group``, takes."""
    total = 0
    for mine, theirs in pairs:
        n_sequences = len(mine._owners) + len(theirs._owners)
        after = group.ledger.pairs_for(n_sequences, max(mine._rows, theirs._rows))
        total += max(after - mine._lease.n_blocks // 2, 0)
    return total
