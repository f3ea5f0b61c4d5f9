"""PagedGroup: the paged caches of one request, which move and are released together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from kvpool import _mlx
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._request_group import RequestGroup

if TYPE_CHECKING:
    from kvpool.mlx_lm.paged.kv_cache import PagedKVCache


class PagedGroup(RequestGroup["PagedKVCache"]):
    """The layers of one request over one pool; see ``kvpool::cache::PagedGroup``.

    Args:
        pool: The pool that is charged; None for caches that are not attached.
        owner: Whom the blocks belong to.
    """

    def __init__(self, pool: BlockPoolAllocator | None, owner: int) -> None:
        super().__init__(pool, owner)
        self.native = None if pool is None else _mlx.PagedGroup(pool, owner)
        self._shown: tuple[list[int], mx.array] | None = None

    def members(self) -> list[PagedKVCache]:
        """The caches that are alive, in the order in which a step visits them."""
        return [cache for cache in super().members() if cache._group is self]

    def array_of(self, numbers: list[int]) -> mx.array:
        """``numbers`` as an array, one for all layers of a step: a GPU has to fetch what the host
        makes."""
        if self._shown is None or self._shown[0] != numbers:
            self._shown = numbers, mx.array(numbers, dtype=mx.int32)
        return self._shown[1]

    def release(self) -> None:
        """Gives every block back: every member is empty, and nothing waits to be written."""
        if self.native is not None:
            self.native.release()
        for cache in self.members():
            cache._forget()

    def roll_back(self) -> None:
        """Takes back a step that was cut short."""
        if self.native is not None:
            self.native.roll_back_step()
