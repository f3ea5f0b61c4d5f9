"""What holds for every command: help, versions, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvpool import __version__
from kvpool.cli import main
from kvpool.cli import model as model_command

COMMANDS = [
    [],
    ["generate"],
    ["info"],
    ["model"],
    ["model", "fetch"],
    ["model", "list"],
    ["model", "path"],
]


def exit_code(*arguments: str) -> int:
    """Of a command line that argparse itself ends."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_an_example_of_every_command(command, capsys):
    assert exit_code(*command, "--help") == 0
    assert "\n  kvpool " + " ".join(command) in capsys.readouterr().out


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"kvpool {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["generate"], ["model", "fetch", "gpt9"], ["info", "--loud"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert exit_code(*arguments) == 2
    assert "usage: kvpool" in capsys.readouterr().err


def break_the_listing(monkeypatch, error):
    def broken(_):
        raise error

    monkeypatch.setattr(model_command.models, "model_path", broken)


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    break_the_listing(monkeypatch, ValueError("the first line\nand the second"))
    assert main(["model", "list"]) == 1
    expected = "kvpool: error: ValueError: the first line and the second\n"
    assert capsys.readouterr().err == expected


def test_debug_shows_the_traceback(monkeypatch, capsys):
    break_the_listing(monkeypatch, ValueError("broken"))
    assert main(["model", "list", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    break_the_listing(monkeypatch, KeyboardInterrupt())
    assert main(["model", "list"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m kvpool model list | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.strip() in ("0", "141")  # 0 where the pipe took all before it was closed


def test_the_command_does_not_import_mlx_before_it_has_to():
    code = "import sys, kvpool.cli; sys.exit('mlx.core' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
