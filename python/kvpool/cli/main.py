"""Parses the command line, runs a command and turns what it raises into an exit code."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from kvpool import __version__
from kvpool.cli import generate, info, methods, model
from kvpool.cli.blas import prefer_openblas
from kvpool.cli.errors import ERROR, INTERRUPTED, CommandError
from kvpool.models import ModelError

__all__ = ["main"]

_EXAMPLES = """\
examples:
  kvpool generate --prompt "Why is the sky blue?"
  kvpool generate --prompt "Count to ten." --compare-stock
  kvpool model fetch smollm2
  kvpool methods --bits 3
  kvpool info

exit codes: 0 done, 1 error, 2 wrong usage, 3 the pool ran out of blocks,
4 --compare-stock found another token, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `kvpool` command and returns its exit code."""
    _complete_standard_streams()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if sys.stdout is None:
        print("kvpool: error: standard output is closed", file=sys.stderr)
        return ERROR
    on_sigterm = signal.signal(signal.SIGTERM, _raise_system_exit)
    try:
        prefer_openblas()
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            print(f"kvpool: error: {_one_line(error)}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else ERROR
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


class _CommandParser(argparse.ArgumentParser):
    """Each command takes ``--debug``, and its examples are printed as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpool",
        description="A KV-cache block pool in the decode path of a real model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    generate.add_parser(commands)
    model.add_parser(commands)
    methods.add_parser(commands)
    info.add_parser(commands)
    return parser


def _complete_standard_streams() -> None:
    """Makes up for standard streams that the caller closed or that cannot print every character.

    A file that is opened later would get a closed stream's number: MLX loads nothing from file 0,
    and what is printed would end in a model's weights.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CommandError | ModelError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raise_system_exit(number: int, frame: FrameType | None) -> None:
    """Lets `finally` blocks run, so that a terminated fetch or generation leaves nothing behind."""
    del frame
    raise SystemExit(128 + number)
