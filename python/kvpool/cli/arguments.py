"""Types of command-line arguments, with messages that name the value."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["file_name", "owner", "positive", "seed", "temperature", "text"]


def positive(given: str) -> int:
    return _whole(given, 1, 2**63 - 1, "a whole number >= 1")


def owner(given: str) -> int:
    return _whole(given, -(2**63), 2**63 - 1, "a whole number of 64 bits")


def seed(given: str) -> int:
    return _whole(given, 0, 2**64 - 1, "a whole number of 64 bits >= 0")


def temperature(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {given!r}")
    return value


def text(given: str) -> str:
    """Bytes that are no UTF-8 come as lone surrogates, which no tokenizer takes."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8, got {given!r}") from error
    return given


def file_name(given: str) -> str:
    """A file to write: its folder has to be there, long before it is written."""
    path = Path(given)
    if not given or (given != "-" and (path.is_dir() or not path.parent.is_dir())):
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {given!r}")
    return given


def _whole(given: str, least: int, most: int, what: str) -> int:
    try:
        value = int(given)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {what}, got {given!r}")
    return value
