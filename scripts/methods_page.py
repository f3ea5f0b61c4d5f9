#!/usr/bin/env python3
"""Brings the tables of docs/methods.md and its plot, docs/methods_quality.svg, up to date.

    scripts/methods_page.py [--check]

From the registry of methods and docs/methods_quality.json, which benchmarks/methods_quality.py
measured. With --check writes nothing and exits 1 where a file is not what it would write.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpool.cache import METHODS, KVCacheConfig
from kvpool.cache.methods import MethodInfo
from kvpool.cache.quantized import make_native_method

DOCS = Path(__file__).resolve().parent.parent / "docs"
Point = dict[str, Any]

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5aa8", "#c98a1b", "#4a4a4a")


# The plot: bytes a token to the right, 1 - cosine downwards on a logarithmic scale.

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 30, 60
MOST_BYTES = 550
LEAST_MISS, MOST_MISS = 1e-4, 0.6


def x_of(n_bytes: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * n_bytes / MOST_BYTES


def y_of(cosine: float) -> float:
    miss = min(max(1 - cosine, LEAST_MISS), MOST_MISS)
    share = math.log(MOST_MISS / miss) / math.log(MOST_MISS / LEAST_MISS)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{extra}>{words}</text>'


def axes() -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for n_bytes in range(0, MOST_BYTES + 1, 50):
        x = x_of(n_bytes)
        yield f'<path d="M{x:.0f} {TOP}V{bottom}" stroke="#e4e4e4"/>'
        yield text(x, bottom + 18, str(n_bytes), "middle")
    for cosine in (0.5, 0.7, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9997, 0.9999):
        y = y_of(cosine)
        yield f'<path d="M{LEFT} {y:.0f}H{right}" stroke="#e4e4e4"/>'
        yield text(LEFT - 8, y + 4, str(cosine), "end")
    yield text((LEFT + right) / 2, HEIGHT - 18, "bytes a token, key and value of 128", "middle")
    yield text(LEFT, TOP - 12, "cosine to exact attention (512 normal tokens)")


def curve(points: list[Point], colour: str, dashes: str, hollow: bool) -> Iterator[str]:
    places = sorted((x_of(point["bytes"]), y_of(point["cosine"])) for point in points)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
    for x, y in places:
        fill = "white" if hollow else colour
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}"/>'


def ours(point: Point) -> bool:
    return point["package"] == "kvpool" and not {"values", "exact"} & set(words(point))


def packed(point: Point) -> bool:
    """Keys and values of equal width."""
    return point["method"] == "turboquant_mse" and words(point)[::3] == [words(point)[0]] * 2


def theirs(point: Point) -> bool:
    return point["package"] == "published" and "exact" not in words(point)


def words(point: Point) -> list[str]:
    return str(point["label"].replace(",", "")).split()


DASHED = ' stroke-dasharray="5 4"'
DOTTED = ' stroke-dasharray="1.5 3"'


def plot(points: list[Point], published: str) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *axes(),
    ]
    legend = WIDTH - RIGHT + 16
    for row, (method, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
        for chosen, dashes in ((ours, ""), (packed, DOTTED), (theirs, DASHED)):
            shown = [point for point in points if point["method"] == method and chosen(point)]
            if shown:
                parts += curve(shown, colour, dashes, hollow=chosen is theirs)
        y = TOP + 20 + 22 * row
        parts.append(f'<circle cx="{legend}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(text(legend + 12, y, method))
    y = TOP + 20 + 22 * len(METHODS)
    for label, dashes in (
        ("kvpool, values at 8 bits", ""),
        ("... values packed alike", DOTTED),
        (published, DASHED),
    ):
        y += 22
        line = f"M{legend - 4} {y - 4}H{legend + 20}"
        parts.append(f'<path d="{line}" stroke="#444" stroke-width="1.6"{dashes}/>')
        parts.append(text(legend + 26, y, label))
    return "\n".join([*parts, "</svg>", ""])


# The page's parts.


def papers() -> Iterator[str]:
    yield "| method | how | paper |"
    yield "|---|---|---|"
    for info in METHODS.values():
        paper = f"{info.title} ({info.authors})"
        if info.arxiv:
            paper += f", [arXiv:{info.arxiv}](https://arxiv.org/abs/{info.arxiv})"
        yield f"| `{info.name}` | {info.summary} | {paper} |"


def limits(info: MethodInfo) -> str:
    head_dim = "1..1024"
    if info.head_dim_multiple > 1:
        head_dim = f"multiples of {info.head_dim_multiple} to 1024"
    return f"`bit_width_inlier` {info.min_bits}..{info.max_bits}, `head_dim` {head_dim}"


def parameters() -> Iterator[str]:
    for info in METHODS.values():
        yield f"**{info.name}**: {limits(info)}."
        yield ""
        yield "| parameter | default | limits | what |"
        yield "|---|---|---|---|"
        for parameter in info.parameters:
            yield (
                f"| `{parameter.name}` | {parameter.default} | {parameter.limits} | "
                f"{parameter.what} |"
            )
        yield ""


def sizes() -> Iterator[str]:
    widths = range(1, 9)
    yield "| method | " + " | ".join(f"{bits}" for bits in widths) + " |"
    yield "|---|" + "---|" * len(widths)
    for name in METHODS:
        cells = []
        for bits in widths:
            config = KVCacheConfig(method=name, bit_width_inlier=bits)
            cells.append(f"{make_native_method(config).bytes_per_token():.0f}")
        yield f"| `{name}` | " + " | ".join(cells) + " |"


def qualities(points: list[Point]) -> Iterator[str]:
    there = {
        (point["method"], point["label"]): point
        for point in points
        if point["package"] == "published"
    }
    yield "| method | codes | bytes | cosine | peaked | published: bytes | cosine | peaked |"
    yield "|---|---|---|---|---|---|---|---|"
    for point in points:
        if point["package"] != "kvpool":
            continue
        label = "2 bits" if point["label"] == "128 signs" else point["label"]
        other = there.get((point["method"], label))
        cells = [f"`{point['method']}`", point["label"]]
        for shown in (point, other):
            if shown is None:
                cells += ["", "", ""]
            else:
                cells += [
                    f"{shown['bytes']:.0f}",
                    f"{shown['cosine']:.4f}",
                    f"{shown['peaked']:.4f}",
                ]
        yield "| " + " | ".join(cells) + " |"


REGION = re.compile(r"(<!-- (\w+): made by [^\n]* -->\n).*?(<!-- end -->\n)", re.DOTALL)


def page(points: list[Point], old: str) -> str:
    """``old`` with its made parts made anew."""
    parts = {
        "papers": papers(),
        "sizes": sizes(),
        "qualities": qualities(points),
        "parameters": parameters(),
    }
    made = REGION.sub(
        lambda found: found[1] + "\n".join([*parts.pop(found[2]), ""]) + found[3], old
    )
    if parts:
        raise SystemExit(f"docs/methods.md has no place for {', '.join(parts)}")
    return made


def main(argv: list[str]) -> int:
    measured = json.loads((DOCS / "methods_quality.json").read_text())
    points, published = measured["points"], measured["published"]
    files = {
        DOCS / "methods.md": page(points, (DOCS / "methods.md").read_text()),
        DOCS / "methods_quality.svg": plot(points, published),
    }
    stale = [path for path, new in files.items() if not path.exists() or path.read_text() != new]
    if "--check" in argv:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is not current: run scripts/methods_page.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
