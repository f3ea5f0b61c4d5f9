"""KVCacheBuilder: a config put together in one expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpool.cache.base import KVCache
from kvpool.cache.config import KVCacheConfig
from kvpool.cache.factory import KVCacheFactory
from kvpool.cache.quantized import shared_caches
from kvpool.core.exceptions import QuantizerConfigError

__all__ = ["KVCacheBuilder"]


class KVCacheBuilder:
    """Builds a cache step by step; each ``with_...`` returns the builder.

    Example::

        cache = KVCacheBuilder().with_method("kivi").with_head_dim(128).build()

    The attributes of ``KVCacheConfig`` say what each setting means.
    """

    def __init__(self) -> None:
        self._config = KVCacheConfig()

    def with_method(self, method: str) -> KVCacheBuilder:
        """A name in ``kvpool.cache.METHODS``."""
        return self._with(method=method)

    def with_head_dim(self, d: int) -> KVCacheBuilder:
        """Numbers in a key and in a value."""
        return self._with(head_dim=d)

    def with_bit_width(self, inlier: int, outlier: int | None = None) -> KVCacheBuilder:
        """Bits of a key coordinate, 1..8; ``outlier`` is refused by ``build``."""
        return self._with(bit_width_inlier=inlier, bit_width_outlier=outlier)

    def with_value_bits(self, bits: int | None) -> KVCacheBuilder:
        """Bits of a value, 1..8; None: 8, or for kivi those of a key."""
        return self._with(value_bits=bits)

    def with_jl_dim(self, m: int | None) -> KVCacheBuilder:
        """Signs of a sketch, any number from 1."""
        return self._with(jl_dim=m)

    def with_n_outlier_channels(self, n: int | None) -> KVCacheBuilder:
        """Key channels kept apart."""
        return self._with(n_outlier_channels=n)

    def with_n_calib_tokens(self, n: int | None) -> KVCacheBuilder:
        """Tokens after which the channels are chosen."""
        return self._with(n_calib_tokens=n)

    def with_vectorized_attend(self, enabled: bool = True) -> KVCacheBuilder:
        """Changes nothing: attention always runs on the packed codes."""
        return self._with(enable_vectorized_attend=enabled)

    def with_outlier_two_stream(self, enabled: bool = True) -> KVCacheBuilder:
        """Keeps outlier channels apart."""
        return self._with(enable_outlier_two_stream=enabled)

    def with_fused_query_dot(self, enabled: bool = True) -> KVCacheBuilder:
        """Changes nothing: attention always runs on the packed codes."""
        return self._with(enable_fused_query_dot=enabled)

    def with_seed(self, seed: int) -> KVCacheBuilder:
        """Of the random rotations and projections."""
        return self._with(seed=seed)

    def with_precision(self, dtype: Any) -> KVCacheBuilder:
        """What exact tokens are kept in."""
        return self._with(dtype=dtype)

    def with_capacity(self, max_tokens: int | None) -> KVCacheBuilder:
        """Most tokens held; the oldest go first."""
        return self._with(capacity=max_tokens)

    def with_sliding_window(self, window_size: int | None) -> KVCacheBuilder:
        """As ``with_capacity``; the smaller of the two counts."""
        return self._with(sliding_window=window_size)

    def with_exact_window(self, n_tokens: int | None) -> KVCacheBuilder:
        """Newest tokens kept exact, for any method."""
        return self._with(exact_window=n_tokens)

    def with_unbiased_scores(self, enabled: bool | None = True) -> KVCacheBuilder:
        """Scores keep their size instead of shrinking by the codes' error."""
        return self._with(unbiased_scores=enabled)

    def with_polar_level_bits(self, bits: Sequence[int] | None) -> KVCacheBuilder:
        """Bits of polar's four levels of angles."""
        return self._with(polar_level_bits=bits)

    def with_published_choices(self, enabled: bool = True) -> KVCacheBuilder:
        """Every choice as published, where kvpool's own is better."""
        return self._with(as_published=enabled)

    def with_artifact_store(self, store: Any) -> KVCacheBuilder:
        """Refused by ``build`` unless None."""
        return self._with(store=store)

    def with_observer(self, observer: Any) -> KVCacheBuilder:
        """Refused by ``build``."""
        return self._with(observers=[*self._config.observers, observer])

    def build(self) -> KVCache:
        """The cache.

        Raises:
            QuantizerConfigError: A setting cannot work; the message names it, its limits and its
                value.
        """
        return KVCacheFactory.create(replace(self._config))

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig) -> list[KVCache]:
        """One cache a layer of ``model``, with its head_dim; they share their rotations.

        Args:
            model: A model of mlx-lm: ``layers`` (or ``model.layers``), and ``args`` with
                ``head_dim``, or ``hidden_size`` and ``num_attention_heads``.
            config: Its ``head_dim`` is not read.

        Raises:
            QuantizerConfigError: The model does not say its head_dim, or the config cannot work.
        """
        layers = getattr(model, "layers", None) or model.model.layers
        head_dim = _head_dim_of(model)
        return list(shared_caches(replace(config, head_dim=head_dim), len(layers)))

    def _with(self, **changes: Any) -> KVCacheBuilder:
        self._config = replace(self._config, **changes)
        return self


def _head_dim_of(model: Any) -> int:
    args = getattr(model, "args", None)
    args = getattr(args, "text_config", None) or args
    fields = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    if fields.get("head_dim") is not None:
        return int(fields["head_dim"])
    size, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not size or not heads:
        raise QuantizerConfigError(
            f"[KVCacheBuilder::for_model] {type(model).__name__} does not say its head_dim"
        )
    return int(size // heads)
