"""`kvpool info`: what a bug report needs to say."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from kvpool import __version__, models
from kvpool.cli.blas import blas_in_use
from kvpool.cli.console import print_report

__all__ = ["add_parser", "collect"]


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, backend, SIMD target, BLAS, models",
        description="Says which versions, backend, SIMD target, threads, BLAS and models are in "
        "use.",
        epilog="examples:\n  kvpool info\n  kvpool info --json | jq .mlx.backend\n",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def collect() -> dict[str, Any]:
    """Everything that `kvpool info` says, as plain values; what is missing is None."""
    return {
        "kvpool": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "simd_target": _simd_target(),
        "mlx": _mlx(),
        "paged_caches": _paged_caches(),
        "mlx_extension": _mlx_extension(),
        "threads": _threads(),
        "mlx_lm": _version("mlx-lm"),
        "nanobind": _version("nanobind"),
        "blas": blas_in_use(),
        "models_dir": str(models.models_dir()),
        "models": {
            name: str(models.model_path(spec)) if models.is_prepared(spec) else None
            for name, spec in models.KNOWN_MODELS.items()
        },
    }


def _run(arguments: argparse.Namespace) -> int:
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    mlx = found.pop("mlx")
    prepared = found.pop("models")
    rows = [(key.replace("_", " "), str(value or "none")) for key, value in found.items()]
    mlx_rows = [("mlx", mlx["version"] or "not installed"), ("backend", mlx["backend"] or "none")]
    rows[4:4] = mlx_rows
    rows += [(f"model {name}", where or "not fetched") for name, where in prepared.items()]
    print_report([("kvpool info", rows)])
    return 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _simd_target() -> str | None:
    probe = getattr(import_module("kvpool._native"), "simd_target_name", None)
    return probe() if probe else None


def _mlx_extension() -> str | None:
    """The MLX that the extension of paged caches was built for."""
    try:
        built_for = import_module("kvpool._mlx").__mlx_version__
    except ImportError as error:
        present = find_spec("kvpool._mlx") is not None
        return f"does not load: {error}" if present else None
    return f"for MLX {built_for}"


def _threads() -> int:
    """Threads that paged attention may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _paged_caches() -> str | None:
    """Where the pages of paged caches lie and who reads them; None where there are none."""
    try:
        from kvpool._mlx_module import extension
    except ImportError:
        return None
    backend = extension.default_backend()
    return f"{backend} ({extension.describe_backend(backend)})"


def _mlx() -> dict[str, Any]:
    try:
        import mlx.core as mx
    except ImportError as error:
        # An installed MLX that does not load is worth a reason: plain `mlx` has no libmlx.so.
        version = _version("mlx")
        return {"version": version and f"{version} (does not load: {error})", "backend": None}
    backend = "cpu"
    if mx.metal.is_available():
        backend = "metal"
    elif hasattr(mx, "cuda") and mx.cuda.is_available():
        backend = "cuda"
    return {
        "version": _version("mlx"),
        "backend": backend,
        "default_device": str(mx.default_device()),
    }
