"""How many blocks a model's caches take: the arithmetic behind ``PoolConfig.for_model``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool._kv_format import KVFormat
from kvpool.formats import FORMATS
from kvpool.memory._config import checked_int

_WHERE = "PoolConfig::for_model"
# Cache classes that build_pooled_caches replaces; all others stay as the model makes them.
_PLAIN = "KVCache"
_WINDOW = "RotatingKVCache"


class TokenRows(NamedTuple):
    """What a token adds to a layer's keys or to its values."""

    heads: int
    dims: int
    element_size: int

    def n_bytes(self, format: str, block_size: int) -> int:
        """Bytes of them in a page of ``format``; "auto" for as they come."""
        if format == "auto":
            return self.heads * self.dims * self.element_size
        return FORMATS[format].page_bytes(self.heads, block_size, self.dims) // block_size


@dataclass(frozen=True)
class PooledLayer:
    """One layer: bytes of a token's keys and values together, and its window if it has one."""

    bytes_per_token: int
    window: int | None = None

    def rows(self, tokens: int, prefill_step: int) -> int:
        """Rows kept of ``tokens``: a window layer has window + chunk - 1 of them after a chunk."""
        return tokens if self.window is None else min(tokens, self.window + prefill_step - 1)


@dataclass(frozen=True)
class ModelSizing:
    """What a pool sized for a model holds.

    Attributes:
        n_blocks: Blocks of keys and values, all layers and sequences.
        block_size: Token slots in a block.
        n_sequences: Sequences held at one time.
        tokens_per_sequence: Tokens that each keeps; None where every layer has a window, which
            holds sequences of any length.
        n_bytes: Bytes of keys and values when every block is filled.
        bytes_per_token: Bytes of one token in all pooled layers.
        layers: The pooled layers, in the model's order.
    """

    n_blocks: int
    block_size: int
    n_sequences: int
    tokens_per_sequence: int | None
    n_bytes: int
    bytes_per_token: int
    layers: tuple[PooledLayer, ...]

    def __str__(self) -> str:
        windows = sum(layer.window is not None for layer in self.layers)
        tokens = self.tokens_per_sequence
        length = "any number of tokens" if tokens is None else f"{tokens:,} tokens"
        sequences = "1 sequence" if self.n_sequences == 1 else f"{self.n_sequences:,} sequences"
        return (
            f"{self.n_blocks:,} blocks of {self.block_size} tokens hold {sequences} of {length} in "
            f"{len(self.layers)} layers"
            + (f" ({windows} with a window)" if windows else "")
            + f": {self.n_bytes:,} bytes, {self.bytes_per_token:,} a token"
        )


def parse_memory(memory: str | int) -> int:
    """Bytes meant by an int or by a string like "512MB", "1.5 GiB" or "4096"."""
    if not isinstance(memory, str):
        return checked_int(_WHERE, "memory", memory, 1)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", memory.upper())
    if match is None:
        raise ValueError(f"[{_WHERE}] memory must be like '4GB', '512MiB' or 4096, got {memory!r}")
    number, unit, binary = match.groups()
    scale = (1024 if binary else 1000) ** ("KMGT".index(unit) + 1 if unit else 0)
    return checked_int(_WHERE, "memory", int(float(number) * scale), 1)


def size_for_model(
    model: Any,
    *,
    memory: str | int | None,
    max_tokens: int | None,
    n_sequences: int,
    block_size: int,
    prefill_step: int,
    paged: bool = False,
    format: str = "auto",
) -> ModelSizing:
    """The pool for ``max_tokens`` of each sequence, or the largest that fits in ``memory``."""
    if (memory is None) == (max_tokens is None):
        raise TypeError(
            f"[{_WHERE}] give memory or max_tokens, one of the two, "
            f"got memory={memory!r} and max_tokens={max_tokens!r}"
        )
    kept = KVFormat.checked(_WHERE, "format", format, auto=True)
    if set(kept) != {"auto"} and not paged:
        raise ValueError(f"[{_WHERE}] format needs paged=True, got {format!r}")
    layers = pooled_layers(model, kept, block_size)

    def blocks_of(layer: PooledLayer, tokens: int) -> int:
        n_blocks = -(-layer.rows(tokens, prefill_step) // block_size)
        if paged and layer.window is not None:
            # The window begins inside a block, and the step before may still be reading one more.
            n_blocks = min(n_blocks + 2, -(-tokens // block_size))
        return n_blocks

    def bytes_for(tokens: int) -> int:
        per_sequence = sum(blocks_of(layer, tokens) * layer.bytes_per_token for layer in layers)
        return per_sequence * block_size * n_sequences

    if max_tokens is not None:
        tokens = checked_int(_WHERE, "max_tokens", max_tokens, 1)
        bounded = True
    else:
        assert memory is not None
        budget = parse_memory(memory)
        longest = max((layer.window or 0) + prefill_step for layer in layers)
        bounded = any(layer.window is None for layer in layers) or bytes_for(longest) > budget
        tokens = _longest_within(budget, bytes_for, block_size) if bounded else longest
        if tokens == 0:
            raise ValueError(
                f"[{_WHERE}] memory={memory!r} is too little: one block in each of {len(layers)} "
                f"layers for {n_sequences} sequences takes {bytes_for(block_size):,} bytes"
            )
    n_blocks = 2 * n_sequences * sum(blocks_of(layer, tokens) for layer in layers)
    return ModelSizing(
        n_blocks=n_blocks,
        block_size=block_size,
        n_sequences=n_sequences,
        tokens_per_sequence=tokens if bounded else None,
        n_bytes=bytes_for(tokens),
        bytes_per_token=sum(layer.bytes_per_token for layer in layers),
        layers=tuple(layers),
    )


def _longest_within(budget: int, bytes_for: Callable[[int], int], block_size: int) -> int:
    """The most tokens, a multiple of ``block_size``, whose bytes are within ``budget``."""
    low, high = 0, 1
    while bytes_for(high * block_size) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if bytes_for(middle * block_size) <= budget:
            low = middle
        else:
            high = middle
    return low * block_size


def pooled_layers(model: Any, kept: KVFormat, block_size: int) -> list[PooledLayer]:
    """The layers whose cache draws on the pool, with the bytes of their keys and values."""
    caches = model.make_cache() if hasattr(model, "make_cache") else None
    if caches is None:
        windows: list[int | None] = [None] * len(_layers_of(model))
        pooled = list(range(len(windows)))
    else:
        windows = [getattr(cache, "max_size", None) for cache in caches]
        pooled = [i for i, c in enumerate(caches) if type(c).__name__ in (_PLAIN, _WINDOW)]
    if not pooled:
        raise ValueError(f"[{_WHERE}] model {type(model).__name__} has no layer to pool")
    found = _probe(model, caches, pooled) or [(_from_args(model),) * 2] * len(pooled)
    sizes = [
        sum(rows.n_bytes(f, block_size) for rows, f in zip(both, kept, strict=True) if rows)
        for both in found
    ]
    # A layer that reads another one's keys and values leaves its own cache empty.
    return [PooledLayer(size, windows[i]) for i, size in zip(pooled, sizes, strict=True) if size]


def _layers_of(model: Any) -> Sequence[Any]:
    for holder in (model, getattr(model, "model", None)):
        layers: Sequence[Any] | None = getattr(holder, "layers", None)
        if layers is not None and len(layers) > 0:
            return layers
    raise ValueError(f"[{_WHERE}] model {type(model).__name__} has neither make_cache nor layers")


def _probe(
    model: Any, caches: Sequence[Any] | None, pooled: Sequence[int]
) -> list[tuple[TokenRows | None, TokenRows | None]] | None:
    """A token's keys and values by feeding one without evaluating it; None where that cannot be
    done.

    MLX is lazy, so shapes and types come for the price of building the graph, whatever the
    architecture: latent attention, layers of unequal size, keys of another type than the weights.
    """
    nn = sys.modules.get("mlx.nn")
    if nn is None or not isinstance(model, nn.Module):
        return None
    import mlx.core as mx

    if caches is None:
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(model)
    try:
        model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # it wants more than tokens

    def rows(array: Any) -> TokenRows | None:
        if array is None:
            return None
        return TokenRows(int(array.shape[1]), int(array.shape[3]), int(array.dtype.size))

    return [(rows(caches[i].keys), rows(caches[i].values)) for i in pooled]


def _from_args(model: Any) -> TokenRows:
    """A token's keys, or values, of one layer from the model's own description of itself."""
    args = next((a for a in (getattr(model, n, None) for n in ("args", "config")) if a), None)
    nested = _get(args, "text_config")

    def number(*names: str) -> int | None:
        for name in names:
            value = _get(args, name) or _get(nested, name)
            if value:
                return int(value)
        return None

    heads = number("num_attention_heads", "n_heads", "n_head")
    kv_heads = number("num_key_value_heads", "n_kv_heads") or heads
    head_dim = number("head_dim")
    hidden = number("hidden_size", "dim", "n_embd")
    if head_dim is None and hidden is not None and heads:
        head_dim = hidden // heads
    if kv_heads is None or head_dim is None:
        raise ValueError(
            f"[{_WHERE}] model {type(model).__name__} tells neither num_key_value_heads nor "
            "head_dim in args or config"
        )
    dtype = _get(args, "torch_dtype") or _get(args, "dtype")
    return TokenRows(kv_heads, head_dim, _element_size(dtype))


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def _element_size(dtype: Any) -> int:
    """Bytes of an element of an MLX or NumPy type or a type's name; 2 where nothing is said."""
    size = getattr(dtype, "size", None) or getattr(dtype, "itemsize", None)
    if isinstance(size, int):
        return size
    return 4 if "float32" in str(dtype) else 2
