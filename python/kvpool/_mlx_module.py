"""Imports ``kvpool._mlx``, where the MLX that is installed is the one that it was built for.

A module built for one MLX does not load beside another (the loader speaks of an undefined symbol),
so the versions are compared before it is tried.
"""

from __future__ import annotations

import mlx.core

from kvpool._native import __mlx_version__ as _built_for

if _built_for is None:
    raise ImportError("this kvpool was built without MLX: build it where MLX 0.32.4 is installed")
if mlx.core.__version__ != _built_for:
    raise ImportError(
        f"kvpool was built for MLX {_built_for}, and MLX {mlx.core.__version__} is installed: "
        f"install mlx=={_built_for}, or build kvpool again"
    )

import kvpool._mlx as extension

__all__ = ["extension"]
