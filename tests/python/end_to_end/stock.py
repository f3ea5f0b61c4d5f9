"""Tokens that mlx-lm decodes with its own caches, computed in a process of its own.

One run a model serves all tests: greedy decoding of fewer tokens gives the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step


def load(folder: Path | str) -> tuple[Any, Any]:
    return mlx_lm.load(str(folder))[:2]


def decode(model: Any, prompt: Sequence[int], max_tokens: int, cache: Any, **options: Any):
    """Greedy tokens; the end token is one like any other."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


def stock_tokens(folder: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """What ``decode`` gives with the model's own caches."""
    return decode(load(folder)[0], prompt, max_tokens, cache=None, **options)
