"""Reports and progress: drawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from kvpool.models.download import Progress

__all__ = ["Section", "count", "megabytes", "note", "print_grid", "print_report", "progress_bar"]

Section = tuple[str, Sequence[tuple[str, str]]]
"""A title and its label and value pairs."""


def note(message: str) -> None:
    """Says what is going on, on standard error."""
    print(message, file=sys.stderr, flush=True)


def print_report(sections: Sequence[Section]) -> None:
    """Prints sections of label and value pairs on standard output."""
    width = max(len(label) for _, rows in sections for label, _ in rows)
    if not _draws_on(sys.stdout):
        for title, rows in sections:
            print(title)
            for label, value in rows:
                print(f"  {label:<{width}}  {value}")
        return

    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in sections:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True, min_width=width)
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(label), Text(value))
        console.print(Text(title, style="bold"))
        console.print(Padding(grid, (0, 0, 0, 2)))


def print_grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of columns on standard output."""
    if not _draws_on(sys.stdout):
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(title)
        for row in [header, *rows]:
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print(f"  {line}".rstrip())
        return

    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(header):
        grid.add_column(column, style="cyan" if i == 0 else None, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(highlight=False)
    console.print(Text(title, style="bold"))
    console.print(Padding(grid, (0, 0, 0, 2)))


@contextlib.contextmanager
def progress_bar(label: str, unit: str = "bytes") -> Iterator[Progress]:
    """Gives a callback (what, done, total) that draws a bar, or prints each new `what` once."""
    if not _draws_on(sys.stderr):
        said: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                note(
                    f"{label}: {what} {megabytes(total) if unit == 'bytes' else f'{total} {unit}'}"
                )

        yield say
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bar

    with Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if unit == "bytes" else MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=None)

        def draw(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{label}: {what}", completed=done, total=total)

        yield draw


def count(number: int, noun: str) -> str:
    """`1 block`, `1,200 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:,.1f} kB"


def _draws_on(stream: TextIO) -> bool:
    return stream.isatty() and importlib.util.find_spec("rich") is not None
