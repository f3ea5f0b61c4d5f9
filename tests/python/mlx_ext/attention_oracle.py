"""Attention in double precision, for every backend alike."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def doubles(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> np.ndarray:
    """``[batch, query heads, queries, dims]``; arguments as MLX takes them.

    "causal" lets the last query see the last row.
    """
    q, k, v = (doubles(x) for x in (queries, keys, values))
    ratio = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, ratio, axis=1) for x in (k, v))
    scores = np.einsum("bhqd,bhtd->bhqt", q, k) * scale
    n_queries, n_rows = scores.shape[2:]
    if isinstance(mask, str):
        assert mask == "causal"
        mask = mx.arange(n_rows - n_queries, n_rows)[:, None] >= mx.arange(n_rows)
    if mask is not None and mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, -np.inf)
    elif mask is not None:
        scores = scores + doubles(mask)
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        logits = doubles(sinks)[None, :, None, None]
        largest = np.maximum(largest, logits)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(logits - largest)
    return np.einsum("bhqt,bhtd->bhqd", weights / total, v)


def error(answer: mx.array, right: np.ndarray) -> float:
    """The norm of the difference by the norm of what is right; infinite where shapes differ."""
    if tuple(answer.shape) != right.shape:
        return float("inf")
    return float(np.linalg.norm(doubles(answer) - right) / np.linalg.norm(right))
