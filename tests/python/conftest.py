"""Puts OpenBLAS, where it is installed, before MLX's own BLAS, as the ``kvpool`` command does.

Here, since it has to happen before any test imports MLX: the real models answer in half the time.
On a GPU products of fp32 are to be just that: with TF32's ten bits a request's tokens would be
others in a batch than alone, whatever holds its keys and values.
"""

import os

from kvpool.cli.blas import prefer_openblas

prefer_openblas()
os.environ.setdefault("MLX_ENABLE_TF32", "0")
