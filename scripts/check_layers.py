#!/usr/bin/env python3
"""Fails where a file includes what its layer may not: arrows of dependency point down only.

    scripts/check_layers.py [ROOT]

Prints one line for each forbidden #include and exits 1; exits 2 where it found nothing to check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Top row first. A layer may include itself and every layer of a row below its own.
ROWS = (
    ("mlx_ext",),
    ("cache",),
    ("methods", "prefix", "tiers", "metrics", "trace"),
    ("kernels", "storage"),
    ("formats", "core"),
    ("base",),
)
RANK = {layer: rank for rank, row in enumerate(reversed(ROWS)) for layer in row}

# Headers by prefix, and the only folders that may include them.
RESERVED = {
    "nanobind/": ("python/bindings/", "python/bindings_mlx/"),
    "Python.h": ("python/bindings/", "python/bindings_mlx/"),
    "mlx/": ("include/kvpool/mlx_ext/", "src/mlx_ext/"),
    # kvpool._native loads where there is no MLX.
    "kvpool/mlx_ext/": ("include/kvpool/mlx_ext/", "src/mlx_ext/", "python/bindings_mlx/"),
    "hwy/": ("src/kernels", "src/methods"),
    "fmt/": (),
    "xxhash": ("src/prefix",),
    "zstd": ("src/tiers",),
    "hiredis/": ("src/tiers",),
    "prometheus/": ("src/metrics",),
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def layer_of(path: Path) -> str | None:
    """The layer of include/kvpool/LAYER/... or src/LAYER/..., None for any other file."""
    parts = path.parts
    if parts[:2] == ("include", "kvpool") and len(parts) > 3:
        return parts[2]
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return None


def violations(root: Path) -> Iterator[str]:
    """One line for each forbidden include below `root`."""
    for path, text in sources(root):
        layer = layer_of(path)
        if layer is not None and layer not in RANK:
            yield f"{path}: layer '{layer}' stands in no row of scripts/check_layers.py"
            continue
        for included in INCLUDE.findall(text):
            where = f"{path}: includes <{included}>"
            if included.startswith("kvpool/") and layer is not None:
                target = included.split("/")[1]
                if target not in RANK:
                    yield f"{where}, of no known layer"
                elif target != layer and RANK[target] >= RANK[layer]:
                    yield f"{where}: {layer} may not depend on {target}"
            for prefix, allowed in RESERVED.items():
                if included.startswith(prefix) and not str(path).startswith(allowed):
                    yield f"{where}: only {', '.join(allowed) or 'nobody'} may"


def sources(root: Path) -> Iterator[tuple[Path, str]]:
    """The library's and the bindings' C++ files, as paths relative to `root`."""
    for folder in ("include", "src", "python/bindings", "python/bindings_mlx"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".h", ".cpp", ".cu"}:
                yield path.relative_to(root), path.read_text()


def main(argv: list[str]) -> int:
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).parent.parent
    n_files = sum(1 for _ in sources(root))
    if not n_files:
        print(f"check_layers: no C++ file below {root}", file=sys.stderr)
        return 2
    found = list(violations(root))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"check_layers: {n_files} files, {len(found)} forbidden includes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
