"""kvpool: a KV-cache block pool for language-model inference."""

from kvpool._native import __version__

__all__ = ["__version__"]
