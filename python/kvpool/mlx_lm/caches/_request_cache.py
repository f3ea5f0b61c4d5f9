"""RequestCache: how a layer's cache comes to a pool and leaves it, wherever its tokens lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_owner, checked_pool, checked_state
from kvpool.mlx_lm.caches._request_group import RequestGroup

Self = TypeVar("Self", bound="RequestCache")


class RequestCache:
    """One layer of a request: a member of the group of the request's caches.

    Not made by hand: see the subclasses.
    """

    #: What ``state`` consists of.
    _state_parts: ClassVar[tuple[str, ...]] = ("keys", "values", "offset")

    _group: RequestGroup[Any]

    @classmethod
    def _where(cls, call: str) -> str:
        return f"{cls.__name__}::{call}"

    @classmethod
    def _parts_of(cls, state: Any, least: int | None = None) -> Sequence[Any]:
        """The parts of a state, of which a caller must give ``least``; None for all."""
        return checked_state(cls._where("state"), state, cls._state_parts, least)

    @classmethod
    def _unattached(cls: type[Self], state: Any) -> Self:
        """An empty cache without a pool that takes a state such as this one."""
        raise NotImplementedError

    def _attach_to(self, group: Any) -> Callable[[], None]:
        """Charges the cache, which has no pool, to ``group``, or raises; returns what takes it
        back."""
        raise NotImplementedError

    @classmethod
    def from_state(cls: type[Self], state: Any) -> Self:
        """A cache with this state and no pool: ``attach`` it before it is used further.

        Raises:
            TypeError: ``state``, or a part of it, is of another type.
            ValueError: It has another number of parts, or they do not fit each other.
        """
        cache = cls._unattached(state)
        cache.state = state
        return cache

    @property
    def state(self) -> Any:
        """What ``from_state`` makes the cache from."""
        raise NotImplementedError

    @state.setter
    def state(self, state: Any) -> None:
        raise NotImplementedError

    def attach(self, pool: BlockPoolAllocator, owner: int = -1) -> None:
        """Charges a cache made by ``from_state`` to ``pool``.

        Attach the caches of a request together, with ``attach_caches``: they become one group.

        Args:
            pool: The pool to draw on.
            owner: Whom the blocks belong to.

        Raises:
            BlockPoolExhaustedError: The pool has too few blocks; the cache is not attached.
            TypeError: An argument is of another type.
            ValueError: The cache has a pool already.
        """
        where = self._where("attach")
        group = type(self._group)(checked_pool(where, pool), checked_owner(where, owner))
        self._attached_to(group)

    def _attached_to(self, group: Any) -> Callable[[], None]:
        """``_attach_to`` of a cache that may have a pool."""
        if self.pool is not None:
            raise ValueError(f"[{self._where('attach')}] the cache has a pool already: {self!r}")
        return self._attach_to(group)

    def _refuse_unattached(self, call: str) -> None:
        if self.pool is None:
            raise RuntimeError(
                f"[{self._where(call)}] the cache has no pool yet: call attach(pool, owner) first"
            )

    def release(self) -> None:
        """Gives back the blocks of this cache and of every cache that was built with it.

        All of them are empty afterwards, and may be used again.
        """
        self._group.release()

    def __copy__(self: Self) -> Self:
        return copy.deepcopy(self)

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool that is charged; None until a loaded cache is attached."""
        return self._group.pool

    @property
    def owner(self) -> int:
        """Whom the pool is told the blocks belong to."""
        return self._group.owner

    @property
    def meta_state(self) -> str:
        """Always empty: ``state`` has everything."""
        return ""

    @meta_state.setter
    def meta_state(self, meta_state: Any) -> None:
        if meta_state:
            raise ValueError(
                f"[{self._where('meta_state')}] this cache has none, got {meta_state!r}"
            )
