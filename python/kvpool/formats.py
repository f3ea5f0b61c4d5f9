"""How the numbers of a block lie in memory, by the tag that blocks carry.

    >>> from kvpool.formats import FORMATS
    >>> FORMATS["int4"].row_bytes(128), FORMATS["int4"].max_code
    (64, 15)

``int8`` to ``int1`` hold bare unsigned codes, 0 to 2**bits - 1, packed; what a code means is its
writer's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpool import _native
from kvpool._native import Format

FORMATS: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in _native.FORMATS})

__all__ = ["FORMATS", "Format"]
