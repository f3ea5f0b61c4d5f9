"""kvpool._mlx loads beside the MLX that it was built for, and says so where that is another."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest
from kvpool import _native
from kvpool._mlx_module import extension


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_module_is_built_for_the_mlx_that_is_installed() -> None:
    assert extension.__mlx_version__ == _native.__mlx_version__ == mx.__version__


def test_another_mlx_is_refused_with_both_versions() -> None:
    done = run("import mlx.core; mlx.core.__version__ = '0.99.0'; import kvpool._mlx_module")
    assert done.returncode != 0
    assert f"built for MLX {mx.__version__}, and MLX 0.99.0 is installed" in done.stderr


def test_a_build_without_mlx_says_so() -> None:
    done = run("import kvpool._native as n; n.__mlx_version__ = None; import kvpool._mlx_module")
    assert done.returncode != 0
    assert "ImportError: this kvpool was built without MLX" in done.stderr


@pytest.mark.parametrize("module", ["kvpool", "kvpool.memory"])
def test_the_pool_needs_no_mlx(module: str) -> None:
    code = f"import sys; sys.modules['mlx'] = None; import {module} as m; m.BlockPoolAllocator"
    assert run(code).returncode == 0


def test_the_extension_may_be_imported_before_mlx() -> None:
    assert run("import kvpool._mlx, mlx.core").returncode == 0
