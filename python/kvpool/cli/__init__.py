"""The `kvpool` command."""

from kvpool.cli.main import main

__all__ = ["main"]
