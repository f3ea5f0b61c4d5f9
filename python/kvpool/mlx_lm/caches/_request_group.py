"""RequestGroup: what the caches of one request have in common, wherever their tokens lie."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from kvpool.memory.block_pool import BlockPoolAllocator

Cache = TypeVar("Cache")
Self = TypeVar("Self", bound="RequestGroup[Any]")


class RequestGroup(Generic[Cache]):
    """The caches of one request over one pool, known by weak reference.

    Args:
        pool: The pool that the caches are charged to; None for caches that are not attached.
        owner: Whom the pool is told the blocks belong to.
    """

    def __init__(self, pool: BlockPoolAllocator | None, owner: int) -> None:
        self.pool = pool
        self.owner = owner
        self._members: list[weakref.ref[Cache]] = []
        # By what they are made for: a group made from this one, and the caches it was made from.
        self._offspring: dict[Hashable, tuple[weakref.ref[Any], weakref.WeakSet[Any]]] = {}

    def add(self, cache: Cache) -> None:
        """Makes ``cache`` a member, behind those that there are."""
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.ref(cache))

    def members(self) -> list[Cache]:
        """The caches that are alive, in the order in which a step visits them."""
        caches = (member() for member in self._members)
        return [cache for cache in caches if cache is not None]

    def release(self) -> None:
        """Gives every block back and empties every member."""
        raise NotImplementedError

    def offspring(self: Self, purpose: Hashable, cache: Any, owner: int) -> Self:
        """The group for what is made from ``cache``, one with what is made from its fellows.

        mlx-lm merges and extracts a layer at a time: the calls for one purpose, each for another
        cache, belong together. A cache that comes again starts the next group.
        """
        if purpose in self._offspring:
            child, seen = self._offspring[purpose]
            group: Self | None = child()
            if group is not None and cache not in seen:
                seen.add(cache)
                return group
        self._offspring = {k: v for k, v in self._offspring.items() if v[0]() is not None}
        group = type(self)(self.pool, owner)
        self._offspring[purpose] = weakref.ref(group), weakref.WeakSet([cache])
        return group

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """An empty group with an owner of its own, for copies of the members."""
        if self.pool is None:
            return type(self)(None, 0)
        return type(self)(self.pool, self.pool.new_owner())
