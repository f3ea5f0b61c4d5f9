"""Decoding with a 3B-parameter Llama shape on a GPU: paged caches beside mlx-lm's own.

    python benchmarks/gpu/decode.py --out benchmarks/gpu/results

28 layers, 24 heads, 8 key heads of 128 dims, random bf16 weights. The cache is filled with random
rows, then tokens are decoded as mlx-lm's generate_step does. Each variant runs in a process of its
own. Memory is MLX's peak while it decodes plus, for paged caches, the peak of kvpool's own memory
on the device: pages, tables, gathered keys and values, scratch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM = 3072, 28, 24, 8, 128
VARIANTS = ("stock", "bf16", "int8", "int4")


def decode(
    variant: str, n_tokens: int, n_new: int, block_size: int, prefill: bool
) -> dict[str, Any]:
    import mlx.core as mx
    import mlx.nn as nn
    from kvpool import (
        BlockPoolAllocator,
        PoolConfig,
        attention,
        attention_stats,
        build_paged_caches,
    )
    from kvpool._mlx_module import extension
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=8192,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=DIM,
            rms_norm_eps=1e-5,
            vocab_size=128256,
            rope_theta=500000.0,
            tie_word_embeddings=True,
        )
    )
    model.update(nn.utils.tree_map(lambda x: (0.02 * x).astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    pool = None
    if variant == "stock":
        caches = make_prompt_cache(model)
    else:
        blocks = -(-(n_tokens + n_new + 1) // block_size) * 2 * LAYERS
        pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=blocks))
        caches = build_paged_caches(model, pool, 1, format=variant)
    seconds_of_prefill = 0.0

    def prefilled() -> None:
        """As mlx-lm does it: in chunks, the caches' states evaluated after each."""
        nonlocal seconds_of_prefill
        prompt = mx.random.randint(0, 128256, (1, n_tokens))
        mx.eval(prompt)
        start = time.perf_counter()
        for first in range(0, n_tokens, 2048):
            model(prompt[:, first : first + 2048], cache=caches)
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()
        seconds_of_prefill = time.perf_counter() - start

    chunk = 16384
    for first in range(0, 0 if prefill else n_tokens, chunk):
        n = min(chunk, n_tokens - first)
        for cache in caches:
            rows = [mx.random.normal((1, KV_HEADS, n, DIM)).astype(mx.bfloat16) for _ in range(2)]
            cache.update_and_fetch(*rows)
            mx.eval(cache.state)
    mx.clear_cache()
    mx.reset_peak_memory()
    if pool is not None:
        extension.reset_peak_gpu_memory()

    def step(token: mx.array) -> mx.array:
        return mx.argmax(model(token[None], cache=caches)[:, -1, :], axis=-1)

    def run(n: int) -> float:
        token = mx.array([7])
        token = step(token)
        mx.eval(token)
        start = time.perf_counter()
        for _ in range(n):
            following = step(token)
            mx.async_eval(following)
            mx.eval(token)
            token = following
        mx.eval(token)
        return (time.perf_counter() - start) / n

    def measured() -> dict[str, Any]:
        if prefill:
            prefilled()
        run(8)
        seconds = [run(n_new // 4) for _ in range(3)]
        result: dict[str, Any] = {
            "variant": variant,
            "tokens": n_tokens,
            "ms_a_token": 1e3 * min(seconds),
            "ms_a_token_median": 1e3 * sorted(seconds)[1],
            "peak_gb": mx.get_peak_memory() / 1e9,
            "cache_gb": sum(c.nbytes for c in caches) / 1e9,
        }
        if prefill:
            result["prefill_s"] = seconds_of_prefill
        if pool is not None:
            result["peak_gb"] += extension.gpu_memory()[1] / 1e9
        return result

    if pool is None:
        return measured()
    with attention():
        result = measured()
    result["attention"] = str(attention_stats())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 16384, 131072])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--new", type=int, default=128, help="tokens to decode")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--prefill", action="store_true", help="with a real prefill")
    parser.add_argument("--one", action="store_true", help="run here and print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        result = decode(
            arguments.variants[0],
            arguments.tokens[0],
            arguments.new,
            arguments.block_size,
            arguments.prefill,
        )
        print("RESULT " + json.dumps(result))
        return
    results = []
    for n_tokens in arguments.tokens:
        for variant in arguments.variants:
            command = [sys.executable, __file__, "--one", "--variants", variant]
            command += ["--tokens", str(n_tokens), "--new", str(arguments.new)]
            command += ["--block-size", str(arguments.block_size)]
            command += ["--prefill"] if arguments.prefill else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
            if not lines:
                print(variant, n_tokens, "failed:", done.stderr[-1500:], flush=True)
                continue
            results.append(json.loads(lines[0].removeprefix("RESULT ")))
            r = results[-1]
            print(
                f"{variant:6s} {n_tokens:7d}  {r['ms_a_token']:7.3f} ms a token "
                f"({1e3 / r['ms_a_token']:6.1f} tokens/s)  peak {r['peak_gb']:6.2f} GB  "
                f"cache {r['cache_gb']:6.2f} GB  {r.get('prefill_s', 0):.2f} s of prefill  "
                f"{r.get('attention', '')}",
                flush=True,
            )
    if arguments.out is not None:
        import mlx.core as mx
        from kvpool._mlx_module import extension

        report = {
            "date": datetime.date.today().isoformat(),
            "card": extension.describe_backend("cuda").removeprefix("CUDA on "),
            "mlx": mx.__version__,
            "block_size": arguments.block_size,
            "results": results,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = "prefill.json" if arguments.prefill else "decode.json"
        (arguments.out / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
