"""What the tests of caches measure against."""

from __future__ import annotations

import numpy as np


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q K / sqrt(head_dim)) V in double precision; q is (head_dim,) or (n, head_dim)."""
    scores = q.astype(float) @ keys.astype(float).T / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ values.astype(float) / weights.sum(axis=-1, keepdims=True)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over rows."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean((a * b).sum(axis=-1) / norms))
