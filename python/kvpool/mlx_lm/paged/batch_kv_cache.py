"""PagedBatchKVCache: one layer of several requests, each in blocks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvpool import _mlx
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import as_list, checked_buffers, checked_int
from kvpool.mlx_lm.paged._group import PagedGroup
from kvpool.mlx_lm.paged.kv_cache import PagedKVCache, _dims


class PagedBatchKVCache:
    """A drop-in replacement for ``mlx_lm.models.cache.BatchKVCache`` and
    ``BatchRotatingKVCache``, made by ``PagedKVCache.merge``.

    It is a list of the requests' own caches: nothing is padded, copied or moved when requests come
    and go, and each keeps its owner. What ``update_and_fetch`` returns is padded on the left, as
    mlx-lm expects it, when somebody evaluates it.

    Prompts that are padded on the right (``prepare(lengths=...)``) leave their padding out: only
    tokens are appended, and ``make_mask`` knows.
    """

    # One cache a request.
    _rows: list[PagedKVCache]
    # Tokens of each prompt that are still to come, between prepare and finalize.
    _to_come: list[int] | None

    @classmethod
    def _of(cls, rows: Sequence[PagedKVCache]) -> PagedBatchKVCache:
        batch = cls.__new__(cls)
        batch._rows, batch._to_come = list(rows), None
        return batch

    @classmethod
    def _merged(cls, caches: Sequence[Any]) -> PagedBatchKVCache:
        where = "PagedKVCache::merge"
        if not caches:
            raise ValueError(f"[{where}] caches must not be empty")
        for cache in caches:
            if type(cache) is not PagedKVCache:
                raise TypeError(f"[{where}] caches must be PagedKVCaches, got {cache!r}")
            if cache.pool is None:
                raise RuntimeError(f"[{where}] the cache has no pool yet: {cache!r}")
        _refuse_unlike(where, caches)
        rows = []
        for i, cache in enumerate(caches):
            cache._settle()
            rows.append(cache._fork(cache._group.offspring(("merge", i), cache, cache.owner)))
        return cls._of(rows)

    @classmethod
    def from_state(cls, state: Any) -> PagedBatchKVCache:
        """A batch with this state and no pool.

        Raises:
            TypeError: ``state`` is no list, or a request's state is of another type.
            ValueError: A request's state does not fit together.
        """
        return cls._of(cls._loose(state))

    @staticmethod
    def _loose(state: Any) -> list[PagedKVCache]:
        where = "PagedBatchKVCache::state"
        if not isinstance(state, (tuple, list)):
            raise TypeError(f"[{where}] state must be a list of requests' states, got {state!r}")
        return [PagedKVCache.from_state(row) for row in state]

    # --- the decode path --------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens to every request and returns all that a query may see.

        Args:
            keys: New keys, (requests, heads, tokens, key dims).
            values: New values, (requests, heads, tokens, value dims).

        Returns:
            The keys and the values so far, (requests, heads, tokens, dims), padded on the left.

        Raises:
            BlockPoolExhaustedError: The tokens do not fit; no request has moved.
            ValueError: A shape does not fit, or blocks were freed behind a cache.
            TypeError: Something else than arrays.
        """
        where = "PagedBatchKVCache::update_and_fetch"
        checked_buffers(where, keys, values)
        n_rows, _, n_tokens, _ = keys.shape
        if n_rows != len(self._rows):
            raise ValueError(f"[{where}] keys must be of {len(self._rows)} requests, got {n_rows}")
        counts = self._counts(n_tokens)
        before = [row.offset for row in self._rows]
        dims = _dims(keys, values)
        try:
            if all(row._dims == dims for row in self._rows):
                _mlx.append_batch([row._layer for row in self._rows], keys, values, counts)
            else:  # first tokens, which say how wide a layer is
                for i, (row, n) in enumerate(zip(self._rows, counts, strict=True)):
                    if n > 0:
                        row.update_and_fetch(keys[i : i + 1, :, :n], values[i : i + 1, :, :n])
            fetched = self._fetched()
        except BaseException:
            for row, offset in zip(self._rows, before, strict=True):
                row._group.roll_back()
                if row.offset > offset:  # its only layer: the step was complete
                    row._layer.roll_back(row.offset - offset)
            raise
        if self._to_come is not None:
            self._to_come = [left - n for left, n in zip(self._to_come, counts, strict=True)]
        return fetched

    def _counts(self, n_tokens: int) -> list[int]:
        """Which of ``n_tokens`` to come are tokens, by request; the rest is padding."""
        if self._to_come is None:
            return [n_tokens] * len(self._rows)
        return [min(n_tokens, left) for left in self._to_come]

    def keys_and_values(self) -> tuple[Any, Any]:
        """What ``update_and_fetch`` last returned, anew; (None, None) while empty."""
        if self.empty():
            return None, None
        return self._fetched()

    def _fetched(self) -> tuple[mx.array, mx.array]:
        """The keys and values of all requests, of which one at least has tokens."""
        holding = [not row.empty() for row in self._rows]
        layers = [row._layer for row, holds in zip(self._rows, holding, strict=True) if holds]
        keys, values = _mlx.fetch_batch(layers)
        if all(holding):
            return keys, values

        def with_padding(array: mx.array) -> mx.array:
            nothing = mx.zeros_like(array[:1])
            found = iter(mx.split(array, len(layers)))
            return mx.concatenate([next(found) if holds else nothing for holds in holding])

        return with_padding(keys), with_padding(values)

    @property
    def keys(self) -> Any:
        """The keys, padded on the left, gathered when they are evaluated; None while empty."""
        return self.keys_and_values()[0]

    @property
    def values(self) -> Any:
        """The values, as ``keys``."""
        return self.keys_and_values()[1]

    # --- several requests -------------------------------------------------------------------------

    @property
    def row_owners(self) -> tuple[int, ...]:
        """Whose each request's blocks are."""
        return tuple(row.owner for row in self._rows)

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one request's cache, for its owner."""
        row = self._rows[self._checked_row("extract", idx)]
        row._settle()
        return row._fork(row._group.offspring("extract", row, row.owner))

    def filter(self, batch_indices: Any) -> None:
        """Keeps the requests with these numbers; the blocks of the others go back.

        Raises:
            IndexError: There is no such request; nothing has changed.
        """
        indices = [self._checked_row("filter", idx) for idx in as_list(batch_indices)]
        self._rows = [self._rows[idx] for idx in indices]
        if self._to_come is not None:
            self._to_come = [self._to_come[idx] for idx in indices]

    def extend(self, other: PagedBatchKVCache) -> None:
        """Takes over the requests of another batch, which is empty afterwards.

        Raises:
            TypeError: ``other`` is a cache of another kind.
            ValueError: ``other`` is over another pool, or differs in window, heads or dims.
        """
        where = "PagedBatchKVCache::extend"
        if type(other) is not PagedBatchKVCache:
            raise TypeError(f"[{where}] other must be a PagedBatchKVCache, got {other!r}")
        if (self._to_come is None) != (other._to_come is None):
            raise ValueError(f"[{where}] call finalize on both batches first")
        _refuse_unlike(where, [*self._rows, *other._rows])
        self._rows += other._rows
        if self._to_come is not None and other._to_come is not None:
            self._to_come += other._to_come
        other._rows, other._to_come = [], None

    def prepare(
        self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None
    ) -> None:
        """Says how many tokens of each prompt are to come; the rest of each row is padding.

        Args:
            left_padding: Only zeros: nothing here is padded on the left.
            lengths: Tokens of each prompt.
            right_padding: Not looked at: it follows from the lengths.
        """
        where = "PagedBatchKVCache::prepare"
        del right_padding
        if left_padding is not None and any(as_list(left_padding)):
            raise ValueError(f"[{where}] left_padding must be zeros, got {left_padding!r}")
        if lengths is None:
            return
        counts = [checked_int(where, "lengths", length, 0) for length in as_list(lengths)]
        if len(counts) != len(self._rows):
            raise ValueError(f"[{where}] lengths must have {len(self._rows)} items, got {lengths}")
        self._to_come = counts

    def finalize(self) -> None:
        """Ends what ``prepare`` began."""
        self._to_come = None

    def _checked_row(self, call: str, idx: Any) -> int:
        where, n_rows = f"PagedBatchKVCache::{call}", len(self._rows)
        row = checked_int(where, "idx", idx, -(2**63))
        if not -n_rows <= row < n_rows:
            raise IndexError(f"[{where}] there are {n_rows} requests, got {row}")
        return row % n_rows

    # --- what mlx-lm asks -------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool that is charged."""
        return self._rows[0].pool if self._rows else None

    @property
    def state(self) -> Any:
        """The states of the requests' caches."""
        return [row.state for row in self._rows]

    @state.setter
    def state(self, state: Any) -> None:
        n = len(self._loose(state))  # refuses what is no state before any request has changed
        if n != len(self._rows):
            raise ValueError(
                f"[PagedBatchKVCache::state] state must be of {len(self._rows)} requests, got {n}"
            )
        for row, row_state in zip(self._rows, state, strict=True):
            row.state = row_state

    @property
    def offset(self) -> mx.array:
        """Tokens of each request, an array."""
        self._settle()
        offsets = [row.offset for row in self._rows]
        if not offsets:
            return mx.array(offsets, dtype=mx.int32)
        return self._rows[0]._group.array_of(offsets)

    def _settle(self) -> None:
        for row in self._rows:
            row._settle()

    @property
    def left_padding(self) -> mx.array:
        """Columns before the first token of each request, as the next query finds them."""
        seen = [self._before(row) for row in self._rows]
        return mx.array([max(seen, default=0) - n for n in seen], dtype=mx.int32)

    @staticmethod
    def _before(row: PagedKVCache) -> int:
        """Tokens that the next query will see before itself."""
        return row.offset if row.window is None else min(row.offset, row.window - 1)

    def size(self) -> int:
        """Tokens of the longest request that can still be attended to."""
        return max((row.size() for row in self._rows), default=0)

    def empty(self) -> bool:
        """True while no request has tokens."""
        return all(row.empty() for row in self._rows)

    def n_blocks_held(self) -> int:
        """Blocks of keys and of values that the requests have."""
        return sum(row.n_blocks_held() for row in self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return sum(row.nbytes for row in self._rows)

    def is_trimmable(self) -> bool:
        """Whether ``trim`` can drop tokens of every request."""
        return all(row.is_trimmable() for row in self._rows)

    def trim(self, n: int) -> int:
        """Drops the newest ``n`` tokens of every request, or as many as the shortest has."""
        n = checked_int("PagedBatchKVCache::trim", "n", n, 0)
        self._settle()
        if not self.is_trimmable():
            return 0
        n = min([n, *(row.offset for row in self._rows)])
        for row in self._rows:
            row.trim(n)
        return n

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask for ``N`` tokens a request that come after those here: boolean,
        (requests, 1, N, columns), where it is one."""
        self._settle()
        window = self._rows[0].window if self._rows else None
        reach = min((w for w in (window_size, window) if w), default=None)
        counts = self._counts(N)
        # Tokens stand at the right: the last of each request is in the last column.
        seen = [
            self._before(row) + n if n or row._layer is None else row._layer.n_rows
            for row, n in zip(self._rows, counts, strict=True)
        ]
        width = max(seen, default=0)
        even = len(set(seen)) <= 1 and counts == [N] * len(counts)
        if even and not return_array and (reach is None or width <= reach):
            return "causal" if N > 1 else None
        column = mx.arange(width)
        first = mx.array([width - n for n in seen])[:, None, None, None]
        query = mx.array([width - n for n in counts])[:, None, None, None] + mx.arange(N)[:, None]
        mask = (column >= first) & (column <= query)
        if reach is not None:
            mask = mask & (column > query - reach)
        # Of one query a request it hides the padding alone, which pages have not.
        alone = N == 1 and (reach is None or width <= reach)
        return _mlx.padding_mask(mask, seen) if alone else mask

    def check_invariants(self) -> None:
        """Raises RuntimeError where the books of a request do not add up. For tests."""
        for row in self._rows:
            row.check_invariants()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedBatchKVCache:
        """Forks of every request, which stay their owners', as in mlx-lm's batches that split."""
        twin = self._of([row._fork(_twin_group(row._group, memo)) for row in self._rows])
        twin._to_come = None if self._to_come is None else list(self._to_come)
        return twin

    def __repr__(self) -> str:
        return f"PagedBatchKVCache(rows={self._rows!r})"


def _twin_group(group: PagedGroup, memo: dict[Any, Any]) -> PagedGroup:
    """The group for forks of a request's layers that are copied together."""
    key = "forks of", id(group)
    if key not in memo:
        memo[key] = PagedGroup(group.pool, group.owner)
    twin: PagedGroup = memo[key]
    return twin


def _refuse_unlike(where: str, caches: Sequence[PagedKVCache]) -> None:
    """Refuses requests that cannot be in one batch."""
    pools = {id(cache.pool) for cache in caches}
    if len(pools) > 1:
        raise ValueError(f"[{where}] the caches must share one pool, got {len(pools)} pools")
    windows = {cache.window for cache in caches}
    if len(windows) > 1:
        raise ValueError(f"[{where}] the caches differ in window: {windows}")
    dims = {cache._dims for cache in caches if cache._dims is not None and not cache.empty()}
    if len(dims) > 1:
        raise ValueError(f"[{where}] the caches differ in heads or dims: {sorted(dims)}")
