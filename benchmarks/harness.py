"""Runs contestants side by side and prints what came out.

A benchmark is a list of tasks, each with contestants that do the same work. Their repeats take
turns in one run (A B, B A, A B, ...) on the same cores, so that whatever else the machine does
falls on all of them alike; a ratio from one run is worth more than figures from two. See
bench_block_pool.py for an example.

    python benchmarks/bench_X.py [--repeats N] [--only TEXT] [--cores 0,1] [--json FILE] [--list]
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OURS = "kvpool"
_FLAGS = ("sse4_2", "avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
_PACKAGES = ("kvpool", "veloxquant-mlx", "mlx", "mlx-lm", "numpy")
# Seconds to a unit; a task may name any other unit, which is then shown as measured.
_UNITS = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass
class Task:
    """One piece of work.

    Attributes:
        name: What is done, for the table.
        unit: "ns", "us", "ms" or "s", of times that contestants return in seconds; or any other
            unit, whose figures are shown as they are.
        contestants: Name to a function that does the work once and returns its cost: seconds of one
            operation, or the figure itself. Set-up inside the function is the function's own
            business: it times what counts.
        reach: The ratio, reference to ours, to reach; None where no figure is set.
        reach_value: The figure of ours, in `unit`, not to exceed.
        more_is_better: Figures are rates.
    """

    name: str
    unit: str
    contestants: dict[str, Callable[[], float]]
    reach: float | None = None
    reach_value: float | None = None
    more_is_better: bool = False


@dataclass
class Result:
    """Figures of one task, in its unit, in the order measured."""

    task: Task
    figures: dict[str, list[float]] = field(default_factory=dict)

    def median(self, contestant: str) -> float:
        return statistics.median(self.figures[contestant])

    def best(self, contestant: str) -> float:
        return (max if self.task.more_is_better else min)(self.figures[contestant])

    def ratio(self, reference: str) -> float:
        """How many times better ours is, by the medians."""
        ours, theirs = self.median(OURS), self.median(reference)
        if self.task.more_is_better:
            ours, theirs = theirs, ours
        return theirs / ours if ours else float("inf")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            (part.strip() for part in line.split(":", 1))
            for line in info.read_text().splitlines()
            if ":" in line
        )
        cpu, flags = fields.get("model name", cpu), fields.get("flags", "")
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    affinity = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    )
    return {
        "cpu": cpu,
        "cores": sorted(affinity),
        "flags": [flag for flag in _FLAGS if flag in flags.split()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "packages": versions,
    }


def run(tasks: Sequence[Task], repeats: int) -> list[Result]:
    """Measures every task: `repeats` rounds of its contestants in turn, after one to warm up."""
    results = []
    for task in tasks:
        result = Result(task, {name: [] for name in task.contestants})
        scale = _UNITS.get(task.unit, 1.0)
        order = list(task.contestants.items())
        for round_number in range(-1, repeats):
            for name, contestant in order:
                gc.collect()
                gc.disable()
                try:
                    figure = contestant() * scale
                finally:
                    gc.enable()
                if round_number >= 0:
                    result.figures[name].append(figure)
            order.reverse()
        results.append(result)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return results


def repeated(call: Callable[[], Any], n: int) -> Callable[[], float]:
    """A contestant: the seconds of one call, by `n` of them."""

    def contestant() -> float:
        start = perf_counter()
        for _ in range(n):
            call()
        return (perf_counter() - start) / n

    return contestant


def numpy_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Exact attention of one head: `q` [dim], `keys` [n, dim], `values` [n, dim] to [dim]."""
    scores = keys @ q / np.sqrt(len(q))
    scores -= scores.max()
    weights = np.exp(scores)
    return weights @ values / weights.sum()


def in_subprocess(code: str, *, path: Sequence[str | Path] = ()) -> float:
    """The number that `code` prints last, run by this Python in a process of its own."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [*map(str, path), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def show(results: Sequence[Result]) -> None:
    """Prints the table: medians, the best in brackets, and how ours compares."""
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    rows = [["task", "unit", *names, "ratio", "reach", ""]]
    for result in results:
        task = result.task
        row = [task.name, task.unit]
        for name in names:
            if name in result.figures:
                row.append(f"{_number(result.median(name))} ({_number(result.best(name))})")
            else:
                row.append("")
        references = [name for name in result.figures if name != OURS]
        compared = bool(references) and OURS in result.figures
        ratio = result.ratio(references[0]) if compared else None
        row.append("" if ratio is None else f"{_number(ratio)} x")
        reach, reached = "", None
        if task.reach is not None and ratio is not None:
            reach, reached = f"{task.reach:g} x", ratio >= task.reach
        elif task.reach_value is not None:
            sign = ">=" if task.more_is_better else "<="
            value = result.median(OURS)
            reach = f"{sign} {task.reach_value:g}"
            reached = (
                value >= task.reach_value if task.more_is_better else value <= task.reach_value
            )
        row += [reach, {None: "", True: "reached", False: "MISSED"}[reached]]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(title: str, make_tasks: Callable[[], Sequence[Task]], repeats: int = 5) -> None:
    """The command line of a benchmark. `make_tasks` is called once the cores are chosen."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds (default %(default)s)")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--cores", default="", help="cores to pin to, like 0,1")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--list", action="store_true", help="name the tasks and stop")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, [int(core) for core in options.cores.split(",")])
    tasks = [task for task in make_tasks() if options.only in task.name]
    if options.list:
        print("\n".join(task.name for task in tasks))
        return
    where = machine()
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    print(f"{title}: median (best) of {options.repeats}")
    print(
        f"{where['cpu']}, cores {where['cores']}, {' '.join(where['flags'])}; load {where['load']}"
    )
    print(f"{where['system']}, Python {where['python']}, {packages}\n")
    results = run(tasks, options.repeats)
    show(results)
    if options.json:
        figures = [
            {
                "task": result.task.name,
                "unit": result.task.unit,
                "reach": result.task.reach,
                "reach_value": result.task.reach_value,
                "figures": result.figures,
            }
            for result in results
        ]
        document = {"title": title, "machine": where, "results": figures}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
