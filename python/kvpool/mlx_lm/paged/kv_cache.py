"""PagedKVCache: one layer of a request whose tokens lie in pool blocks and are read there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from kvpool._kv_format import KVFormat
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import (
    checked_buffers,
    checked_int,
    checked_owner,
    checked_pool,
)
from kvpool.mlx_lm.caches._request_cache import RequestCache
from kvpool.mlx_lm.paged._group import PagedGroup
from kvpool.mlx_lm.paged.age_policy import AgePolicy
from kvpool.mlx_lm.paged.page_format import PageFormat

if TYPE_CHECKING:
    from kvpool.mlx_lm.paged.batch_kv_cache import PagedBatchKVCache


@dataclass(frozen=True)
class Snapshot:
    """What ``state`` says of the tokens: enough to make the cache again, and nothing that MLX
    evaluates or mlx-lm writes to a file. It holds the blocks as a reader does."""

    keys: Any
    values: Any
    format: PageFormat
    window: int | None


class PagedKVCache(RequestCache):
    """A drop-in replacement for ``mlx_lm.models.cache.KVCache`` over the blocks of a pool.

    Tokens are appended in place: growth copies nothing, and attention reads them where they lie
    where the hook (``kvpool.install_attention``) is installed. What ``update_and_fetch`` returns is
    gathered when somebody evaluates it, so models that the hook does not reach are right, too.

    Whoever holds arrays from here that are not evaluated yet keeps their tokens: trimming, copying,
    releasing or dropping the cache changes nothing of what they will show.

    Caches made by ``build_paged_caches`` are a group: see there.

    Args:
        pool: The pool to draw on.
        owner: Whom the blocks belong to.
        format: What pages hold: "fp32", "fp16", "bf16", "int8", "int4", "int3", "int2", or "auto"
            for the type that keys and values come in. Two of them with a slash are for keys and for
            values: "int8/int4".
        age_policy: What older tokens are kept in; an ``AgePolicy``, or its text.
        method: A quantisation method (``kvpool.cache.METHODS``) that full blocks are encoded by.
        bits: Bits of a number with ``method``.
        window: Tokens that a query may see, its own included; None for all. Blocks that no query
            will see any more go back to the pool.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or two of them contradict each other.
    """

    _group: PagedGroup
    _format: PageFormat
    _window: int | None
    # The tokens (kvpool::cache::PagedLayer and its arrays); None while there never were any.
    _layer: Any
    # (heads, key dims, value dims) that the layer was made for.
    _dims: tuple[int, int, int] | None
    # Keys, values and offset of a cache that has no pool yet.
    _loose: tuple[Any, Any, int] | None
    # Keys or values that were set while the other ones are still to come.
    _half: tuple[Any, Any] | None

    def __init__(
        self,
        pool: BlockPoolAllocator,
        owner: int = -1,
        *,
        format: str = "auto",
        age_policy: AgePolicy | str | None = None,
        method: str | None = None,
        bits: int | None = None,
        window: int | None = None,
    ) -> None:
        where = "PagedKVCache"
        if window is not None:
            window = checked_int(where, "window", window, 1)
        page_format = PageFormat.checked(where, format, age_policy, method, bits)
        group = PagedGroup(checked_pool(where, pool), checked_owner(where, owner))
        self._start(group, page_format, window)

    def _start(self, group: PagedGroup, page_format: PageFormat, window: int | None) -> None:
        self._group, self._format, self._window = group, page_format, window
        self._layer = self._dims = self._loose = self._half = None
        group.add(self)

    @classmethod
    def _member(
        cls, group: PagedGroup, page_format: PageFormat, window: int | None = None
    ) -> PagedKVCache:
        cache = cls.__new__(cls)
        cache._start(group, page_format, window)
        return cache

    # --- life -------------------------------------------------------------------------------------

    def _saved(self) -> tuple[Any, ...]:
        """What a file needs to make the cache again."""
        self._settle()
        return *self.keys_and_values(), self.offset, self._window, *self._format.saved()

    @classmethod
    def _from_saved(cls, saved: Any) -> PagedKVCache:
        keys, values, offset, window, *page_format = saved
        cache = cls._member(PagedGroup(None, 0), PageFormat.from_saved(page_format), window)
        cache.state = keys, values, offset
        return cache

    @classmethod
    def _unattached(cls, state: Any) -> PagedKVCache:
        return cls._member(PagedGroup(None, 0), PageFormat())

    def _attach_to(self, group: PagedGroup) -> Callable[[], None]:
        before = self._group, self._loose

        def take_back() -> None:
            (self._group, self._loose), self._layer = before, None

        self._group, self._loose = group, None
        group.add(self)
        try:
            if before[1] is not None:
                self._fill(*before[1])
        except BaseException:
            take_back()
            raise
        return take_back

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A fork: it shares every block until one side writes to it, and copies nothing now.

        Caches that are copied together are one group, with an owner of its own
        (``pool.new_owner()``).
        """
        return self._fork(copy.deepcopy(self._group, memo))

    def _forget(self) -> None:
        """Empties the cache, also of tokens that were never charged."""
        self._loose = None
        if self._layer is not None:
            self._layer.reset()

    def _fork(self, group: PagedGroup) -> PagedKVCache:
        twin = self._member(group, self._format, self._window)
        if self._layer is not None:
            twin._layer, twin._dims = self._layer.fork(group.native), self._dims
        twin._loose = self._loose
        return twin

    # --- the decode path --------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends tokens and returns all that a query may see, gathered when they are evaluated.

        Args:
            keys: New keys, (1, heads, tokens, key dims).
            values: New values, (1, heads, tokens, value dims).

        Returns:
            The keys and the values so far, (1, heads, tokens, dims) each.

        Raises:
            BlockPoolExhaustedError: The tokens do not fit, in blocks or in bytes; no cache of the
                group has moved where this is the first that would have. ``tokens_that_fit`` says
                how many do.
            ValueError: A shape does not fit, or the blocks were freed behind the cache
                (``pool.free_all``). Nothing has changed.
            TypeError: Something else than arrays.
        """
        layer = self._layer
        try:
            if layer is None:
                layer = self._begin(keys, values)
            fetched: tuple[mx.array, mx.array] = layer.update_and_fetch(keys, values)
            return fetched
        except BlockPoolExhaustedError:
            self._group.roll_back()  # another request of this owner took what was reserved
            raise
        except (TypeError, ValueError):
            checked_buffers("PagedKVCache::update_and_fetch", keys, values)
            if keys.shape[2] == 0:
                return (keys, values) if self.empty() else self.keys_and_values()
            if layer is None or layer.offset > 0 or self._dims == _dims(keys, values):
                raise
        self._layer = None  # an empty cache takes any shape
        return self.update_and_fetch(keys, values)

    def _begin(self, keys: Any, values: Any) -> Any:
        """The layer for tokens of these shapes and types."""
        where = "PagedKVCache::update_and_fetch"
        self._refuse_unattached("update_and_fetch")
        checked_buffers(where, keys, values)
        for name, array in (("keys", keys), ("values", values)):
            if not mx.issubdtype(array.dtype, mx.floating):
                raise ValueError(f"[{where}] {name} must be of floats, got {array.dtype}")
        dims = _dims(keys, values)
        # Layers whose shapes nobody knew are taken to be alike, so that a step moves all or none.
        for cache in self._group.members():
            if cache._layer is None:
                cache._shape(dims, (keys.dtype, values.dtype))
        return self._layer

    def _shape(self, dims: tuple[int, int, int], dtypes: tuple[mx.Dtype, mx.Dtype]) -> None:
        """Makes the layer, for (heads, key dims, value dims) and the types of keys and values."""
        native, pool = self._group.native, self.pool
        assert native is not None and pool is not None
        size = pool.config.block_size
        self._layer = self._format.make_layer(native, dims, dtypes, self._window, size)
        self._dims = dims

    def _fill(self, keys: Any, values: Any, offset: int) -> None:
        """Puts tokens in place of those that there are; ``keys`` None for none."""
        if self._layer is not None:
            self._layer.reset()
        if keys is None:
            return
        if self._layer is None:
            self._begin(keys, values)
        self._layer.adopt(keys, values, offset)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What ``update_and_fetch`` last returned, anew; (None, None) while empty."""
        if self._loose is not None:
            return self._loose[:2]
        fetched = None if self._layer is None else self._layer.keys_and_values()
        return (None, None) if fetched is None else fetched

    @property
    def keys(self) -> Any:
        """The keys, gathered when they are evaluated; None while empty. Setting them or the values
        replaces what is there."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._replace(keys, (self._half or self.keys_and_values())[1])

    @property
    def values(self) -> Any:
        """The values, as ``keys``."""
        return self.keys_and_values()[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._replace((self._half or self.keys_and_values())[0], values)

    def _replace(self, keys: Any, values: Any) -> None:
        """Puts keys and values in place of those that there are, one at a time maybe."""
        offset = self.offset
        whole = keys is not None and values is not None and keys.shape[2] == values.shape[2]
        self._half = None if whole or keys is values else (keys, values)
        if not whole:
            self._put(None, None, 0)
            return
        checked_buffers("PagedKVCache::keys", keys, values)
        self._put(keys, values, max(offset, keys.shape[2]) if self._window else keys.shape[2])

    # --- what mlx-lm asks -------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """(order token, opaque handle, offset): what there is to evaluate, and what
        ``from_state`` makes the cache from. It neither gathers nor shows the pages; mlx-lm's own
        ``save_prompt_cache`` refuses it, ``kvpool.save_prompt_cache`` does not ask for it."""
        keys, values = self.keys_and_values()
        if keys is None:
            return None, None, 0
        order = None if self._layer is None else self._layer.order
        return order, Snapshot(keys, values, self._format, self._window), self.offset

    @state.setter
    def state(self, state: Any) -> None:
        where = "PagedKVCache::state"
        first, second, *rest = self._parts_of(state, least=2)
        if isinstance(second, Snapshot):
            if self.pool is None:
                self._format, self._window = second.format, second.window
            first, second = second.keys, second.values
        if first is None and second is None:
            offset = checked_int(where, "offset", rest[0] if rest else 0, 0, 0)
        else:
            checked_buffers(where, first, second)
            n_rows = first.shape[2]
            most = n_rows if self._window is None else 2**62
            offset = checked_int(where, "offset", rest[0] if rest else n_rows, 0, most)
            if offset < n_rows:
                first, second = first[:, :, :offset], second[:, :, :offset]
        self._put(first, second, offset)

    def _put(self, keys: Any, values: Any, offset: int) -> None:
        if self.pool is None:
            self._loose = None if offset == 0 else (keys, values, offset)
        else:
            self._fill(keys if offset else None, values, offset)

    @property
    def window(self) -> int | None:
        """Tokens that a query may see; None for all."""
        return self._window

    @property
    def offset(self) -> int:
        """Tokens appended and not trimmed, those behind a window included."""
        if self._layer is None:
            return 0 if self._loose is None else self._loose[2]
        # Some models read it before they ask for a mask: to them a new step begins.
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.startswith("mlx_lm.models."):
            self._settle()
        return self._layer.offset

    def _settle(self) -> None:
        """Takes the group's last step back where it was cut short and this layer had moved."""
        if self._layer is not None and self._layer.is_torn:
            self._group.roll_back()

    def size(self) -> int:
        """Tokens that can still be attended to."""
        return self.offset if self._window is None else min(self.offset, self._window)

    def empty(self) -> bool:
        """True while there are no tokens."""
        return self.offset == 0

    def n_blocks_held(self) -> int:
        """Blocks of keys and of values that this cache has."""
        return 0 if self._layer is None else self._layer.n_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, in whatever formats they are."""
        if self._loose is not None:
            return self._loose[0].nbytes + self._loose[1].nbytes
        return 0 if self._layer is None else self._layer.nbytes

    def is_trimmable(self) -> bool:
        """Whether ``trim`` can drop tokens: not where a window has given blocks back."""
        return self._layer is None or self._layer.is_trimmable

    def trim(self, n: int) -> int:
        """Drops the newest ``n`` tokens, or as many as there are, and returns how many.

        Blocks that are empty afterwards go back to the pool. Caches of one group that hold unequal
        numbers of tokens are all trimmed by what the shortest can drop.

        Raises:
            ValueError: ``n`` is negative.
            TypeError: ``n`` is no int.
        """
        n = checked_int("PagedKVCache::trim", "n", n, 0)
        if self._loose is not None:
            keys, values, offset = self._loose
            if offset > keys.shape[2]:
                return 0
            n = min(n, offset)
            left = offset - n
            self._put(keys[:, :, :left], values[:, :, :left], left)
            return n
        if self._layer is None:
            return 0
        self._settle()
        return self._layer.trim(n)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """mlx-lm's attention mask for ``N`` tokens that come after those here."""
        self._settle()  # a model asks for its mask at the start of a step
        offset = self.offset
        if self._window is None:
            return create_attention_mask(N, offset, return_array, window_size)
        window = min(window_size or self._window, self._window)
        before = min(offset, self._window - 1)
        if N > 1:
            if before + N > window or return_array:
                return create_causal_mask(N, before, window_size=window)
            return "causal"
        if before + 1 <= window:
            return None
        return mx.arange(before + 1) >= before + 1 - window

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PagedBatchKVCache:
        """A batch of forks of these caches: nothing is copied, and each stays its owner's.

        mlx-lm calls it a layer at a time; the forks of a request's layers are one group.

        Raises:
            TypeError: A cache is of another kind.
            ValueError: The caches are over different pools, or differ in window, heads or dims.
        """
        from kvpool.mlx_lm.paged.batch_kv_cache import PagedBatchKVCache

        return PagedBatchKVCache._merged(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """A cache of the same tokens in pages of ``bits`` bits, which takes this one's place.

        It is charged on its own; this cache keeps its blocks until it is dropped and nobody reads
        them any more. A cache that has such pages already is returned as it is: mlx-lm asks again
        at every step.

        Raises:
            BlockPoolExhaustedError: The pool has no room for both; this cache is as it was.
            ValueError: ``group_size`` is not 64, which pages have, or there are no pages of so many
                bits.
        """
        where = "PagedKVCache::to_quantized"
        if checked_int(where, "group_size", group_size, 1) != 64:
            raise ValueError(f"[{where}] group_size must be 64, got {group_size}")
        if checked_int(where, "bits", bits, 1) not in (2, 3, 4, 8):
            raise ValueError(f"[{where}] bits must be 2, 3, 4 or 8, got {bits}")
        width = f"int{bits}"
        narrow_format = PageFormat(KVFormat(width, width))
        if self._format == narrow_format:
            return self
        self._settle()
        narrow = self._member(self._group, narrow_format, self._window)
        narrow._put(*self.keys_and_values(), self.offset)
        return narrow

    def check_invariants(self) -> None:
        """Raises RuntimeError where the books of this cache's group do not add up. For tests."""
        if self._group.native is not None:
            self._group.native.check_invariants()

    def __repr__(self) -> str:
        parts = [f"owner={self.owner}", f"offset={self.offset}"]
        if self._window is not None:
            parts.append(f"window={self._window}")
        if kept := str(self._format):
            parts.append(kept)
        return f"PagedKVCache({', '.join(parts)})"


def _dims(keys: mx.array, values: mx.array) -> tuple[int, int, int]:
    return keys.shape[1], keys.shape[3], values.shape[3]


# Where mlx-lm's load_prompt_cache and ours look the class up.
stock_cache.PagedKVCache = PagedKVCache
