"""Puts OpenBLAS, where it is installed, before MLX's own BLAS, as the ``kvpool`` command does.

Here, since it has to happen before any test imports MLX: the real models answer in half the time.
"""

from kvpool.cli.blas import prefer_openblas

prefer_openblas()
