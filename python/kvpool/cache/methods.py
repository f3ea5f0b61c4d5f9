"""The quantisation methods there are, as the registry of the C++ part lists them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvpool import _native

__all__ = ["METHODS", "STANDALONE_METHODS", "Method", "MethodInfo", "Parameter"]


@dataclass(frozen=True)
class Parameter:
    """A field of ``KVCacheConfig`` that a method reads."""

    name: str
    default: str
    limits: str
    what: str


@dataclass(frozen=True)
class MethodInfo:
    """A row of the registry.

    Attributes:
        name: What ``KVCacheConfig.method`` calls it.
        title: Of the paper.
        authors: Of the paper.
        arxiv: Its arXiv id, empty where none was found.
        summary: How it works.
        min_bits: The least ``bit_width_inlier``.
        max_bits: The largest one.
        head_dim_multiple: ``head_dim`` is a multiple of this.
        default_residual_length: Newest tokens kept exact where the config does not say.
        parameters: Those besides what every method reads.
    """

    name: str
    title: str
    authors: str
    arxiv: str
    summary: str
    min_bits: int
    max_bits: int
    head_dim_multiple: int
    default_residual_length: int
    parameters: tuple[Parameter, ...]


def _read_registry() -> dict[str, MethodInfo]:
    rows: dict[str, MethodInfo] = {}
    for row in _native.method_table():
        parameters = tuple(Parameter(*parameter) for parameter in row.pop("parameters"))
        rows[row["name"]] = MethodInfo(**row, parameters=parameters)
    return rows


METHODS = _read_registry()
"""Every method by name, in the order in which lists show them."""

STANDALONE_METHODS = frozenset(METHODS)
"""Names of the methods whose caches attend by themselves: all of them."""

Method = enum.Enum("Method", {name.upper(): name for name in METHODS}, type=str)  # type: ignore[misc]
"""The names as an enum: ``Method.KIVI == "kivi"``."""
