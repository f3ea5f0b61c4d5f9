"""The layering check must be able to fail: each kind of forbidden include, in a small tree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

spec = importlib.util.spec_from_file_location("check_layers", ROOT / "scripts/check_layers.py")
assert spec is not None and spec.loader is not None
check_layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_layers)


def found_in(tmp_path: Path, file: str, include: str) -> list[str]:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#pragma once\n#include {include}\n")
    return list(check_layers.violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("include/kvpool/core/a.h", '"kvpool/cache/lease.h"'),
        ("src/base/a.cpp", '"kvpool/core/stream.h"'),
        ("src/formats/a.cpp", '"kvpool/core/stream.h"'),
        ("src/metrics/a.cpp", '"kvpool/trace/recorder.h"'),
        ("src/core/a.cpp", "<fmt/core.h>"),
        ("src/core/a.cpp", "<hwy/highway.h>"),
        ("include/kvpool/cache/a.h", "<mlx/array.h>"),
        ("src/cache/a.cpp", "<nanobind/nanobind.h>"),
        ("src/cache/a.cpp", "<Python.h>"),
        ("python/bindings/a.cpp", "<mlx/array.h>"),
        ("python/bindings/a.cpp", '"kvpool/mlx_ext/a.h"'),
        ("python/bindings_mlx/a.cpp", "<mlx/array.h>"),
        ("src/mlx_ext/a.cpp", "<nanobind/nanobind.h>"),
        ("src/core/a.cpp", '"kvpool/unheard_of/a.h"'),
        ("src/unheard_of/a.cpp", "<vector>"),
    ],
)
def test_a_forbidden_include_is_found(tmp_path: Path, file: str, include: str) -> None:
    assert len(found_in(tmp_path, file, include)) == 1


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("src/core/a.cpp", '"kvpool/base/ids.h"'),
        ("src/core/a.cpp", '"kvpool/core/stream.h"'),
        ("src/cache/a.cpp", '"kvpool/storage/block_storage.h"'),
        ("src/kernels/a.cpp", "<hwy/highway.h>"),
        ("src/core/a.cpp", "<vector>"),
        ("python/bindings/a.cpp", '"kvpool/cache/lease.h"'),
        ("src/mlx_ext/a.cpp", "<mlx/array.h>"),
        ("python/bindings_mlx/a.cpp", '"kvpool/mlx_ext/a.h"'),
        ("python/bindings_mlx/a.cpp", "<nanobind/nanobind.h>"),
    ],
)
def test_an_include_that_points_down_passes(tmp_path: Path, file: str, include: str) -> None:
    assert found_in(tmp_path, file, include) == []


def test_a_tree_without_sources_is_not_a_pass(tmp_path: Path) -> None:
    assert check_layers.main(["check_layers", str(tmp_path)]) == 2


def test_the_tree_is_layered() -> None:
    assert check_layers.main(["check_layers", str(ROOT)]) == 0
