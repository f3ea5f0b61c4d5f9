"""`kvpool info`."""

from __future__ import annotations

import json
import platform

import mlx.core as mx
import pytest
from kvpool import __version__
from kvpool.cli import info, main


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL_MODELS", str(tmp_path))


def test_json_has_all_of_it(capsys, tmp_path):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kvpool"] == __version__
    assert found["python"] == platform.python_version()
    assert found["mlx"]["version"] == mx.__version__
    assert found["mlx"]["backend"] in ("cpu", "metal", "cuda")
    backend, _, about = found["paged_caches"].partition(" ")
    assert backend == {"cpu": "cpu", "cuda": "cuda", "metal": "gather"}[found["mlx"]["backend"]]
    assert {"cpu": "kernels on the CPU", "cuda": "CUDA on ", "gather": "MLX's own"}[
        backend
    ] in about
    assert found["models_dir"] == str(tmp_path)
    assert found["models"] == {"smollm2": None, "gemma3": None}


def test_the_table_names_what_is_there_and_what_is_not(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "kvpool info"
    values = {
        label.strip(): value for label, _, value in (line[2:].partition("  ") for line in lines[1:])
    }
    assert values["mlx"].strip() == mx.__version__
    assert values["model gemma3"].strip() == "not fetched"


def test_a_missing_package_is_none():
    assert info._version("surely-no-such-package") is None
