"""BatchLayerCache: what pooled caches of several sequences have, however they lie."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from kvpool import _native
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.mlx_lm.caches._arguments import as_list, checked_buffers, checked_int
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches._joint import (
    pairs_of_extended,
    pairs_of_merged,
    reserve_or_take,
    shared_pool,
)
from kvpool.mlx_lm.caches._layer import PooledLayerCache

Self = TypeVar("Self", bound="BatchLayerCache")


class BatchLayerCache(PooledLayerCache):
    """Sequences of unequal length, padded on the left, in one pair of buffers.

    The pool is charged for every row of every sequence; rows of padding are held but unused. A
    batch has an owner of its own, for its buffers are one allocation that no request alone could
    give back. Each sequence remembers whose request it is: what is extracted is charged to that.

    What goes where is worked out by mlx-lm's own class (``_as_stock``, ``_adopt``).

    mlx-lm makes the new cache of a merge, an extension, an extraction or a copy while it still
    holds the old one, which it drops next. Both are charged where there is room for both. Where
    there is not, one is left without blocks until it next moves (the old one, of a copy the new
    one), so that these calls take no more than what stays.
    """

    # mlx-lm's cache of a batch, and that of one sequence, which may be merged with ours.
    _stock: ClassVar[Any]
    _stock_single: ClassVar[type]

    # Whose each sequence is.
    _owners: tuple[int, ...]
    # Rows before the first token of each sequence, when `_dropped` rows had left the front.
    _first_padding: tuple[int, ...]
    _dropped: int
    # What each sequence has fewer tokens than the rows appended.
    _lags: tuple[int, ...]
    # The last array of offsets, and what it was made of.
    _offsets: tuple[int, tuple[int, ...], mx.array] | None

    def _as_stock(self) -> Any:
        """mlx-lm's cache of the same sequences, over array objects of its own."""
        raise NotImplementedError

    def _adopt(self, stock: Any, owners: Sequence[int], where: str) -> None:
        """Takes over what mlx-lm made; the pool is charged first."""
        raise NotImplementedError

    def _single(self, group: CacheGroup) -> PooledLayerCache:
        """An empty pooled cache of one sequence with this geometry."""
        raise NotImplementedError

    # --- life -------------------------------------------------------------------------------------

    @classmethod
    def _empty(
        cls: type[Self], group: CacheGroup, step: int | None, owners: Iterable[int], *geometry: int
    ) -> Self:
        """A batch without tokens, of as many sequences as there are owners."""
        cache = cls.__new__(cls)
        cache._shape_like(*geometry)
        cache._step = step
        cache._owners = tuple(owners)
        cache._clear()
        cache._join(group)
        cache._forget()
        return cache

    @classmethod
    def _geometry_of(cls, caches: Sequence[Any]) -> tuple[int, ...]:
        """The geometry that these caches of one sequence share."""
        return ()

    def _shape_like(self, *geometry: int) -> None:
        """Takes the geometry that sequences of a batch share."""

    def _begin(self, pool: Any, left_padding: Any, owner: Any, step: Any) -> None:
        where = type(self).__name__
        padding = [checked_int(where, "left_padding", p, 0) for p in as_list(left_padding)]
        self._start(pool, owner, step)
        self._owners = (self.owner,) * len(padding)
        self._forget()
        self.prepare(left_padding=padding)

    @classmethod
    def _unattached(cls: type[Self], state: Any) -> Self:
        return cls._empty(CacheGroup(None, 0), None, ())

    def _forget(self) -> None:
        super()._forget()
        self._settle_rows((0,) * len(self._owners), (0,) * len(self._owners), self._owners)

    def _attach_to(self, group: CacheGroup) -> Callable[[], None]:
        take_back = super()._attach_to(group)
        self._owners = (group.owner,) * len(self._owners)
        self._mark()
        return take_back

    def _copied_lease(self, group: CacheGroup) -> _native.LayerLease:
        mine = self._lease
        if group.ledger.has_at_hand(mine.n_blocks // 2):
            return super()._copied_lease(group)
        self._settle()
        lease = _native.LayerLease(group.ledger, self._growth(group.pool))
        lease.replace(0, mine.offset, mine.rows, mine.index)
        self._tag(lease)
        return lease

    def _recharge(self) -> None:
        super()._recharge()
        self._mark()

    # --- where the tokens are ---------------------------------------------------------------------

    # Everything follows from the shape that the lease knows, so a step that is taken back leaves
    # nothing else to take back.

    @property
    def _n_written(self) -> int:
        """Rows of the buffers that have been written; the rest is spare."""
        index = self._lease.index
        return self._rows if index < min(self._lease.offset, self._rows) else index

    @property
    def _n_dropped(self) -> int:
        """Rows that have left the buffers at the front, but for a constant."""
        return self._lease.offset - self._n_written

    @property
    def _padding(self) -> tuple[int, ...]:
        """Rows before the first token of each sequence, the oldest row first; negative where
        tokens have left."""
        dropped = self._n_dropped - self._dropped
        if dropped == 0:
            return self._first_padding
        return tuple(padding - dropped for padding in self._first_padding)

    def _settle_rows(
        self, padding: Iterable[int], counts: Iterable[int], owners: Iterable[int]
    ) -> None:
        """Says where the sequences lie in the buffers that are in place now.

        Args:
            padding: Rows before the first token of each.
            counts: Tokens of each, those that have left included.
            owners: Whose request each is.
        """
        offset = self._lease.offset
        self._first_padding, self._dropped = tuple(padding), self._n_dropped
        self._lags = tuple(offset - count for count in counts)
        self._owners = tuple(owners)
        self._offsets = None
        self._mark()

    def _mark(self) -> None:
        """Tells the pool which rows are padding."""
        lease = self._lease
        if lease.batch == len(self._first_padding):
            # The oldest rows of a ring that has turned are at its index.
            turned = lease.index < min(lease.offset, self._rows)
            lease.set_padding(lease.index if turned else 0, self._padding)

    @property
    def offset(self) -> mx.array:  # type: ignore[override]
        """Tokens of each sequence, an array; negative before the padding is passed."""
        end = self._lease.steady_offset
        if end < 0:
            end = self._offset_for(sys._getframe(1))
        known = self._offsets
        if known is None or known[0] != end or known[1] is not self._lags:
            offsets = mx.array([end - lag for lag in self._lags], dtype=mx.int32)
            known = self._offsets = (end, self._lags, offsets)
        return known[2]

    @property
    def left_padding(self) -> mx.array:
        """Rows before the first token of each sequence, an array."""
        return mx.array(self._padding, dtype=mx.int32)

    def _restore(
        self, keys: Any, values: Any, counts: Any, padding: Any, offset: Any, index: Any
    ) -> None:
        """Takes a state; see ``_settle_rows``."""
        where = self._where("state")
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
        counts, padding = as_list(counts), as_list(padding)
        n_sequences = len(padding) if keys is None else keys.shape[0]
        if not len(counts) == len(padding) == n_sequences:
            raise ValueError(
                f"[{where}] offset and left_padding must have {n_sequences} items, "
                f"got {len(counts)} and {len(padding)}"
            )
        offset = checked_int(where, "offset", offset, 0)
        index = checked_int(where, "index", index, 0, 0 if keys is None else keys.shape[2])
        self._settle()
        self._hold(self._view(keys), self._view(values), n_sequences, offset, index, where)
        owners = self._owners if len(self._owners) == n_sequences else [self.owner] * n_sequences
        self._settle_rows(padding, counts, owners)

    def _change(
        self, change: Callable[[Any], None], where: str, owners: Sequence[int] | None = None
    ) -> None:
        """Lets mlx-lm change its cache of the same sequences, and takes over what it made."""
        self._settle()
        stock = self._as_stock()
        change(stock)
        self._adopt(stock, self._owners if owners is None else owners, where)

    # --- several sequences ------------------------------------------------------------------------

    @property
    def row_owners(self) -> tuple[int, ...]:
        """Whose request each sequence is. The blocks belong to ``owner`` until it is extracted."""
        return self._owners

    @classmethod
    def _merged(cls: type[Self], kind: type[PooledLayerCache], caches: Sequence[Any]) -> Self:
        """A batch of the sequences in ``caches``, of which the first is of ``kind``, the others of
        that or mlx-lm's own."""
        where = kind._where("merge")
        if not caches:
            raise ValueError(f"[{where}] caches must not be empty")
        first = caches[0]
        for cache in caches:
            if type(first) is not kind or type(cache) not in (kind, cls._stock_single):
                raise TypeError(
                    f"[{where}] caches must be of {kind.__name__}, or of "
                    f"{cls._stock_single.__name__} behind the first, got {cache!r}"
                )
        _refuse_unlike_buffers(where, caches)
        sources = [cache for cache in caches if isinstance(cache, PooledLayerCache)]
        pool = shared_pool(where, sources)
        for cache in sources:
            cache._settle()
        parents = [cache._group for cache in sources]
        purpose = ("merge", *(id(parent) for parent in parents))
        group = first._group.offspring(purpose, first, pool.new_owner())
        if group.ledger.n_layers == 0 and len(sources) == len(caches):
            reserve_or_take(group, pairs_of_merged(group, parents, caches), parents, where)
        owners = [getattr(cache, "owner", group.owner) for cache in caches]
        batch = cls._empty(group, first._step, owners, *cls._geometry_of(caches))
        try:
            batch._adopt(cls._stock.merge(caches), owners, where)
        except BaseException:
            group.release()
            raise
        if group.ledger.n_layers == len(first._group.members()):
            group.ledger.end_step()
        return batch

    def extract(self, idx: int) -> PooledLayerCache:
        """A pooled cache of one sequence, charged to the request that the sequence is of.

        What is extracted from all layers of a batch is one group.
        """
        where = self._where("extract")
        idx = self._checked_row(where, idx)
        self._settle()
        owner = self._owners[idx]
        single = self._single(self._group.offspring(("extract", idx, owner), self, owner))
        if self._keys is None:
            return single
        stock = self._as_stock().extract(idx)
        lease, ledger = self._lease, single._group.ledger
        lends = not ledger.has_at_hand(ledger.pairs_for(1, stock.keys.shape[2])) and lease.batch
        if lends:
            lease.replace(lease.batch - 1, lease.offset, lease.rows, lease.index)
        try:
            index = getattr(stock, "_idx", stock.offset)
            single._hold(stock.keys, stock.values, 1, stock.offset, index, where)
        except BaseException:
            if lends:
                self._recharge()
            raise
        return single

    def filter(self, batch_indices: Any) -> None:
        """Keeps the sequences with these numbers; the blocks of the others go back.

        Raises:
            IndexError: There is no such sequence; nothing has changed.
        """
        where = self._where("filter")
        indices = [self._checked_row(where, idx) for idx in as_list(batch_indices)]
        owners = [self._owners[idx] for idx in indices]
        if not indices:
            self._settle()
            self._hold(None, None, 0, 0, 0, where)
            self._owners = ()
            self._forget()
            return
        self._change(lambda stock: stock.filter(indices), where, owners)

    def extend(self, other: Any) -> None:
        """Appends the sequences of another batch over the same pool.

        Raises:
            BlockPoolExhaustedError: The pool has too few blocks for all layers; none has changed.
            TypeError: ``other`` is a cache of another kind.
            ValueError: ``other`` is over another pool, or has another geometry.
        """
        where = self._where("extend")
        if type(other) is not type(self):
            raise TypeError(f"[{where}] other must be a {type(self).__name__}, got {other!r}")
        shared_pool(where, (self, other))
        _refuse_unlike_buffers(where, (self, other), batches=True)
        self._geometry_of((self, other))
        self._settle()
        other._settle()
        fellows: list[Any] = self._group.members()
        pairs: list[tuple[Any, Any]] = list(zip(fellows, other._group.members(), strict=False))
        n_sequences = len(self._owners)
        if len(pairs) < len(fellows):
            fellows, pairs = [self], [(self, other)]
        elif any(len(mine._owners) != n_sequences for mine in fellows):
            pairs = []  # not the first layer: reserved already
        if pairs:
            givers = [other._group]
            try:
                reserve_or_take(self._group, pairs_of_extended(self._group, pairs), givers, where)
            except BlockPoolExhaustedError:
                self._group.tighten()
                other._group.tighten()
                reserve_or_take(self._group, pairs_of_extended(self._group, pairs), givers, where)
        theirs = other._as_stock()
        owners = (*self._owners, *other._owners)
        self._change(lambda stock: stock.extend(theirs), where, owners)
        if all(len(layer._owners) != n_sequences for layer in fellows):
            self._group.ledger.end_step()

    def prepare(
        self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None
    ) -> None:
        """Says how the tokens to come are padded, as mlx-lm's caches are told.

        Args:
            left_padding: Rows of padding before each sequence; only while there are no tokens.
            lengths: Tokens of each sequence, its padding on the right not counted.
            right_padding: Rows of padding after each sequence, until ``finalize``.
        """
        options = {
            "left_padding": as_list(left_padding),
            "lengths": as_list(lengths),
            "right_padding": as_list(right_padding),
        }
        where = self._where("prepare")
        for name, value in options.items():
            if value is not None and len(value) != len(self._owners):
                raise ValueError(
                    f"[{where}] {name} must have {len(self._owners)} items, got {value!r}"
                )
        self._change(lambda stock: stock.prepare(**options), where)

    def finalize(self) -> None:
        """Moves the padding on the right that ``prepare`` announced to the left."""
        self._change(lambda stock: stock.finalize(), self._where("finalize"))

    def _checked_row(self, where: str, idx: Any) -> int:
        n_sequences = len(self._owners)
        row = checked_int(where, "idx", idx, -(2**63))
        if not -n_sequences <= row < n_sequences:
            raise IndexError(f"[{where}] there are {n_sequences} sequences, got {row}")
        return row % n_sequences

    def _check_batch(self, keys: Any) -> None:
        if keys.shape[0] != len(self._owners):
            self._fitting = None
            raise ValueError(
                f"[{self._where('update_and_fetch')}] keys must be of {len(self._owners)} "
                f"sequences, got {keys.shape[0]}"
            )

    def check_invariants(self) -> None:
        """Raises RuntimeError where the books of this cache's group do not add up. For tests."""
        super().check_invariants()
        books = {len(self._owners), len(self._first_padding), len(self._lags)}
        if self._keys is not None:
            books.add(self._keys.shape[0])
        if len(books) > 1:
            raise RuntimeError(
                f"[{self._where('check_invariants')}] owners, padding and buffers are not of as "
                f"many sequences: {self!r}"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(owner={self.owner}, row_owners={self._owners}, "
            f"left_padding={self._padding}, rows={self._lease.rows})"
        )


def _refuse_unlike_buffers(where: str, caches: Iterable[Any], batches: bool = False) -> None:
    """Refuses caches whose sequences cannot lie in one pair of buffers."""
    pairs = [(cache.keys, cache.values) for cache in caches if not cache.empty()]
    shapes = {(*keys.shape[1:4:2], values.shape[3]) for keys, values in pairs}
    if len(shapes) > 1:
        raise ValueError(f"[{where}] the caches differ in heads or dims: {sorted(shapes)}")
    batch = max((keys.shape[0] for keys, _ in pairs), default=1)
    if batch > 1 and not batches:
        raise ValueError(f"[{where}] the caches must be of one sequence, got one of {batch}")
