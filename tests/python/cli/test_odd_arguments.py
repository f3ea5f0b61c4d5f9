"""Wrong, extreme and odd arguments, files and streams: one line that names them, and the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvpool.cli import main

PAGED = ("--cache", "paged")


def run(model: Path, *options: str) -> int:
    """The exit code of a short answer, whoever ends it."""
    try:
        return main(
            ["generate", "--model", str(model), "--prompt", "hi", "--max-tokens", "4", *options]
        )
    except SystemExit as stopped:
        return int(stopped.code or 0)


def in_a_shell(script: str, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``script`` does, where ``$KVPOOL`` is the command and ``$MODEL`` the folder."""
    return subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "KVPOOL": f"{sys.executable} -m kvpool", "MODEL": str(model)}
        | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--n-blocks", "1000000000000"),
        ("--block-size", "9223372036854775807"),
        ("--max-tokens", "99999999999999999999"),
        ("--max-tokens", "1000000000000"),
        ("--owner", "99999999999999999999"),
        ("--owner", "-9223372036854775808"),  # kept for new_owner()
        ("--temp", "1", "--seed", "-1"),
        ("--temp", "1", "--seed", "99999999999999999999"),
        ("--metrics", ""),
        ("--metrics", "/no/such/folder/metrics"),
        ("--metrics", "/"),
        ("--prompt", "a\udcff"),
        ("--model", ""),
        (*PAGED, "--byte-budget", "99999999999999999999"),
        (*PAGED, "--method", "kivi"),  # its groups do not fit the blocks
        (*PAGED, "--method", "polar", "--bits", "9"),
        (*PAGED, "--age-policy", "fp16:9223372036854775807,int8:9223372036854775807,int4"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_wrong_usage_and_said_in_one_line(tiny_model, capsys, options):
    assert run(tiny_model, *options) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("kvpool") and "error: " in told
    assert "incompatible function arguments" not in told


def test_a_byte_budget_that_ends_first_is_what_ran_out(tiny_model, capsys):
    assert run(tiny_model, *PAGED, "--byte-budget", "1") == 3
    told = capsys.readouterr().err
    assert "the byte budget ran out" in told and "--n-blocks" not in told


def test_an_answer_is_reported_where_its_metrics_cannot_be_written(tiny_model, capsys):
    assert run(tiny_model, "--metrics", "/dev/full") == 1
    captured = capsys.readouterr()
    assert "cannot write the metrics" in captured.err
    assert "after the release  0 in use" in captured.out


def test_running_out_keeps_its_code_where_metrics_cannot_be_written(tiny_model, capsys):
    assert run(tiny_model, "--metrics", "/dev/full", "--n-blocks", "2") == 3
    told = capsys.readouterr().err
    assert "cannot write the metrics" in told and "the pool ran out" in told


@pytest.mark.parametrize("head_dim", ["8", "100"])
def test_methods_that_cannot_have_such_heads_are_left_out(capsys, head_dim):
    assert main(["methods", "--head-dim", head_dim]) == 0
    captured = capsys.readouterr()
    assert "without polar: " in captured.err
    assert "kivi" in captured.out and "polar" not in captured.out


@pytest.mark.parametrize("options", [("--bits", "0"), ("--head-dim", "-1"), ("--value-bits", "9")])
def test_methods_says_what_none_of_them_can(capsys, options):
    assert main(["methods", *options]) == 2
    assert "must be 1.." in capsys.readouterr().err


COMMAND = '$KVPOOL generate --model "$MODEL" --prompt hi --max-tokens 4 '


def test_closed_streams_are_not_taken_for_files(tiny_model):
    done = in_a_shell(COMMAND + "--quiet <&- 2>&-", tiny_model)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_notes_do_not_end_in_the_answer(tiny_model):
    quiet = in_a_shell(COMMAND + "--quiet", tiny_model)
    assert quiet.returncode == 0
    done = in_a_shell(COMMAND + "2>&-", tiny_model)
    assert done.returncode == 0
    assert done.stdout.startswith(quiet.stdout)


def test_a_closed_standard_output_is_an_error(tiny_model):
    done = in_a_shell(COMMAND + ">&-", tiny_model)
    assert done.returncode == 1
    assert done.stderr == "kvpool: error: standard output is closed\n"


def test_a_terminal_without_the_characters_gets_others(tiny_model):
    done = in_a_shell(COMMAND + "--quiet", tiny_model, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
