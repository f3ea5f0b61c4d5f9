"""PagedGroup: the paged caches of one request, which move and are released together."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvpool import _mlx
from kvpool.memory.block_pool import BlockPoolAllocator

if TYPE_CHECKING:
    from kvpool.mlx_lm.paged.kv_cache import PagedKVCache


class PagedGroup:
    """The layers of one request over one pool; see ``kvpool::cache::PagedGroup``.

    Args:
        pool: The pool that is charged; None for caches that are not attached.
        owner: Whom the blocks belong to.
    """

    def __init__(self, pool: BlockPoolAllocator | None, owner: int) -> None:
        self.pool = pool
        self.owner = owner
        self.native = None if pool is None else _mlx.PagedGroup(pool, owner)
        self._members: list[weakref.ref[PagedKVCache]] = []
        # By what they are made for: a group made from this one, and the caches it was made from.
        self._offspring: dict[Hashable, tuple[weakref.ref[PagedGroup], weakref.WeakSet[Any]]] = {}

    def add(self, cache: PagedKVCache) -> None:
        """Makes ``cache`` a member, behind those that there are."""
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.ref(cache))

    def members(self) -> list[PagedKVCache]:
        """The caches that are alive, in the order in which a step visits them."""
        caches = (member() for member in self._members)
        return [cache for cache in caches if cache is not None and cache._group is self]

    def release(self) -> None:
        """Gives every block back: every member is empty, and nothing waits to be written."""
        if self.native is None:
            return
        self.native.release()
        for cache in self.members():
            if cache._layer is not None:
                cache._layer.reset()

    def offspring(self, purpose: Hashable, cache: Any) -> PagedGroup:
        """The group for forks of this one's caches that are made one at a time.

        mlx-lm merges and extracts a layer at a time: the calls for one purpose, each for another
        cache, belong together. A cache that comes again starts the next group.
        """
        if purpose in self._offspring:
            child, seen = self._offspring[purpose]
            group = child()
            if group is not None and cache not in seen:
                seen.add(cache)
                return group
        self._offspring = {k: v for k, v in self._offspring.items() if v[0]() is not None}
        group = PagedGroup(self.pool, self.owner)
        self._offspring[purpose] = weakref.ref(group), weakref.WeakSet([cache])
        return group

    def roll_back(self) -> None:
        """Takes back a step that was cut short."""
        if self.native is not None:
            self.native.roll_back_step()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedGroup:
        """An empty group with an owner of its own, for copies of the caches."""
        if self.pool is None:
            return PagedGroup(None, 0)
        return PagedGroup(self.pool, self.pool.new_owner())
