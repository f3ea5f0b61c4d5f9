"""PageFormat: what the pages of a cache hold, young and old."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvpool import _mlx
from kvpool._kv_format import KVFormat
from kvpool.mlx_lm.caches._arguments import checked_int, format_name
from kvpool.mlx_lm.paged.age_policy import AgePolicy

# Methods whose bits are those of the values, too.
_WIDTH_OF_BOTH = ("kivi", "spectral")
_FLOATS = ("fp32", "fp16", "bf16")
_AUTO = KVFormat("auto", "auto")


@dataclass(frozen=True)
class PageFormat:
    """How tokens are kept, as ``build_paged_caches`` is told.

    Attributes:
        format: Of new tokens' keys and values; "auto" for the type that they come in.
        age_policy: What becomes of older ones.
        method, bits: A quantisation method that encodes full blocks instead.
    """

    format: KVFormat = _AUTO
    age_policy: AgePolicy | None = None
    method: str | None = None
    bits: int | None = None

    @classmethod
    def checked(
        cls, where: str, format: Any, age_policy: Any, method: Any, bits: Any
    ) -> PageFormat:
        """The arguments of a user, or an error that names the one that is wrong."""
        pair = KVFormat.checked(where, "format", format, auto=True)
        if isinstance(age_policy, str):
            age_policy = AgePolicy.parse(age_policy)
        if age_policy is not None:
            if not isinstance(age_policy, AgePolicy):
                raise TypeError(f"[{where}] age_policy must be an AgePolicy, got {age_policy!r}")
            if method is not None:
                raise ValueError(f"[{where}] give age_policy or method, not both")
            if age_policy.first is not None:
                first = KVFormat.checked(where, "age_policy", age_policy.first, auto=True)
                if pair not in (_AUTO, first):
                    raise ValueError(
                        f"[{where}] format is {format!r}, but age_policy begins with "
                        f"{age_policy.first!r}"
                    )
                pair = first
        if method is None:
            if bits is not None:
                raise ValueError(f"[{where}] bits needs a method, got bits={bits!r} alone")
        else:
            from kvpool.cache import METHODS

            if method not in METHODS:
                known = ", ".join(METHODS)
                raise ValueError(f"[{where}] method must be one of {known}, got {method!r}")
            bits = checked_int(where, "bits", 3 if bits is None else bits, 1, 8)
        return cls(pair, age_policy, method, bits)

    def make_layer(
        self,
        group: _mlx.PagedGroup,
        dims: tuple[int, int, int],
        dtypes: tuple[mx.Dtype, mx.Dtype],
        window: int | None,
        block_size: int,
    ) -> _mlx.PagedLayer:
        """A layer in ``group`` for (heads, key dims, value dims) and keys and values of these
        types.

        Raises:
            ValueError: The method cannot encode such pages.
        """
        heads, key_dim, value_dim = dims
        recent = [
            format_name(dtype) if name == "auto" else name
            for name, dtype in zip(self.format, dtypes, strict=True)
        ]
        if self.method is None:
            policy = self.age_policy
            keys, values = (
                _mlx.StreamFormat(name, policy.stream_steps(stream, name) if policy else [])
                for stream, name in enumerate(recent)
            )
        else:
            assert self.bits is not None
            of_keys, of_values = (
                _method(self.method, self.bits, dim, name)
                for dim, name in zip((key_dim, value_dim), recent, strict=True)
            )
            keys = _mlx.method_keys(of_keys, heads, block_size, recent[0])
            values = _mlx.method_values(of_values, heads, block_size, recent[1])
        return _mlx.PagedLayer(group, heads, key_dim, value_dim, keys, values, window or 0)

    def __str__(self) -> str:
        """The options that are not the default, as a call would give them."""
        if self.age_policy is not None:
            first = [] if self.format == _AUTO or self.age_policy.first else [self.format]
            return ", ".join([*(f"format={f}" for f in first), f"age_policy={self.age_policy}"])
        parts = [] if self.format == _AUTO else [f"format={self.format}"]
        if self.method is not None:
            parts += [f"method={self.method}", f"bits={self.bits}"]
        return ", ".join(parts)

    def saved(self) -> tuple[str, str | None, str | None, int | None]:
        """Plain values for a file."""
        policy = None if self.age_policy is None else str(self.age_policy)
        return str(self.format), policy, self.method, self.bits

    @classmethod
    def from_saved(cls, saved: Any) -> PageFormat:
        """Takes ``saved`` back."""
        return cls.checked("load_prompt_cache", *saved)


@lru_cache(maxsize=16)
def _method(name: str, bits: int, dim: int, recent: str) -> Any:
    """A method for vectors of ``dim`` numbers, keys and values of equal width, that come in format
    ``recent``. Immutable: all layers of a model share it."""
    from kvpool.cache import KVCacheConfig
    from kvpool.cache.quantized import make_native_method

    value_bits = None if name in _WIDTH_OF_BOTH else bits
    config = KVCacheConfig(
        name,
        head_dim=dim,
        bit_width_inlier=bits,
        value_bits=value_bits,
        # kivi keeps the ends of its grids in it; bf16 numbers may pass fp16's range.
        dtype=recent if recent in _FLOATS else None,
    )
    return make_native_method(config)
