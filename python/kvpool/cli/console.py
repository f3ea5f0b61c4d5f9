"""Tables and progress: drawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from kvpool.models.download import Progress

__all__ = ["count", "megabytes", "note", "print_table", "progress_bar"]


def note(message: str) -> None:
    """Says what is going on, on standard error."""
    print(message, file=sys.stderr, flush=True)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Prints label and value pairs on standard output."""
    if _draws_on(sys.stdout):
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            show_header=False,
            box=box.ROUNDED,
        )
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(label, value)
        Console(highlight=False, markup=False).print(table)
        return
    width = max(len(label) for label, _ in rows)
    print(title)
    for label, value in rows:
        print(f"  {label:<{width}}  {value}")


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
    return f"{n_bytes / 1e6:,.1f} MB"


def _draws_on(stream: TextIO) -> bool:
    return stream.isatty() and importlib.util.find_spec("rich") is not None
