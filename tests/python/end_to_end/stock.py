"""Tokens that mlx-lm decodes with its own caches, computed in a process of its own.

One run a model serves all tests: greedy decoding of fewer tokens gives the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.cli.blas import prefer_openblas

prefer_openblas()  # before MLX is imported

import mlx.core as mx  # noqa: E402
from kvpool.cli.loading import load  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402

SMOLLM2_TOKENS = 300
# Gemma's window is lowered in a copy of the model, so that few tokens go past it.
GEMMA3_WINDOW = 32
GEMMA3_TOKENS = 30
GEMMA3_PREFILL_STEP = 16


def decode(model: Any, prompt: Sequence[int], max_tokens: int, cache: Any, **options: Any):
    """Greedy tokens; the end token is one like any other."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


def stock_tokens(folder: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """What ``decode`` gives with the model's own caches."""
    return decode(load(folder, fp32=True)[0], prompt, max_tokens, cache=None, **options)
