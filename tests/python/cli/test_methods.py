"""`kvpool methods`."""

from __future__ import annotations

import json

from kvpool.cache import METHODS
from kvpool.cli import main


def test_the_table_has_every_method_with_its_paper_size_and_quality(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "kvpool methods: 2 bits, head_dim 128"
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == list(METHODS)
    assert "arXiv:2402.02750" in rows["kivi"]
    assert "3% Is All You Need" in rows["spectral"]
    assert rows["turboquant_mse"].split()[2:5] == ["5.12", "164", "164"]
    assert rows["kivi"].split()[2:5] == ["3.00", "96", "200"]


def test_json_follows_the_options(capsys):
    assert main(["methods", "--json", "--bits", "4", "--head-dim", "64", "--value-bits", "4"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(METHODS)
    assert rows["turboquant_mse"]["coded_bytes_per_token"] == 2 * (2 + 32)
    assert all(0.9 < row["cosine"] <= 1 for name, row in rows.items() if name != "qjl")


def test_what_cannot_work_is_one_line_and_an_exit_code(capsys):
    assert main(["methods", "--bits", "9"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bit_width_inlier must be 1..8" in error
