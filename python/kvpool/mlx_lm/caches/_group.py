"""CacheGroup: the caches of one request, which move, roll back and are released together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import _native
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._request_group import RequestGroup

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches._layer import PooledLayerCache


class CacheGroup(RequestGroup["PooledLayerCache"]):
    """The caches of one request over one pool.

    The ledger (C++) holds the blocks and knows which layers have moved in the step under way; the
    caches hold the arrays. A cache that is dropped leaves the group and gives its blocks back.

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
        super().__init__(pool, owner)
        self.ledger = ledger or _native.LeaseGroup(pool, owner)

    def discard(self, cache: PooledLayerCache) -> None:
        """Forgets ``cache``, whose lease has left the ledger."""
        self._members = [member for member in self._members if member() not in (None, cache)]

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
