"""How a command fails: one line on standard error and one of these exit codes."""

__all__ = ["ERROR", "EXHAUSTED", "INTERRUPTED", "TOKENS_DIFFER", "USAGE", "CommandError"]

ERROR = 1
USAGE = 2
EXHAUSTED = 3
"""The pool ran out of blocks."""
TOKENS_DIFFER = 4
"""`--compare-stock` found another token."""
INTERRUPTED = 130


class CommandError(Exception):
    """A failure that the user can read and act upon."""

    def __init__(self, message: str, code: int = ERROR) -> None:
        super().__init__(message)
        self.code = code
