"""The exceptions that kvpool raises on purpose.

Each derives from the built-in one that fits it, so a caller may catch either. Messages start with
the call and name the argument and its value:
``[BlockPoolAllocator::shrink] target_free must be >= 0, got -1``.
"""

from __future__ import annotations

__all__ = [
    "ArtifactNotFoundError",
    "AttentionHookError",
    "BlockPoolExhaustedError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "OwnerAlreadyActiveError",
    "PromptCacheError",
    "QuantizerConfigError",
    "RequestTooLargeError",
]


class BlockPoolExhaustedError(RuntimeError):
    """A pool has too few blocks for a request; nothing was allocated.

    Where a pool raised it, the attributes say of which stream ("k", "v" or "kv") the request by
    ``owner`` needed ``needed`` blocks when it could have had ``available`` of the ``managed`` ones.
    Where a model's caches raised it, ``tokens_that_fit`` says how many tokens every layer could
    still take. Where the byte budget of paged caches ended first, ``needed_bytes`` and
    ``available_bytes`` say so in place of blocks.
    """

    stream: str | None = None
    owner: int | None = None
    needed: int | None = None
    available: int | None = None
    managed: int | None = None
    tokens_that_fit: int | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None


class AttentionHookError(RuntimeError):
    """The attention of this mlx-lm cannot be replaced, or was replaced by something else since."""


class OwnerAlreadyActiveError(ValueError):
    """``register_owner`` of an owner that has blocks or is registered already."""


class PromptCacheError(ValueError):
    """A file of a saved prompt is damaged, or fits neither the pool nor the model it is loaded for;
    or caches cannot be saved. Nothing was charged."""


class RequestTooLargeError(ValueError):
    """A pool could not hold a request's prompt and answer even if it held nothing else; the request
    was not taken."""


class QuantizerConfigError(ValueError):
    """A quantised cache is configured in a way that cannot work."""


class ArtifactNotFoundError(FileNotFoundError):
    """A file prepared beforehand (a calibration, a codebook) is not where it should be."""


class CyclicPipelineError(RuntimeError):
    """The steps of a pipeline depend on each other in a circle."""


class CodebookDimensionMismatch(ValueError):
    """A codebook's shape does not match the vectors it is used on."""
