"""What the rest of kvpool shares."""

from kvpool.core.exceptions import (
    ArtifactNotFoundError,
    BlockPoolExhaustedError,
    CodebookDimensionMismatch,
    CyclicPipelineError,
    OwnerAlreadyActiveError,
    QuantizerConfigError,
)

__all__ = [
    "ArtifactNotFoundError",
    "BlockPoolExhaustedError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "OwnerAlreadyActiveError",
    "QuantizerConfigError",
]
