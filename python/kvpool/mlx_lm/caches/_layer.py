"""PooledLayerCache: what every pooled cache of a layer has, whatever its buffers look like."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import mlx.core as mx

from kvpool import _native
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_int, checked_owner, checked_pool
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches._request_cache import RequestCache

Self = TypeVar("Self", bound="PooledLayerCache")

#: Rows that mlx-lm's caches grow by.
STOCK_STEP = 256


class PooledLayerCache(RequestCache):
    """One layer's keys and values in contiguous buffers whose rows are charged to a pool.

    The pool is charged ``batch * ceil(rows / block_size)`` blocks of keys and as many of values for
    buffers of ``rows`` rows, and ``n_used`` of each block follows the tokens. Subclasses hold the
    buffers in ``_keys`` and ``_values`` (both None while empty) and keep ``_rows`` their length.

    Not made by hand: see the subclasses.
    """

    _group: CacheGroup
    _lease: _native.LayerLease
    _step: int | None
    _keys: Any
    _values: Any
    _rows: int
    # Shapes of the keys and values that were last found to fit the buffers.
    _fitting: tuple[Any, Any] | None

    # --- life -------------------------------------------------------------------------------------

    def _join(self, group: CacheGroup, lease: _native.LayerLease | None = None) -> None:
        self._group = group
        self._lease = lease or _native.LayerLease(group.ledger, self._growth(group.pool))
        group.add(self)

    def _growth(self, pool: BlockPoolAllocator | None) -> _native.BufferGrowth:
        """How the buffers grow; where there is no pool they do not."""
        raise NotImplementedError

    @classmethod
    def _checked_step(cls, step: Any) -> int | None:
        return None if step is None else checked_int(cls.__name__, "step", step, 1)

    def _start(self, pool: Any, owner: Any, step: Any) -> None:
        where = type(self).__name__
        self._step = self._checked_step(step)
        self._clear()
        self._join(CacheGroup(checked_pool(where, pool), checked_owner(where, owner)))

    def _clear(self) -> None:
        self._keys = self._values = None
        self._rows = 0
        self._fitting = None

    def _forget(self) -> None:
        """Empties the cache; its lease is empty already."""
        self._clear()

    @classmethod
    def _unattached(cls: type[Self], state: Any) -> Self:
        cache = cls.__new__(cls)
        cache._step = None
        cache._clear()
        cache._join(CacheGroup(None, 0))
        return cache

    def _attach_to(self, group: CacheGroup) -> Callable[[], None]:
        loose, own_group = self._lease, self._group
        lease = _native.LayerLease(group.ledger, self._growth(group.pool))
        where = self._where("attach")
        lease.replace(loose.batch, loose.offset, loose.rows, loose.index, where)
        self._tag(lease)
        self._join(group, lease)
        return lambda: self._join(own_group, loose)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """A copy with an owner of its own (``pool.new_owner()``), charged to it.

        Caches that are copied together stay one group. The arrays are shared until one side writes.

        Raises:
            BlockPoolExhaustedError: The pool has too few blocks for the copy.
        """
        group = copy.deepcopy(self._group, memo)
        twin = type(self).__new__(type(self))
        shared = {"_group", "_lease", "_keys", "_values"}
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in shared})
        twin._keys, twin._values = self._view(self._keys), self._view(self._values)
        twin._join(group, self._copied_lease(group))
        return twin

    def _copied_lease(self, group: CacheGroup) -> _native.LayerLease:
        """A lease in ``group`` for a copy of this cache."""
        return self._lease.copy_into(group.ledger, self._where("__deepcopy__"))

    # --- what is charged --------------------------------------------------------------------------

    def _hold(
        self, keys: Any, values: Any, batch: int, offset: int, index: int, where: str
    ) -> None:
        """Puts buffers in place that nobody else writes; the pool is charged first.

        Args:
            keys, values: The buffers, both None for none.
            batch: Sequences in them.
            offset, index: Where their tokens end; see ``LayerLease``.
            where: What an error starts with.
        """
        rows = 0 if keys is None else self._sizes(keys)[1]
        self._lease.replace(0 if rows == 0 else batch, offset, rows, index, where)
        self._clear()
        if rows > 0:
            self._keys, self._values, self._rows = keys, values, rows
            self._tag(self._lease)

    def _uncharge(self) -> None:
        """Gives the blocks back and keeps the buffers, until the cache next moves."""
        lease = self._lease
        lease.replace(0, lease.offset, lease.rows, lease.index)

    def _recharge(self) -> None:
        """Takes ``_uncharge`` back."""
        lease = self._lease
        if self._keys is not None:
            lease.replace(self._sizes(self._keys)[0], lease.offset, lease.rows, lease.index)

    # --- buffers, of one array or of several ------------------------------------------------------

    @staticmethod
    def _each(function: Callable[[mx.array], mx.array], buffer: Any) -> Any:
        """``function`` of the array, or of each array, that a buffer is made of."""
        return function(buffer)

    @staticmethod
    def _sizes(buffer: Any) -> tuple[int, int]:
        """(batch, rows) of a buffer."""
        return buffer.shape[0], buffer.shape[2]

    def _view(self, buffer: Any) -> Any:
        """Array objects of our own over the same numbers, out of reach of writes to the others."""
        return None if buffer is None else self._each(lambda array: array[...], buffer)

    # --- steps that were cut short ----------------------------------------------------------------

    def _undo(self) -> None:
        """Takes back this layer's part in the step under way."""
        self._lease.undo(self._rows)
        self._cut(self._lease.rows)

    def _known_to_fit(self, keys: Any, values: Any) -> bool:
        """Whether arrays of these shapes came before: most calls need no other check."""
        try:
            return (keys.shape, values.shape) == self._fitting
        except AttributeError:
            return False

    def _append(self, batch: int, n_tokens: int) -> int:
        """Charges the pool for more tokens; returns what ``LayerLease.append`` does but -1."""
        while True:
            try:
                start = self._lease.append(batch, n_tokens, self._rows)
            except BlockPoolExhaustedError:
                if not self._lease.fits_tightened(batch, n_tokens):
                    self._settle()  # another request of this owner took what was reserved
                    raise
                self._group.tighten()
            else:
                if start != -1:
                    return start
                self._group.roll_back()

    def _tighten(self) -> None:
        """Gives spare rows back to the pool."""
        self._cut(self._lease.tighten())

    def _cut(self, rows: int) -> None:
        """Shortens the buffers to ``rows`` rows."""
        if rows == self._rows:
            return
        if rows == 0:
            self._clear()
            return
        # A view keeps the whole buffer alive: copy where most of it goes.
        copies = 2 * rows < self._rows

        def shorter(array: mx.array) -> mx.array:
            view = array[:, :, :rows]
            return mx.contiguous(view) if copies else view

        keys, values = self._each(shorter, self._keys), self._each(shorter, self._values)
        self._keys, self._values, self._rows = keys, values, rows

    # --- buffers ----------------------------------------------------------------------------------

    @property
    def keys(self) -> Any:
        """The buffer of keys, (batch, heads, rows, dims), or None while empty."""
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._put(keys, self._values)

    @property
    def values(self) -> Any:
        """The buffer of values, (batch, heads, rows, dims), or None while empty."""
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._put(self._keys, values)

    def _put(self, keys: Any, values: Any) -> None:
        """Puts other buffers in place, one at a time maybe, and charges the longer one."""
        sizes = [self._sizes(buffer) for buffer in (keys, values) if buffer is not None]
        batch = max((batch for batch, _ in sizes), default=0)
        rows = max((rows for _, rows in sizes), default=0)
        lease = self._lease
        if (rows, batch) != (self._rows, lease.batch):
            offset = min(lease.offset, rows)
            lease.replace(batch, offset, rows, min(lease.index, rows), self._where("keys"))
        self._keys, self._values, self._rows = keys, values, rows
        self._fitting = None

    def _tag(self, lease: _native.LayerLease) -> None:
        """Tells the pool what the buffers hold."""
        raise NotImplementedError

    # --- what mlx-lm asks -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Rows that the buffers grow by: the given one, or at least this many."""
        if self._step is not None:
            return self._step
        return STOCK_STEP if self.pool is None else max(self.pool.config.block_size, STOCK_STEP)

    @property
    def offset(self) -> int:
        """Tokens appended and not trimmed."""
        offset = self._lease.steady_offset
        return offset if offset >= 0 else self._offset_for(sys._getframe(1))

    def _offset_for(self, reader: FrameType) -> int:
        """The offset of a layer that has moved in a step which looks cut short.

        Some models read it before they ask for a mask: to them a new step begins, and the last one
        is taken back. Anybody else may be looking at a step under way.
        """
        if reader.f_globals.get("__name__", "").startswith("mlx_lm.models."):
            self._group.roll_back()
        return self._lease.offset

    def size(self) -> int:
        """Tokens stored."""
        return self._lease.offset

    def empty(self) -> bool:
        """True while there are no buffers."""
        return self._keys is None

    def n_blocks_held(self) -> int:
        """Blocks of keys and of values that the pool has given this cache."""
        return self._lease.n_blocks

    def is_trimmable(self) -> bool:
        """Whether ``trim`` can drop tokens."""
        return self._lease.is_trimmable

    def trim(self, n: int) -> int:
        """Drops the newest ``n`` tokens, or as many as there are, and returns how many.

        Blocks that are empty afterwards go back to the pool. Caches of one group that hold unequal
        numbers of tokens are all trimmed by what the shortest can drop.

        Raises:
            ValueError: ``n`` is negative.
            TypeError: ``n`` is no int.
        """
        n = checked_int(self._where("trim"), "n", n, 0)
        self._settle()
        dropped = self._lease.trim(n)
        self._cut(self._lease.rows)
        return dropped

    def _settle(self) -> None:
        """Rolls the group back where its last step was cut short."""
        if self._lease.in_torn_step:
            self._group.roll_back()

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        total = 0

        def add(array: mx.array) -> mx.array:
            nonlocal total
            total += array.nbytes
            return array

        for buffer in (self._keys, self._values):
            if buffer is not None:
                self._each(add, buffer)
        return total

    def check_invariants(self) -> None:
        """Raises RuntimeError where the books of this cache's group do not add up. For tests."""
        self._group.ledger.check_invariants()
        if self._rows != self._lease.rows:
            raise RuntimeError(
                f"[{self._where('check_invariants')}] the buffers have {self._rows} rows, "
                f"{self._lease.rows} are charged"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(owner={self.owner}, offset={self.offset}, step={self.step})"
