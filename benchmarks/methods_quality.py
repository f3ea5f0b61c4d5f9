"""Quality against bytes a token of every method and width, ours and the published package's.

python benchmarks/methods_quality.py [METHOD...]

Writes docs/methods_quality.json, which scripts/methods_page.py turns into tables and a plot. Both
packages see the same keys, values and queries: 512 normal tokens of 128 numbers, 16 queries of each
kind, 10 seeds. Takes some minutes, nearly all of them in the published package;
with METHODs measures those and keeps the others' points.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import peer
from harness import ROOT
from kvpool.cache import METHODS, KVCacheConfig
from kvpool.cache.quality import Draw, measure_quality, quality_of

OUTPUT = ROOT / "docs" / "methods_quality.json"
N_SEEDS = 10
WIDTHS = range(1, 9)
PUBLISHED_WIDTHS = {
    "turboquant_mse": (1, 2, 3, 4),
    "turboquant_prod": (2, 3, 4),
    "polar": (1, 2, 3, 4),
    "qjl": (2,),
    "spectral": (1, 2, 3, 4),
    "kivi": (2, 3, 4),
}
PACKED_VALUES = ((2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4), (4, 5), (6, 6), (6, 7))


def width(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def our_configs() -> Iterator[tuple[str, KVCacheConfig]]:
    for method in METHODS:
        for bits in (2,) if method == "qjl" else WIDTHS:
            window = 0 if method == "kivi" else None
            yield (
                width(bits) if method != "qjl" else "128 signs",
                KVCacheConfig(method=method, bit_width_inlier=bits, exact_window=window),
            )
    for signs in (64, 256, 512):
        yield f"{signs} signs", KVCacheConfig(method="qjl", jl_dim=signs)
    for bits, value_bits in PACKED_VALUES:
        for method in ("turboquant_mse", "turboquant_prod", "polar"):
            yield (
                f"{bits} bits, values {value_bits}",
                KVCacheConfig(method=method, bit_width_inlier=bits, value_bits=value_bits),
            )
    for bits in PUBLISHED_WIDTHS["kivi"]:
        yield f"{width(bits)}, 128 exact", KVCacheConfig(method="kivi", bit_width_inlier=bits)


class Published:
    """A cache of the published package behind what quality_of asks for."""

    def __init__(self, method: str, bits: int, exact: int, draw: Draw, seed: int) -> None:
        import mlx.core as mx
        import veloxquant_mlx

        self.mx = mx
        config = veloxquant_mlx.KVCacheConfig(
            method=method, head_dim=128, bit_width_inlier=bits, seed=seed, residual_length=exact
        )
        self.cache = veloxquant_mlx.KVCacheFactory.create(config)
        keys, values = (mx.array(rows.astype(np.float16)) for rows in (draw.keys, draw.values))
        if method == "kivi":  # gives back all keys and values; attention is left to mlx-lm
            self.rows = self.cache.update_and_fetch(keys[None, None], values[None, None])
            self.n_bytes = keys.nbytes + values.nbytes
            return
        self.rows = None
        for k, v in zip(keys, values, strict=True):
            self.cache.append_key(k)
            self.cache.append_value(v)
        self.n_bytes = self.cache.memory_bytes()

    def attend(self, queries: np.ndarray) -> np.ndarray:
        mx = self.mx
        rows = mx.array(queries.astype(np.float16))
        if self.rows is not None:
            keys, values = self.rows
            output = mx.fast.scaled_dot_product_attention(
                rows[None, None], keys, values, scale=128**-0.5
            )[0, 0]
        else:
            output = mx.stack([self.cache.attend(q) for q in rows])
        return np.asarray(output.astype(mx.float32))


def published_points(methods: Collection[str]) -> Iterator[dict[str, Any]]:
    peer.install()
    for method, widths in PUBLISHED_WIDTHS.items():
        for bits, exact in itertools.product(widths, (0, 128)):
            if method not in methods or (exact and method != "kivi"):
                continue
            quality = quality_of(functools.partial(Published, method, bits, exact), n_seeds=N_SEEDS)
            label = f"{width(bits)}, {exact} exact" if exact else width(bits)
            yield point("published", method, label, quality)


def point(package: str, method: str, label: str, quality: Any) -> dict[str, Any]:
    print(f"{package:10} {method:16} {label:22} {quality}", flush=True)
    return {
        "package": package,
        "method": method,
        "label": label,
        "bytes": round(quality.bytes_per_token, 1),
        "cosine": round(quality.cosine, 4),
        "peaked": round(quality.peaked_cosine, 4),
        "error": round(quality.relative_error, 4),
    }


def main() -> None:
    chosen = set(sys.argv[1:]) or set(METHODS)
    old = json.loads(OUTPUT.read_text())["points"] if OUTPUT.exists() else []
    new = [
        point("kvpool", config.method, label, measure_quality(config, N_SEEDS))
        for label, config in our_configs()
        if config.method in chosen
    ]
    new += published_points(chosen)
    # In one order, whatever was measured when.
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    points = [*(old_point for old_point in old if old_point["method"] not in chosen), *new]
    points.sort(key=lambda found: (found["package"], ranks[found["method"]]))
    document = {"published": f"{peer.NAME} {peer.VERSION}", "points": points}
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
