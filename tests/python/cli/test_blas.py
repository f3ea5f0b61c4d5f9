"""OpenBLAS comes before MLX's own BLAS, and computes the same."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys

import pytest
from kvpool.cli import blas
from kvpool.cli.errors import CommandError

needs_openblas = pytest.mark.skipif(
    not sys.platform.startswith("linux") or ctypes.util.find_library("openblas") is None,
    reason="OpenBLAS is not installed (apt install libopenblas0-pthread)",
)

_PRODUCT = """
import json
from kvpool.cli.blas import blas_in_use, prefer_openblas
prefer_openblas()
import mlx.core as mx, numpy as np
rng = np.random.default_rng(5)
a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((67, 129), (129, 45)))
error = np.abs(np.array(mx.array(a) @ mx.array(b)) - a.astype(np.float64) @ b).max()
import ctypes
count = getattr(ctypes.CDLL(None), "openblas_get_num_threads", lambda: None)
print(json.dumps({"error": float(error), "blas": blas_in_use(), "threads": count()}))
"""


def product(choice: str, **environment: str) -> dict[str, object]:
    """A product of matrices by MLX in a process with ``KVPOOL_BLAS=choice``."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    ended = subprocess.run(
        [sys.executable, "-c", _PRODUCT],
        env={**own, "KVPOOL_BLAS": choice, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(ended.stdout))


def test_off_leaves_the_blas_of_mlx():
    result = product("off")
    assert result["blas"] == "built-in"
    assert result["error"] < 1e-4


@needs_openblas
@pytest.mark.parametrize("choice", ["auto", "libopenblas.so.0"])
def test_openblas_comes_first_and_products_are_right(choice):
    result = product(choice)
    assert str(result["blas"]).startswith("OpenBLAS ")
    assert result["error"] < 1e-4


@needs_openblas
def test_openblas_gets_one_thread_unless_the_environment_says():
    assert product("auto")["threads"] == 1
    assert product("auto", OPENBLAS_NUM_THREADS="2")["threads"] == 2


@needs_openblas
def test_mlx_binds_to_openblas():
    """The dynamic linker says where MLX's calls go: LD_DEBUG names each binding."""
    ended = subprocess.run(
        [sys.executable, "-c", _PRODUCT],
        env={**os.environ, "LD_DEBUG": "bindings", "KVPOOL_BLAS": "auto"},
        capture_output=True,
        text=True,
        check=True,
    )
    bound = [
        line
        for line in ended.stderr.splitlines()
        if "libmlx.so" in line.partition(" to ")[0] and "`cblas_sgemm'" in line
    ]
    assert bound
    assert all("libopenblas" in line.partition(" to ")[2] for line in bound)


def test_a_library_that_cannot_be_loaded_is_wrong_usage(monkeypatch):
    monkeypatch.setenv("KVPOOL_BLAS", "/no/such/library.so")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(CommandError, match=r"^KVPOOL_BLAS=/no/such/library\.so: ") as raised:
        blas.prefer_openblas()
    assert raised.value.code == 2


def test_nothing_is_loaded_once_mlx_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    monkeypatch.setenv("KVPOOL_BLAS", "/no/such/library.so")
    blas.prefer_openblas()
