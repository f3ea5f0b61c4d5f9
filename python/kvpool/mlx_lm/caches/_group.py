"""CacheGroup: the caches of one request, which move, roll back and are released together."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvpool import _native
from kvpool.memory.block_pool import BlockPoolAllocator

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches._layer import PooledLayerCache


class CacheGroup:
    """The caches of one request over one pool.

    The ledger (C++) holds the blocks and knows which layers have moved in the step under way; the
    caches hold the arrays. Members are known by weak reference: a cache that is dropped leaves the
    group and gives its blocks back.

    Args:
        pool: The pool that the caches are charged to; None for caches that are not attached.
        owner: Whom the pool is told the blocks belong to.
        ledger: The ledger, where there is one already.
    """

    def __init__(
        self,
        pool: BlockPoolAllocator | None,
        owner: int,
        ledger: _native.LeaseGroup | None = None,
    ) -> None:
        self.pool = pool
        self.owner = owner
        self.ledger = ledger or _native.LeaseGroup(pool, owner)
        self._members: list[weakref.ref[PooledLayerCache]] = []
        # By what they are made for: a group made from this one, and the layers that are in it.
        self._offspring: dict[Hashable, tuple[weakref.ref[CacheGroup], weakref.WeakSet[Any]]] = {}

    def add(self, cache: PooledLayerCache) -> None:
        """Makes ``cache`` a member."""
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.ref(cache))

    def discard(self, cache: PooledLayerCache) -> None:
        """Forgets ``cache``, whose lease has left the ledger."""
        self._members = [member for member in self._members if member() not in (None, cache)]

    def members(self) -> list[PooledLayerCache]:
        """The caches that are alive."""
        caches = (member() for member in self._members)
        return [cache for cache in caches if cache is not None]

    def offspring(self, purpose: Hashable, layer: PooledLayerCache, owner: int) -> CacheGroup:
        """The group for what is made from ``layer``, one with what is made from its fellows.

        mlx-lm merges and extracts a layer at a time: the calls for one purpose, each for another
        layer, belong together. A layer that comes again starts the next group.
        """
        if purpose in self._offspring:
            child, seen = self._offspring[purpose]
            group = child()
            if group is not None and layer not in seen:
                seen.add(layer)
                return group
        self._offspring = {k: v for k, v in self._offspring.items() if v[0]() is not None}
        group = CacheGroup(self.pool, owner)
        self._offspring[purpose] = weakref.ref(group), weakref.WeakSet([layer])
        return group

    def roll_back(self) -> None:
        """Takes back a step that was cut short: every layer is where it was before it."""
        for cache in self.members():
            cache._undo()
        self.ledger.end_step()

    def tighten(self) -> None:
        """Gives the spare rows of every layer back to the pool."""
        for cache in self.members():
            cache._tighten()

    def release(self) -> None:
        """Gives every block back and empties every member."""
        members = self.members()
        self.ledger.release()
        for cache in members:
            cache._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheGroup:
        """An empty group with an owner of its own, for copies of the members."""
        if self.pool is None:
            return CacheGroup(None, 0)
        return CacheGroup(self.pool, self.pool.new_owner())
