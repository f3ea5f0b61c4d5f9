"""The pool's meaning in plain lists, one block at a time: the oracle of the property tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.memory import PoolConfig


class Shortage(Exception):
    """Too few blocks."""


@dataclass(eq=False)
class NaiveBlock:
    id: int
    stream: str
    format: str = "fp16"
    n_used: int = 0
    used_before: bool = False
    references: int = 0


@dataclass(eq=False)
class NaiveReference:
    """What a handle names; `live` ends when it is freed."""

    block: NaiveBlock
    owner: int
    live: bool = True


@dataclass
class NaivePool:
    config: PoolConfig
    free: dict[str, list[NaiveBlock]] = field(default_factory=dict)
    held: dict[int, list[NaiveReference]] = field(default_factory=dict)
    registered: set[int] = field(default_factory=set)
    reserved: dict[tuple[str, int], int] = field(default_factory=dict)
    next_id: int = 0
    n_blocks: int = 0
    n_allocations: int = 0
    n_frees: int = 0
    n_reused: int = 0
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        n = self.config.n_blocks
        for stream, count in self.split(n - n // 2, n // 2).items():
            self.free[stream] = []
            self.mint(stream, count)

    def split(self, n_keys: int, n_values: int) -> dict[str, int]:
        if self.config.separate_kv:
            return {"k": n_keys, "v": n_values}
        return {"kv": n_keys + n_values}

    def stream(self, stream: str) -> str:
        return stream if self.config.separate_kv else "kv"

    def mint(self, stream: str, n: int) -> None:
        for _ in range(n):
            self.free[stream].append(NaiveBlock(self.next_id, stream))
            self.next_id += 1
        self.n_blocks += n

    def n_reserved(self, stream: str, owner: int) -> int:
        return self.reserved.get((stream, owner), 0)

    def available(self, stream: str, owner: int | None = None) -> int:
        """Free blocks not reserved by anyone but `owner`."""
        kept = sum(n for (s, o), n in self.reserved.items() if s == stream and o != owner)
        return len(self.free[stream]) - kept

    def obtain(self, owner: int, wanted: dict[str, int]) -> None:
        """Grows the pool so that `owner` can have `wanted` of each stream, or fails."""
        missing = {s: max(n - self.available(s, owner), 0) for s, n in wanted.items()}
        if sum(missing.values()) > self.headroom():
            self.n_exhausted += 1
            raise Shortage
        for stream, n in missing.items():
            self.mint(stream, n)
            self.n_grown += n

    def headroom(self) -> int:
        if not self.config.grow_on_exhaustion:
            return 0
        most = self.config.max_blocks
        return 10**9 if most is None else max(most - self.n_blocks, 0)

    def take(self, stream: str, owner: int, format: str, n_used: int) -> NaiveReference:
        block = self.free[stream].pop()
        self.n_allocations += 1
        self.n_reused += block.used_before
        block.format, block.n_used, block.used_before, block.references = format, n_used, True, 1
        if (stream, owner) in self.reserved:
            self.reserved[stream, owner] = max(self.reserved[stream, owner] - 1, 0)
        return NaiveReference(block, owner)

    def note_peak(self) -> None:
        self.peak = max(self.peak, self.n_allocations - self.n_frees)

    def fills(self, n_tokens: int) -> list[int]:
        full, rest = divmod(n_tokens, self.config.block_size)
        return [self.config.block_size] * full + ([rest] if rest else [])

    def allocate(
        self, streams: list[str], n_tokens: int, owner: int, format: str, layers: int
    ) -> list[list[NaiveReference]]:
        fills = self.fills(n_tokens) * layers
        wanted: dict[str, int] = {}
        for stream in streams:
            wanted[stream] = wanted.get(stream, 0) + len(fills)
        self.obtain(owner, wanted)
        runs = [[self.take(s, owner, format, n_used) for n_used in fills] for s in streams]
        for run in runs:
            self.held.setdefault(owner, []).extend(run)
        self.note_peak()
        return runs

    def drop(self, reference: NaiveReference) -> None:
        if not reference.live:
            return
        reference.live = False
        references = self.held[reference.owner]
        references.remove(reference)
        if not references:
            del self.held[reference.owner]
        reference.block.references -= 1
        if reference.block.references == 0:
            self.free[reference.block.stream].append(reference.block)
            self.n_frees += 1

    def free_all(self, owner: int) -> None:
        for reference in list(self.held.get(owner, [])):
            self.drop(reference)
        self.release(owner)

    def release(self, owner: int) -> None:
        self.registered.discard(owner)
        self.reserved = {key: n for key, n in self.reserved.items() if key[1] != owner}

    def is_active(self, owner: int) -> bool:
        reserves = any(n for (_, o), n in self.reserved.items() if o == owner)
        return owner in self.held or owner in self.registered or reserves

    def fork(self, owner: int, new_owner: int) -> list[NaiveReference]:
        copies = [NaiveReference(r.block, new_owner) for r in self.held.get(owner, [])]
        for copy in copies:
            copy.block.references += 1
        if copies:
            self.held[new_owner] = copies
        return list(copies)

    def writable(self, reference: NaiveReference) -> NaiveReference:
        block = reference.block
        if block.references == 1:
            return reference
        self.obtain(reference.owner, {block.stream: 1})
        fresh = self.take(block.stream, reference.owner, block.format, block.n_used)
        references = self.held[reference.owner]
        references[references.index(reference)] = fresh
        reference.live = False
        block.references -= 1
        self.note_peak()
        return fresh

    def reserve(self, owner: int, wanted: dict[str, int]) -> None:
        self.obtain(owner, wanted)
        for stream, n in wanted.items():
            self.reserved[stream, owner] = n

    def shrink(self, stream: str, target: int) -> int:
        """Never-used blocks go first, then the coldest: the lowest on the stack."""
        kept = sum(n for (s, _), n in self.reserved.items() if s == stream)
        free = self.free[stream]
        n = max(len(free) - max(target, kept), 0)
        leaving = sorted(free, key=lambda block: block.used_before)[:n]
        self.free[stream] = [block for block in free if block not in leaving]
        self.n_blocks -= n
        self.n_retired += n
        return n

    def blocks(self) -> set[NaiveBlock]:
        return {reference.block for held in self.held.values() for reference in held}

    def fragmented(self) -> int:
        return sum(0 < block.n_used < self.config.block_size for block in self.blocks())

    def unused_slots(self) -> int:
        return sum(self.config.block_size - block.n_used for block in self.blocks())
