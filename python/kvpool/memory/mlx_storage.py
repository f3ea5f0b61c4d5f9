"""The bytes of a pool's blocks, as MLX arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool import _native
from kvpool._arrays import Array, stored_numbers
from kvpool.memory._config import checked_int
from kvpool.memory.block_pool import Block, BlockPoolAllocator

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["MLXBlockStorage"]


class MLXBlockStorage:
    """Stores rows of numbers in the blocks of a pool: ``block_size`` rows of ``head_dim`` each.

    A block's bytes are made when it is first used and stay with its id through frees and checkouts.
    Its format tag says how they lie: "fp32", "fp16", "bf16", or "int8", "int4", "int3", "int2",
    "int1" for packed unsigned codes 0 .. 2**bits - 1. Blocks of different formats live side by side
    in one pool (``kvpool.formats.FORMATS`` lists them).

    Rows that were not written since the block was checked out read as zero, so no request sees
    what the last one left. Blocks that the pool retires lose their bytes. A block that is not
    checked out of this pool is a ValueError.

    Arrays that come out are copies: a later write does not change them.

    Args:
        pool: The pool whose blocks are stored.
        head_dim: Numbers in a row, 1 to 2**20.
        scrub_on_free: Zero a block's bytes when it is freed, instead of before its next use.

    Raises:
        ValueError: head_dim is out of range.
        TypeError: head_dim is no int, or pool no BlockPoolAllocator.
    """

    def __init__(
        self, pool: BlockPoolAllocator, head_dim: int, *, scrub_on_free: bool = False
    ) -> None:
        if not isinstance(pool, BlockPoolAllocator):
            raise TypeError(
                f"[MLXBlockStorage] pool must be a BlockPoolAllocator, got {type(pool).__name__}"
            )
        self._pool = pool
        self._head_dim = checked_int(
            "MLXBlockStorage", "head_dim", head_dim, 1, _native.MAX_ROW_WIDTH
        )
        self._native = _native.BlockStorage(pool, self._head_dim, scrub_on_free=bool(scrub_on_free))

    @property
    def pool(self) -> BlockPoolAllocator:
        return self._pool

    @property
    def head_dim(self) -> int:
        return self._head_dim

    def buffer_for(self, block: Block) -> mx.array:
        """All rows of a block, shape ``(block_size, head_dim)``.

        The dtype is the format's: float32, float16 or bfloat16, or uint8 for codes. Makes the
        block's bytes where it has none yet.
        """
        return _to_mlx(*self._native.read_all(block))

    def write(self, block: Block, offset: int, values: Any) -> None:
        """Writes rows from row ``offset`` on; ``block.n_used`` becomes at least ``offset + n``.

        Args:
            block: A block that only its owner refers to (see ``writable``).
            offset: First row, >= 0.
            values: MLX or numpy array or nested list, shape ``(n, head_dim)``, or ``(n, 1)`` to
                fill each row with one number. Cast to the block's format: floats round to nearest
                even; codes drop a fraction.

        Raises:
            ValueError: The rows do not fit into the block or have another shape, a number is no
                code of the format, the block is shared, stale or of another pool, or its tag is
                no format. Nothing was written.
            TypeError: ``values`` are no real numbers, ``offset`` no int, ``block`` no Block.
        """
        call = "MLXBlockStorage::write"
        offset = checked_int(call, "offset", offset, 0)
        numbers, bfloat16 = stored_numbers(call, "values", values)
        if numbers.shape == (0,):
            numbers = numbers.reshape(0, self._head_dim)
        if numbers.ndim != 2 or numbers.shape[1] not in (1, self._head_dim):
            raise ValueError(
                f"[{call}] values must have shape (n, {self._head_dim}) or (n, 1), "
                f"got {numbers.shape}"
            )
        rows = np.broadcast_to(numbers, (numbers.shape[0], self._head_dim))
        self._native.write(block, offset, np.ascontiguousarray(rows), bfloat16)

    def read(self, block: Block) -> mx.array:
        """The rows in use, shape ``(block.n_used, head_dim)``; dtypes as ``buffer_for``."""
        return _to_mlx(*self._native.read(block))

    def writable(self, block: Block) -> Block:
        """``pool.writable(block)``, and the rows come along.

        Returns:
            ``block`` itself where nobody else refers to it, otherwise a fresh block with its rows.

        Raises:
            BlockPoolExhaustedError: A fresh block is needed and there is none.
        """
        return self._native.writable(block)

    def release(self, block: Block) -> None:
        """Lets go of a block's bytes; its rows read as zero afterwards.

        Does nothing where there are none. A stale block releases only what it left behind itself.
        """
        self._native.release(block)

    def resident_bytes(self) -> int:
        """Bytes of memory that blocks hold."""
        return self._native.resident_bytes()

    def idle_bytes(self) -> int:
        """Bytes of memory that no block holds, kept for the next one of the same size."""
        return self._native.idle_bytes()

    def drop_idle(self) -> None:
        """Gives the idle memory back to the system."""
        self._native.drop_idle()

    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first thing that does not add up. For tests."""
        self._native.check_invariants()

    def __repr__(self) -> str:
        return f"MLXBlockStorage(head_dim={self._head_dim}, resident_bytes={self.resident_bytes()})"


def _to_mlx(format: str, rows: Array) -> mx.array:
    import mlx.core as mx

    array = mx.array(rows)
    return array.view(mx.bfloat16) if format == "bf16" else array
