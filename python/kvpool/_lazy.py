"""Module attributes that are imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module`` that finds each name of ``sources`` in the module it names.

    Keeps MLX out of an import that does not need it. Looked up afresh on every access: nothing is
    written into ``module``, so a failed import stays an error of that access alone.
    """

    def __getattr__(name: str) -> Any:
        try:
            source = sources[name]
        except KeyError:
            raise AttributeError(f"module {module!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(source), name)

    return __getattr__
