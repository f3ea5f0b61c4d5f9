#!/usr/bin/env python3
"""Draws docs/block_table.svg: two requests' block tables over the pages of one pool.

    scripts/paging_picture.py [--check]

With --check writes nothing and exits 1 where the file is not what it would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "block_table.svg"

BLOCK_SIZE = 4  # token slots in the picture; 16 by default
COLOURS = {"int4": "#c98a1b", "int8": "#3a7d44", "fp16": "#1b6ca8"}
WIDTHS = {"int4": 46, "int8": 78, "fp16": 142}  # of a page: as its bytes

WIDTH, HEIGHT = 900, 400
LEFT, CELL, ROW = 112, 84, 30
TABLE_A, PAGES, TABLE_B = 66, 176, 306


@dataclass(frozen=True)
class Page:
    """The bytes of one block; ``n_used`` of its slots hold tokens."""

    block: int
    format: str
    n_used: int = BLOCK_SIZE


# A request of 18 tokens was forked; since then A has had two more tokens and B one.
PAGE_LIST = [
    Page(12, "int4"),
    Page(3, "int8"),
    Page(7, "fp16"),
    Page(9, "fp16"),
    Page(5, "fp16", 4),
    Page(14, "fp16", 3),
]
TABLES = {"A": [12, 3, 7, 9, 5], "B": [12, 3, 7, 9, 14]}


def places() -> dict[int, tuple[float, Page]]:
    """Where each block's page begins."""
    x, found = float(LEFT), {}
    for page in PAGE_LIST:
        found[page.block] = x, page
        x += WIDTHS[page.format] + 10
    return found


def text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{extra}>{words}</text>'


def draw_table(name: str, words: str, y: float, towards: float) -> Iterator[str]:
    """One row of block ids, with a line from each to its page."""
    blocks, where = TABLES[name], places()
    yield text(LEFT - 16, y + 20, f"request {name}", "end", ' font-weight="bold"')
    n_tokens = sum(where[block][1].n_used for block in blocks)
    yield text(LEFT + CELL * len(blocks) + 14, y + 20, words.format(n_tokens=n_tokens))
    for i, block in enumerate(blocks):
        x, (page_x, page) = LEFT + CELL * i, where[block]
        yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{ROW}" fill="white" stroke="#333"/>'
        yield text(x + CELL / 2, y + 20, f"block {block}", "middle")
        start, end = (y + ROW, towards) if towards > y else (y, towards)
        middle = page_x + WIDTHS[page.format] / 2
        yield (
            f'<path d="M{x + CELL / 2:.0f} {start:.0f}L{middle:.0f} {end:.0f}" stroke="#999" '
            'fill="none"/>'
        )


def draw_pages() -> Iterator[str]:
    yield text(LEFT - 16, PAGES + 32, "pages", "end", ' font-weight="bold"')
    for x, page in places().values():
        colour, width = COLOURS[page.format], WIDTHS[page.format]
        slot = width / BLOCK_SIZE
        for i in range(BLOCK_SIZE):
            fill = colour if i < page.n_used else "white"
            yield (
                f'<rect x="{x + slot * i:.1f}" y="{PAGES}" width="{slot:.1f}" height="34" '
                f'fill="{fill}" fill-opacity="0.75" stroke="white"/>'
            )
        yield (
            f'<rect x="{x:.1f}" y="{PAGES}" width="{width}" height="34" fill="none" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
        yield text(x + width / 2, PAGES + 50, f"{page.block}: {page.format}", "middle")


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(
            LEFT, 28, "One layer's keys. Old blocks are kept in fewer bits, new ones as they came."
        ),
        *draw_table("A", "{n_tokens} tokens", TABLE_A, PAGES),
        *draw_pages(),
        *draw_table("B", "a fork of A: {n_tokens} tokens", TABLE_B, PAGES + 56),
        text(
            LEFT,
            HEIGHT - 20,
            "Four blocks are shared; the partly filled tail was copied at the first write to it.",
        ),
        "</svg>",
    ]
    return "\n".join([*parts, ""])


def main() -> int:
    if "--check" in sys.argv[1:]:
        current = PICTURE.exists() and PICTURE.read_text() == picture()
        if not current:
            print(f"{PICTURE} is not current: run scripts/paging_picture.py")
        return 0 if current else 1
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
