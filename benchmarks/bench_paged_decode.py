"""A real model's decode at long contexts: paged caches against mlx-lm's own.

    python benchmarks/bench_paged_decode.py

SmolLM2-135M with bf16 weights. The caches are filled with random keys and values: what a token
costs does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from harness import OURS, Task, main
from kvpool import attention, build_paged_caches
from kvpool.cli.loading import load
from kvpool.memory import BlockPoolAllocator, PoolConfig
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

STEPS = 4
BLOCK_SIZE = 64
#: Tokens of context to the ratio to reach.
REACH = {4096: 1.6, 8000: 2.2}
FORMATS = ("bf16", "int8", "int4")


def fill(caches: list[Any], n_tokens: int, heads: int, dims: int) -> None:
    for number, cache in enumerate(caches):
        mx.random.seed(number)
        keys = mx.random.normal((1, heads, n_tokens, dims)).astype(mx.bfloat16)
        values = mx.random.normal((1, heads, n_tokens, dims)).astype(mx.bfloat16)
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)


def decode(model: Any, caches: list[Any]) -> Callable[[], float]:
    """Seconds a token of STEPS greedy ones, after which the caches are trimmed back."""

    def run() -> float:
        token = mx.array([[1]])
        start = perf_counter()
        for _ in range(STEPS):
            token = mx.argmax(model(token, cache=caches)[:, -1, :], axis=-1)[None]
            mx.eval(token)
        seconds = (perf_counter() - start) / STEPS
        for cache in caches:
            cache.trim(STEPS)
        return seconds

    return run


def tasks() -> Sequence[Task]:
    model, _ = load("smollm2")
    dequantize_model(model)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    heads, dims = (
        model.args.num_key_value_heads,
        model.args.hidden_size // model.args.num_attention_heads,
    )

    made = []
    for n_tokens, reach in REACH.items():
        stock = make_prompt_cache(model)
        fill(stock, n_tokens, heads, dims)
        for name in FORMATS:
            n_blocks = 2 * len(stock) * (n_tokens // BLOCK_SIZE + 2)
            pool = BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=n_blocks))
            caches = build_paged_caches(model, pool, 1, format=name)
            fill(caches, n_tokens, heads, dims)
            ours = decode(model, caches)

            def hooked(run: Callable[[], float] = ours) -> float:
                with attention():
                    return run()

            made.append(
                Task(
                    f"a token at {n_tokens} tokens of context, {name}",
                    "ms",
                    {OURS: hooked, "mlx-lm": decode(model, stock)},
                    reach=reach if name == "bf16" else None,
                )
            )
    return made


if __name__ == "__main__":
    main("SmolLM2-135M decode, bf16 weights", tasks)
