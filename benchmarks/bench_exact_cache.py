"""Attention of one query over an ExactKVCache, next to numpy's over fp32 arrays.

OPENBLAS_NUM_THREADS=1 python benchmarks/bench_exact_cache.py --cores 0
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from harness import OURS, Task, main, numpy_attention, repeated
from kvpool.cache import ExactKVCache

HEAD_DIM = 128
LENGTHS = (512, 4096, 32768)
CALLS = 40


def tasks() -> Sequence[Task]:
    random = np.random.default_rng(0)
    made = []
    for n in LENGTHS:
        keys, values = random.standard_normal((2, n, HEAD_DIM)).astype(np.float32)
        q = random.standard_normal(HEAD_DIM).astype(np.float32)
        for dtype in ("fp32", "fp16", "bf16"):
            cache = ExactKVCache(HEAD_DIM, dtype=dtype)
            for k, v in zip(keys, values, strict=True):
                cache.append(k, v)
            exact = numpy_attention(q, keys, values)
            if not np.allclose(cache.attend(q), exact, atol=5e-3):
                raise RuntimeError(f"{dtype} attention over {n} tokens is wrong")
            made.append(
                Task(
                    f"attend over {n} tokens, {dtype}",
                    "us",
                    {
                        OURS: repeated(lambda cache=cache, q=q: cache.attend(q), CALLS),
                        "numpy fp32": repeated(
                            lambda q=q, k=keys, v=values: numpy_attention(q, k, v), CALLS
                        ),
                    },
                )
            )
    rows = random.standard_normal((1024, HEAD_DIM)).astype(np.float32)

    def append_all() -> float:
        cache = ExactKVCache(HEAD_DIM)
        start = time.perf_counter()
        for row in rows:
            cache.append(row, row)
        return (time.perf_counter() - start) / len(rows)

    made.append(Task("append a token, fp16", "us", {OURS: append_all}))
    return made


if __name__ == "__main__":
    main("Exact attention of one head", tasks)
