"""How close attention over a quantised cache comes to exact attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.cache.config import KVCacheConfig
from kvpool.cache.quantized import QuantizedKVCache

__all__ = [
    "Draw",
    "OurCache",
    "Quality",
    "attention",
    "cosines",
    "draws",
    "measure_quality",
    "quality_of",
]

_Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Quality:
    """Means over queries and seeds.

    Attributes:
        cosine: Cosine of the output to exact attention's, for normal queries: attention is spread
            over many tokens.
        peaked_cosine: The same for queries that one key answers, as most of a model's do.
        relative_error: Distance of the outputs over the exact one's norm, for normal queries.
        bytes_per_token: Bytes of the cache over tokens.
    """

    cosine: float
    peaked_cosine: float
    relative_error: float
    bytes_per_token: float


@dataclass(frozen=True)
class Draw:
    """Normal keys and values, ``(n_tokens, head_dim)``, and queries, ``(n_queries, head_dim)``."""

    keys: _Numbers
    values: _Numbers
    queries: _Numbers
    peaked_queries: _Numbers


class Filled(Protocol):
    """A cache that holds a draw's keys and values."""

    n_bytes: int

    def attend(self, queries: _Numbers) -> _Numbers:
        """Outputs for queries ``(n, head_dim)``, shaped alike."""


def attention(q: _Numbers, keys: _Numbers, values: _Numbers) -> _Numbers:
    """Exact attention in double precision: ``q`` (n, d); ``keys``, ``values`` (tokens, d)."""
    scores = q.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: _Numbers = weights @ values.astype(np.float64) / weights.sum(axis=-1, keepdims=True)
    return out


def draws(head_dim: int, n_tokens: int = 512, n_queries: int = 16, n_seeds: int = 3) -> list[Draw]:
    """What qualities are measured on; the same every time."""
    made = []
    for seed in range(n_seeds):
        random = np.random.default_rng(seed)
        keys, values = random.standard_normal((2, n_tokens, head_dim)).astype(np.float32)
        noise = random.standard_normal((2, n_queries, head_dim)).astype(np.float32)
        aimed = keys[random.integers(n_tokens, size=n_queries)] / 2
        made.append(Draw(keys, values, noise[0], noise[1] + aimed))
    return made


def cosines(cache: Filled, draw: Draw, queries: _Numbers) -> _Numbers:
    """Cosine of the cache's output to exact attention's, for each query."""
    found: _Numbers = _compared(cache, draw, queries)[0]
    return found


def _compared(cache: Filled, draw: Draw, queries: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Cosines and relative errors."""
    exact = attention(queries, draw.keys, draw.values)
    output = np.asarray(cache.attend(queries), np.float64)
    norms = np.linalg.norm(exact, axis=-1)
    return (
        (output * exact).sum(axis=-1) / (norms * np.linalg.norm(output, axis=-1)),
        np.linalg.norm(output - exact, axis=-1) / norms,
    )


def quality_of(
    fill: Callable[[Draw, int], Filled], head_dim: int = 128, n_seeds: int = 3
) -> Quality:
    """Measures any cache: ``fill(draw, seed)`` makes one that holds the draw's tokens."""
    found: list[_Numbers] = []
    peaked: list[_Numbers] = []
    errors: list[_Numbers] = []
    n_bytes = 0.0
    for seed, draw in enumerate(draws(head_dim, n_seeds=n_seeds)):
        cache = fill(draw, seed)
        n_bytes = cache.n_bytes / len(draw.keys)
        of_queries, of_errors = _compared(cache, draw, draw.queries)
        found.append(of_queries)
        errors.append(of_errors)
        peaked.append(cosines(cache, draw, draw.peaked_queries))
    return Quality(float(np.mean(found)), float(np.mean(peaked)), float(np.mean(errors)), n_bytes)


class OurCache:
    """A cache of ours that holds a draw's keys and values."""

    def __init__(self, config: KVCacheConfig, draw: Draw) -> None:
        self._cache = QuantizedKVCache(config)
        self._cache.append(draw.keys[None], draw.values[None])
        self.n_bytes = self._cache.memory_bytes()

    def attend(self, queries: _Numbers) -> _Numbers:
        output: _Numbers = self._cache.attend(queries[None])[0]
        return output


def measure_quality(config: KVCacheConfig, n_seeds: int = 3) -> Quality:
    """Measures a method on 512 normal tokens; takes some milliseconds a seed.

    Each seed takes a rotation of its own. Raises QuantizerConfigError where the config cannot work.
    """
    return quality_of(
        lambda draw, seed: OurCache(replace(config, seed=config.seed + seed), draw),
        config.head_dim,
        n_seeds,
    )
