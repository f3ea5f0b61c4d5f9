"""Whether a method's quality is below the published package's, with the error of the answer.

python benchmarks/methods_paired.py [METHOD...] [--draws 60] [--queries 64] [--json FILE]

docs/methods.md compares means of ten draws, which differ by chance: at one bit a draw's cosine
moves by hundredths. Here both packages see the same keys, values and queries in every draw, each
with rotations of its own, and the differences are averaged. A third contestant is ours with every
choice as published, which tells the effect of a choice from chance. An existing JSON keeps the
figures of methods that are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peer
from harness import machine
from kvpool.cache import KVCacheConfig
from kvpool.cache.quality import Draw, OurCache, cosines, draws
from methods_quality import PUBLISHED_WIDTHS, Published

DIMS = 128


@dataclass
class Paired:
    """A mean over draws and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, numbers: list[float]) -> Paired:
        return cls(
            float(np.mean(numbers)), float(np.std(numbers, ddof=1) / math.sqrt(len(numbers)))
        )

    def __str__(self) -> str:
        return f"{self.mean:+.4f} +- {self.error:.4f}"


def qualities(cache: Any, draw: Draw) -> dict[str, float]:
    """Mean cosine of one cache for each kind of query."""
    return {
        kind: float(np.mean(cosines(cache, draw, queries)))
        for kind, queries in (("normal", draw.queries), ("peaked", draw.peaked_queries))
    }


def compare(method: str, bits: int, n_draws: int, n_queries: int) -> dict[str, Any]:
    """Draws of `n_queries` queries of each kind over 512 tokens."""
    found: dict[str, list[dict[str, float]]] = {"kvpool": [], "as published": [], "published": []}
    n_bytes = {}
    for seed, draw in enumerate(draws(DIMS, n_queries=n_queries, n_seeds=n_draws)):
        window = 0 if method == "kivi" else None
        for name, as_published in (("kvpool", False), ("as published", True)):
            config = KVCacheConfig(
                method=method,
                bit_width_inlier=bits,
                seed=seed,
                exact_window=window,
                as_published=as_published,
            )
            cache = OurCache(config, draw)
            found[name].append(qualities(cache, draw))
            n_bytes[name] = cache.n_bytes / len(draw.keys)
        theirs = Published(method, bits, 0, draw, seed)
        found["published"].append(qualities(theirs, draw))
        n_bytes["published"] = theirs.n_bytes / len(draw.keys)
    result: dict[str, Any] = {"method": method, "bits": bits, "draws": n_draws, "bytes": n_bytes}
    for kind in ("normal", "peaked"):
        numbers = {name: [draw[kind] for draw in rows] for name, rows in found.items()}
        result[kind] = {name: round(float(np.mean(row)), 5) for name, row in numbers.items()}
        for name in ("kvpool", "as published"):
            pairs = zip(numbers[name], numbers["published"], strict=True)
            gain = Paired.of([ours - theirs for ours, theirs in pairs])
            result[kind][f"{name}: gain"] = [round(gain.mean, 5), round(gain.error, 5)]
            print(
                f"{method:16} {bits} {kind:7} {name:13} {np.mean(numbers[name]):.4f} "
                f"published {np.mean(numbers['published']):.4f} difference {gain}",
                flush=True,
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=list(PUBLISHED_WIDTHS))
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--queries", type=int, default=64, help="of each kind in a draw")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer.install()
    results = [
        compare(method, bits, options.draws, options.queries)
        for method in options.methods
        for bits in PUBLISHED_WIDTHS[method]
    ]
    if options.json:
        if options.json.exists():
            old = json.loads(options.json.read_text())["results"]
            results = [row for row in old if row["method"] not in options.methods] + results
        document = {
            "title": "Quality against the published package, paired",
            "published": f"{peer.NAME} {peer.VERSION}",
            "machine": machine(),
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
