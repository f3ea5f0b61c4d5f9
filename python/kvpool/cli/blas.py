"""Puts OpenBLAS in front of the slow reference BLAS that MLX's CPU wheel for Linux brings.

A library loaded with RTLD_GLOBAL before MLX comes first when the dynamic linker looks up
`cblas_sgemm` for MLX, as with LD_PRELOAD, but without starting the process again and without
reaching into child processes. Only the command does this: a library must not change which BLAS
its host program uses.
"""

from __future__ import annotations

import ctypes
import os
import sys

from kvpool.cli.errors import USAGE, CommandError

__all__ = ["blas_in_use", "prefer_openblas"]

_SONAME = "libopenblas.so.0"
_VARIABLE = "KVPOOL_BLAS"
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def prefer_openblas() -> None:
    """Loads what `KVPOOL_BLAS` names: `auto` (OpenBLAS if installed), `off`, or a library's path.

    Does nothing when MLX is already imported, where it would come too late.

    Raises:
        CommandError: `KVPOOL_BLAS` names a library that cannot be loaded.
    """
    choice = os.environ.get(_VARIABLE) or "auto"
    if choice == "off" or not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return
    library = _SONAME if choice == "auto" else choice
    try:
        loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if choice != "auto":
            raise CommandError(f"{_VARIABLE}={choice}: {error}", USAGE) from error
        return
    # Decoding multiplies one row at a time: a second thread costs more than it brings.
    if hasattr(loaded, "openblas_set_num_threads") and not any(
        name in os.environ for name in _THREAD_VARIABLES
    ):
        loaded.openblas_set_num_threads(1)


def blas_in_use() -> str:
    """OpenBLAS with its version and processor type where it comes before MLX's, else `built-in`."""
    try:
        describe = ctypes.CDLL(None).openblas_get_config
    except (AttributeError, OSError):
        return "built-in"
    describe.restype = ctypes.c_char_p
    return (describe() or b"OpenBLAS").decode(errors="replace").strip()
