"""Paged attention on a GPU beside MLX's own: microseconds, GB/s and tokens a second.

    python benchmarks/gpu/paged_attention.py --out benchmarks/gpu/results --plot

32 query heads, 8 key heads, 128 dims, one query a sequence. A chain is many calls in one
evaluation, each fed with the answer of the one before, over caches in rotation (more bytes than
the second-level cache holds); a single evaluation is one call and the wait for it. Host time that
builds the graph is left out of both, for both. Bytes are those of the keys and values of a call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool._mlx_module import extension

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
FORMATS = {"bf16": 2.0, "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 64}  # bytes a number
ROTATION_BYTES = 512 << 20


def random_rows(heads: int, n: int) -> mx.array:
    return mx.random.normal((1, heads, n, DIM)).astype(mx.bfloat16)


def timed(build: Callable[[], Any], calls: int, repeats: int) -> dict[str, float]:
    """Microseconds a call of what `build` makes, its evaluation alone."""
    mx.eval(build())
    times = []
    for _ in range(repeats):
        graph = build()
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(graph)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return {"best": min(times), "median": statistics.median(times)}


def chain(attend: Callable[[mx.array, int], mx.array], queries: mx.array, calls: int) -> mx.array:
    for i in range(calls):
        queries = attend(queries, i)
    return queries


class Paged:
    """Caches of equal length whose pages have one format."""

    def __init__(self, n_tokens: int, format: str, copies: int, block_size: int = 16) -> None:
        blocks = -(-n_tokens // block_size) * 2 * copies
        self.pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=blocks))
        stream = extension.StreamFormat(format)
        self.layers = []
        for owner in range(copies):
            layer = extension.PagedLayer(
                extension.PagedGroup(self.pool, owner), KV_HEADS, DIM, DIM, stream, stream
            )
            for first in range(0, n_tokens, 16384):
                n = min(16384, n_tokens - first)
                layer.update_and_fetch(random_rows(KV_HEADS, n), random_rows(KV_HEADS, n))
                mx.eval(layer.order)
            self.layers.append(layer)

    def attend(self, queries: mx.array, call: int) -> mx.array:
        keys, values = self.layers[call % len(self.layers)].keys_and_values()
        return extension.paged_attention(queries, keys, values, SCALE)


class Stock:
    """Contiguous caches of MLX's own attention."""

    def __init__(self, n_tokens: int, copies: int) -> None:
        self.rows = [
            (random_rows(KV_HEADS, n_tokens), random_rows(KV_HEADS, n_tokens))
            for _ in range(copies)
        ]
        mx.eval(self.rows)

    def attend(self, queries: mx.array, call: int) -> mx.array:
        keys, values = self.rows[call % len(self.rows)]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)


class Quantized:
    """mlx-lm's 4-bit attention. Its numbers are wrong on CUDA in MLX 0.32.4: see the docs."""

    def __init__(self, n_tokens: int, copies: int) -> None:
        self.rows = [
            tuple(mx.quantize(random_rows(KV_HEADS, n_tokens), 64, 4) for _ in range(2))
            for _ in range(copies)
        ]
        mx.eval(self.rows)

    def attend(self, queries: mx.array, call: int) -> mx.array:
        from mlx_lm.models.base import quantized_scaled_dot_product_attention

        keys, values = self.rows[call % len(self.rows)]
        return quantized_scaled_dot_product_attention(
            queries * 1, keys, values, SCALE, None, group_size=64, bits=4
        )


READ = """
    uint4 sum = {0, 0, 0, 0};
    const uint4* from = reinterpret_cast<const uint4*>(rows);
    const size_t n = size_t(N) * 1024;
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
      const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
      sum.x ^= a.x ^ b.x ^ c.x ^ d.x;
      sum.y ^= a.y ^ b.y ^ c.y ^ d.y;
      sum.z ^= a.z ^ b.z ^ c.z ^ d.z;
      sum.w ^= a.w ^ b.w ^ c.w ^ d.w;
    }
    for (; i < n; i += step) sum.x ^= from[i].x;
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678) out[0] = 1;
"""


def read_speed(n_bytes: int, repeats: int) -> dict[str, float]:
    """Of a kernel that reads and does nothing else."""
    kernel = mx.fast.cuda_kernel("plain_read", ["rows", "before"], ["out"], READ)
    copies = max(1, ROTATION_BYTES // n_bytes)
    rows = [mx.random.normal((n_bytes // 4,)) for _ in range(copies)]
    mx.eval(rows)
    calls = 64
    grid = 132 * 8 * 256

    def build() -> mx.array:
        x = mx.zeros((16,))
        for i in range(calls):
            (x,) = kernel(
                inputs=[rows[i % copies], x],
                template=[("N", n_bytes // 16 // 1024)],
                grid=(grid, 1, 1),
                threadgroup=(256, 1, 1),
                output_shapes=[(16,)],
                output_dtypes=[mx.float32],
            )
        return x

    return timed(build, calls, repeats)


def ragged_batch(format: str, repeats: int) -> dict[str, Any]:
    """32 sequences of 256 to 8,192 tokens; stock pads them to the longest and masks."""
    batch = 32
    lengths = [256 + i * (8192 - 256) // (batch - 1) for i in range(batch)]
    longest = max(lengths)
    queries = mx.random.normal((batch, HEADS, 1, DIM)).astype(mx.bfloat16)
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=40000))
    stream = extension.StreamFormat(format)
    layers = []
    for owner, n in enumerate(lengths):
        layers.append(
            extension.PagedLayer(
                extension.PagedGroup(pool, owner), KV_HEADS, DIM, DIM, stream, stream
            )
        )
        layers[-1].update_and_fetch(random_rows(KV_HEADS, n), random_rows(KV_HEADS, n))
        mx.eval(layers[-1].order)
    keys, values = (
        mx.random.normal((batch, KV_HEADS, longest, DIM)).astype(mx.bfloat16) for _ in range(2)
    )
    columns = mx.arange(longest)[None, None, None, :]
    mask = columns >= (longest - mx.array(lengths))[:, None, None, None]
    mx.eval(keys, values, mask, queries)
    calls = 16
    ours = timed(
        lambda: chain(
            lambda q, _: extension.paged_attention(q, *extension.fetch_batch(layers), SCALE),
            queries,
            calls,
        ),
        calls,
        repeats,
    )
    stock = timed(
        lambda: chain(
            lambda q, _: mx.fast.scaled_dot_product_attention(
                q, keys, values, scale=SCALE, mask=mask
            ),
            queries,
            calls,
        ),
        calls,
        repeats,
    )
    return {"format": format, "lengths": lengths, "paged": ours, "stock": stock}


def in_chain_and_alone(
    caches: Any, queries: mx.array, calls: int, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    return (
        timed(lambda: chain(caches.attend, queries, calls), calls, repeats),
        timed(lambda: caches.attend(queries, 0), 1, 4 * repeats),
    )


def kernels(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    results = []
    queries = mx.random.normal((1, HEADS, 1, DIM)).astype(mx.bfloat16)
    mx.eval(queries)
    for n in lengths:
        for name in ("stock", *FORMATS, "mlx-lm 4-bit"):
            bytes_a_number = FORMATS.get(name, FORMATS["bf16" if name == "stock" else "int4"])
            n_bytes = int(2 * n * KV_HEADS * DIM * bytes_a_number)
            copies = max(1, min(32, ROTATION_BYTES // n_bytes))
            calls = 128 if name != "mlx-lm 4-bit" else 8
            if name == "stock":
                caches: Any = Stock(n, copies)
            elif name in FORMATS:
                caches = Paged(n, name, copies)
            else:
                caches = Quantized(n, min(copies, 4))
            in_chain, single = in_chain_and_alone(caches, queries, calls, repeats)
            results.append(
                {
                    "what": name,
                    "tokens": n,
                    "bytes": n_bytes,
                    "chain_us": in_chain,
                    "single_us": single,
                    "gb_per_s": n_bytes / in_chain["median"] / 1e3,
                }
            )
            print(
                f"{name:13s} {n:7d}  chain {in_chain['median']:9.2f} us "
                f"(best {in_chain['best']:9.2f})  single {single['median']:8.1f} us  "
                f"{results[-1]['gb_per_s']:7.0f} GB/s",
                flush=True,
            )
            del caches
            mx.clear_cache()
    return results


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name in dict.fromkeys(r["what"] for r in report["kernels"]):
        rows = [r for r in report["kernels"] if r["what"] == name]
        tokens = [r["tokens"] for r in rows]
        left.plot(tokens, [r["chain_us"]["median"] for r in rows], "o-", label=name)
        right.plot(tokens, [r["gb_per_s"] for r in rows], "o-", label=name)
    for axes, label in (
        (left, "microseconds a call, in a chain"),
        (right, "GB/s of keys and values"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend()
    plt.suptitle(f"Decode attention, 32 heads, 8 key heads, 128 dims, {report['card']}")
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON and the plot")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    mx.random.seed(0)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "card": extension.describe_backend("cuda").removeprefix("CUDA on "),
        "mlx": mx.__version__,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM},
        "repeats": arguments.repeats,
    }
    report["read"] = []
    for n in arguments.tokens:
        n_bytes = 2 * n * KV_HEADS * DIM * 2
        speed = read_speed(n_bytes, arguments.repeats)
        report["read"].append({"bytes": n_bytes, **speed})
        print(f"plain read {n_bytes / 1e6:8.1f} MB  {n_bytes / speed['median'] / 1e3:7.0f} GB/s")
    report["kernels"] = kernels(arguments.tokens, arguments.repeats)
    report["ragged_batch"] = [ragged_batch(f, arguments.repeats) for f in ("bf16", "int4")]
    for batch in report["ragged_batch"]:
        ratio = batch["stock"]["median"] / batch["paged"]["median"]
        print(
            f"batch of 32, {batch['format']}: {batch['paged']['median']:.1f} us, stock "
            f"{batch['stock']['median']:.1f} us, {ratio:.2f} times faster"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "paged_attention.json").write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(report, arguments.out / "paged_attention.png")


if __name__ == "__main__":
    main()
