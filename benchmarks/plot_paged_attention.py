"""Draws docs/paged_attention.svg from results/paged_attention.json (bench_paged_attention.py)."""

# ruff: noqa: E402

from __future__ import annotations

import json
from statistics import median

import matplotlib
from harness import OURS, ROOT

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "kvpool"
from matplotlib import pyplot


def main() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "paged_attention.json").read_text())
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in report["results"]:
        _, tokens, kept, threads = result["task"].split(", ")
        n_tokens = int(tokens.split()[0])
        for name, figures in result["figures"].items():
            label = f"{kept}, {threads}" if name == OURS else name
            if name == "mlx-lm quantised":
                label = f"{name}, {kept}"
            if label not in lines or lines[label][-1][0] != n_tokens:
                lines.setdefault(label, []).append((n_tokens, median(figures)))
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for label, points in lines.items():
        axis.plot(*zip(*points, strict=True), "o-", label=label, markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds a layer")
    axis.set_title("Decode attention, 32 heads over 8 kv heads of 128")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "paged_attention.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
