"""Attention over pages against MLX's own, in fp16: 32 heads, 8 kv heads of 128 numbers.

    python benchmarks/bench_paged_attention.py [--only decode] [--json FILE]

Layers take turns, so that keys and values come from memory and not from a processor cache. MLX's
attention on a CPU uses one thread and contiguous arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from harness import OURS, Task, main
from kvpool._mlx_module import extension
from kvpool.memory import BlockPoolAllocator, PoolConfig
from mlx_lm.models.base import quantized_scaled_dot_product_attention

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
BLOCK_SIZE = 64
# Keys and values of a rotation in fp16: well above a processor's caches.
ROTATION_BYTES = 256 << 20
#: Tokens to what one thread is to reach with AVX-512.
ONE_THREAD = {512: 30.0, 4096: 30.0, 32768: 25.0}
STOCK = "mlx fp16"


def random(*shape: int) -> Any:
    return mx.random.normal(shape).astype(mx.float16)


def n_layers(n_tokens: int) -> int:
    layer = n_tokens * KV_HEADS * DIM * 2 * 2
    return max(2, min(64, ROTATION_BYTES // layer))


class Rotation:
    """Layers of `n_tokens` each, ours in `format` or MLX's arrays, and a query for all."""

    def __init__(self, n_tokens: int, n_queries: int = 1) -> None:
        self.n_layers = n_layers(n_tokens) if n_queries == 1 else 2
        self.n_tokens = n_tokens
        self.n_queries = n_queries
        mx.random.seed(n_tokens)
        self.queries = random(1, Q_HEADS, n_queries, DIM)
        self.mask = "causal" if n_queries > 1 else None
        self.rows = [
            (random(1, KV_HEADS, n_tokens, DIM), random(1, KV_HEADS, n_tokens, DIM))
            for _ in range(self.n_layers)
        ]
        mx.eval(self.queries, self.rows)

    def timed(self, attend: Callable[[int], Any], layers: int | None = None) -> float:
        layers = layers or self.n_layers
        start = perf_counter()
        mx.eval([attend(i) for i in range(layers)])
        return (perf_counter() - start) / layers

    def stock(self, layers: int | None = None) -> Callable[[], float]:
        def attend(i: int) -> Any:
            return mx.fast.scaled_dot_product_attention(
                self.queries, *self.rows[i], scale=SCALE, mask=self.mask
            )

        return lambda: self.timed(attend, layers)

    def stock_quantized(self, bits: int) -> Callable[[], float]:
        packed: list[Any] = []

        def attend(i: int) -> Any:
            queries = self.queries + 0  # it scales them in place
            return quantized_scaled_dot_product_attention(
                queries, *packed[i], scale=SCALE, mask=self.mask, group_size=64, bits=bits
            )

        def contestant() -> float:
            if not packed:
                for pair in self.rows[:2]:
                    packed.append([mx.quantize(rows, group_size=64, bits=bits) for rows in pair])
                mx.eval(packed)
            return self.timed(attend, 2)

        return contestant

    def paged(self, format: str, n_threads: int) -> Callable[[], float]:
        layers: list[Any] = []

        def attend(i: int) -> Any:
            keys, values = layers[i].keys_and_values()
            return extension.paged_attention(self.queries, keys, values, SCALE, self.mask)

        def contestant() -> float:
            if not layers:
                layers.extend(self.paged_layers(format, n_threads))
            return self.timed(attend)

        return contestant

    def paged_layers(self, format: str, n_threads: int) -> list[Any]:
        """Layers in pages, filled."""
        n_blocks = 2 * self.n_layers * -(-self.n_tokens // BLOCK_SIZE)
        pool = BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=n_blocks))
        extension.PagedPool.of(pool, n_threads=n_threads)
        group = extension.PagedGroup(pool, 1)
        kept = extension.StreamFormat(format)
        layers = [extension.PagedLayer(group, KV_HEADS, DIM, DIM, kept, kept) for _ in self.rows]
        for layer, (keys, values) in zip(layers, self.rows, strict=True):
            layer.update_and_fetch(keys, values)
            mx.eval(layer.order)
        return layers


def tasks() -> Sequence[Task]:
    made = []
    for n_tokens, reach in ONE_THREAD.items():
        rotation = Rotation(n_tokens)
        few = 2 if n_tokens > 512 else 8  # MLX's attention takes as long whatever is in a cache
        stock = rotation.stock(few)
        for n_threads in (1, 2):
            for format in ("fp16", "int8", "int4"):
                contestants = {OURS: rotation.paged(format, n_threads), STOCK: stock}
                if format != "fp16" and n_tokens == 4096 and n_threads == 1:
                    contestants["mlx-lm quantised"] = rotation.stock_quantized(int(format[3:]))
                target = reach if (format, n_threads) == ("fp16", 1) else None
                if n_tokens == 32768 and n_threads == 1:
                    target = {"fp16": 25.0, "int8": 40.0, "int4": 55.0}[format]
                if n_tokens == 32768 and (format, n_threads) == ("fp16", 2):
                    target = 45.0
                threads = "1 thread" if n_threads == 1 else f"{n_threads} threads"
                name = f"decode, {n_tokens} tokens, {format}, {threads}"
                made.append(Task(name, "ms", contestants, reach=target))
    rotation = Rotation(4096, 512)
    for n_threads in (1, 2):
        contestants = {OURS: rotation.paged("fp16", n_threads), STOCK: rotation.stock(1)}
        name = f"prefill, 512 queries over 4096 tokens, fp16, {n_threads} threads"
        made.append(Task(name, "ms", contestants, reach=20.0 if n_threads == 2 else None))
    return made


if __name__ == "__main__":
    main("Attention over pages, 32 heads, 8 kv heads of 128", tasks)
