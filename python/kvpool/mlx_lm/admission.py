"""Admission: a request begins when the pool has room for all that it may become.

mlx-lm's ``BatchGenerator`` begins a request as soon as its batch has a place. Where the requests
together outgrow the pool, some step runs out of blocks, and with it all of them end.
``PagedBatchGenerator`` lets a request wait, in order, until the blocks are there that its prompt
and ``max_tokens`` more tokens will take; those that have begun are never short of any.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from kvpool.core.exceptions import RequestTooLargeError
from kvpool.memory.block_pool import BlockPoolAllocator

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache

__all__ = ["Admission", "AdmissionStats", "PagedBatchGenerator"]

# mlx-lm keeps the prompt at the end of each part of it (system, user, thinking) for later requests.
_MAX_SEGMENTS = 3


@dataclass
class AdmissionStats:
    """What became of requests.

    Attributes:
        admitted: Requests that began.
        refused: Requests that the whole pool could not hold.
        waiting: Requests that wait for blocks now.
        waited: Requests that had to wait for blocks before they began, so far.
        dropped_prompts: Prompts kept for reuse that made room for requests.
    """

    admitted: int = 0
    refused: int = 0
    waiting: int = 0
    waited: int = 0
    dropped_prompts: int = 0

    def to_prometheus(self, prefix: str) -> str:
        """The counters in the Prometheus text exposition format, newline at the end."""
        kinds = {"waiting": "gauge"}
        lines = []
        for name, text in _HELP.items():
            kind = kinds.get(name, "counter")
            metric = f"{prefix}_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
            lines.append(f"{metric} {getattr(self, name)}")
        return "\n".join(lines) + "\n"


_HELP = {
    "admitted": "Requests that began.",
    "refused": "Requests that the whole pool could not hold.",
    "waiting": "Requests that wait for blocks.",
    "waited": "Requests that had to wait for blocks before they began.",
    "dropped_prompts": "Prompts kept for reuse that made room for requests.",
}


class Admission:
    """The blocks that requests to one model will take, and who may begin.

    Used by one thread at a time, the one that generates; ``stats`` may be read by any.

    Args:
        pool: The pool of the model's paged caches.
        caches: A request's caches as the model makes them: their windows are looked at.

    Attributes:
        stats: What became of requests.
        kept: Prompts that a server keeps for reuse: the oldest are dropped where a request needs
            their blocks.
    """

    def __init__(self, pool: BlockPoolAllocator, caches: list[Any]) -> None:
        self.pool = pool
        self.stats = AdmissionStats()
        self.kept: LRUPromptCache | None = None
        self._answered: list[weakref.ref[Any]] = []
        self._extracted: list[weakref.ref[Any]] = []
        self._windows = [cache.window for cache in caches if hasattr(cache, "window")]

    @property
    def capacity(self) -> int | None:
        """Blocks that the pool can hand out, keys and values together; None for any number."""
        config = self.pool.config
        n_blocks = config.max_blocks if config.grow_on_exhaustion else self.pool.stats.n_blocks
        return None if n_blocks is None else n_blocks // 2 * 2

    def blocks(self, n_tokens: int, *, chunk: int, n_forks: int) -> int:
        """The most blocks that a request of ``n_tokens`` holds, fed at most ``chunk`` at a time.

        Each of ``n_forks`` copies that are made of it on the way costs the block that both wrote to
        last; so does the copy that it may be itself.
        """
        size = self.pool.config.block_size
        n_blocks = 0
        for window in self._windows:
            of_all = -(-n_tokens // size)
            if window is None:
                n_blocks += of_all
            else:  # begins inside a block, and the step before may still be reading one more
                n_blocks += min(of_all, -(-(window + chunk - 1) // size) + 2)
            n_blocks += 1 + n_forks
        return 2 * n_blocks

    def check(self, n_prompt: int, max_tokens: int, *, chunk: int) -> None:
        """Refuses a request that cannot be held, whatever else ends before.

        Raises:
            RequestTooLargeError: The whole pool has too few blocks for its prompt and answer.
        """
        capacity = self.capacity
        if capacity is None:
            return
        needed = self.blocks(n_prompt + max_tokens, chunk=chunk, n_forks=_MAX_SEGMENTS)
        if needed > capacity:
            self.stats.refused += 1
            raise RequestTooLargeError(
                f"[Admission::check] a prompt of {n_prompt:,} tokens and max_tokens={max_tokens:,} "
                f"need {needed:,} blocks, the pool has {capacity:,}"
            )

    def free(self) -> int | None:
        """Blocks that nobody holds."""
        capacity = self.capacity
        return None if capacity is None else capacity - self.pool.stats.blocks_in_use()

    def drop_kept(self) -> bool:
        """Drops a prompt that is kept; False where there is none."""
        if self.kept is None or len(self.kept) == 0:
            return False
        self.kept.trim_to(n_sequences=len(self.kept) - 1)
        self.stats.dropped_prompts += 1
        return True

    def answered(self, responses: Iterable[Any]) -> None:
        """Remembers finished responses, which hold their requests' caches."""
        self._answered = _alive(self._answered)
        self._answered += [weakref.ref(r) for r in responses if r.prompt_cache is not None]

    def extracted(self, requests: Iterable[list[Any]]) -> None:
        """Remembers copies of requests' caches that a server took to keep them."""
        self._extracted = _alive(self._extracted)
        self._extracted += [weakref.ref(cache) for r in requests for cache in _paged(r)[:1]]

    def let_go(self) -> bool:
        """Takes back what somebody still has of requests that have ended.

        mlx-lm's server has the last response, and the last copy that it took of a cache, until the
        next one comes, and would wait for blocks that it holds itself.
        """
        before = self.pool.stats.blocks_in_use()
        for reference in self._answered:
            if (response := reference()) is not None:
                response.prompt_cache = None
        for reference in self._extracted:
            # Nothing is kept any more: what a server took is of no use to it.
            if self.kept is not None and (cache := reference()) is not None:
                cache.release()
        self._answered, self._extracted = [], []
        return self.pool.stats.blocks_in_use() < before

    def make_room(self, n_tokens: int, *, chunk: int) -> None:
        """Drops kept prompts until a request of ``n_tokens`` fits that is served by itself."""
        needed = self.blocks(n_tokens, chunk=chunk, n_forks=_MAX_SEGMENTS)
        while (free := self.free()) is not None and free < needed:
            if not self.drop_kept() and not self.let_go():
                return


class PagedBatchGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator`` over a pool that its requests cannot run out of.

        with pool_model(model, pool, paged=True):
            generator = PagedBatchGenerator(model, completion_batch_size=32)
            uids = generator.insert(prompts, max_tokens=[256] * len(prompts))

    A request waits until the pool has room for its prompt and ``max_tokens`` beside what the
    requests that have begun may still take. Requests begin in the order in which they came; one
    that waits holds up those behind it. Take a finished response's ``prompt_cache`` before the next
    call: it is None afterwards where a request waits for its blocks.

    Args:
        model: A model of mlx-lm that was pooled with ``paged=True``. Over any other it is the
            ``BatchGenerator`` that it derives from.
        options: Of ``BatchGenerator``.
    """

    prefill_batch_size: int

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        pooled = getattr(vars(model).get("make_cache"), "__self__", None)
        self.admission: Admission | None = getattr(pooled, "admission", None)
        if mx.distributed.init().size() > 1:  # whose ranks have to begin the same requests
            self.admission = None
        self._delayed: set[int] = set()

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> list[int]:
        """As ``BatchGenerator`` does; ``insert`` is the same for prompts in one piece.

        Raises:
            RequestTooLargeError: The whole pool could not hold one of the requests. None of them
                was taken.
        """
        if self.admission is not None:
            for i, parts in enumerate(segments):
                known = caches[i] if caches else None
                n_prompt = sum(map(len, parts)) + _position(_paged(known or []))[0]
                most = max_tokens[i] if max_tokens else self.max_tokens
                self.admission.check(n_prompt, most, chunk=self.prefill_step_size)
        uids: list[int] = super().insert_segments(segments, max_tokens, caches, *args, **options)
        return uids

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """As ``BatchGenerator`` does: copies of requests' caches, and the tokens in them."""
        copies: dict[int, tuple[list[Any], list[int]]] = super().extract_cache(uids)
        if self.admission is not None:
            begun = {*self._prompt_batch.uids, *self._generation_batch.uids}
            self.admission.extracted(caches for uid, (caches, _) in copies.items() if uid in begun)
        return copies

    def _next(self) -> Any:
        places = self.prefill_batch_size
        if self.admission is not None:
            self.prefill_batch_size = len(self._prompt_batch) + self._admitted(
                places - len(self._prompt_batch)
            )
        try:
            responses = super()._next()
        finally:
            self.prefill_batch_size = places
        if self.admission is not None:
            self.admission.answered(responses[1])
        return responses

    def _admitted(self, places: int) -> int:
        """How many of the sequences that wait may begin, at most ``places``."""
        admission = self.admission
        assert admission is not None
        places = min(
            places,
            self.completion_batch_size - len(self._generation_batch),
            len(self._unprocessed_sequences),
        )
        n, promised = 0, sum(self._growth()) if places > 0 else 0
        while n < places:
            uid, segments, max_tokens, caches = self._unprocessed_sequences[n][:4]
            wanted = self._wanted(segments, max_tokens, caches)
            free = admission.free()
            if free is not None and promised + wanted > free:
                if admission.drop_kept() or (n == 0 and not self._is_busy() and self._let_go()):
                    continue
                break
            promised += wanted
            n += 1
            admission.stats.admitted += 1
            admission.stats.waited += uid in self._delayed
            self._delayed.discard(uid)
        held_up = n < places
        waiting = list(self._unprocessed_sequences)[n:] if held_up else []
        admission.stats.waiting = len(waiting)
        self._delayed.update(sequence[0] for sequence in waiting)
        if held_up and n == 0 and not self._is_busy():
            time.sleep(0.002)  # what was freed is still being read
        return n

    def _is_busy(self) -> bool:
        return len(self._prompt_batch) + len(self._generation_batch) > 0

    def _growth(self) -> Iterator[int]:
        """Blocks that each request that has begun may still take."""
        admission = self.admission
        assert admission is not None
        batch = self._generation_batch
        for i, (most, done) in enumerate(zip(batch.max_tokens, batch._num_tokens, strict=True)):
            offset, held = _position([cache._rows[i] for cache in _paged(batch.prompt_cache)])
            yield max(0, admission.blocks(offset + most - done, chunk=1, n_forks=1) - held)
        batch = self._prompt_batch
        for i, (segments, done, total) in enumerate(self._currently_processing):
            offset, held = _position([cache._rows[i] for cache in _paged(batch.prompt_cache)])
            n_tokens = offset + total - done + batch.max_tokens[i]
            needed = admission.blocks(
                n_tokens, chunk=self.prefill_step_size, n_forks=1 + len(segments)
            )
            yield max(0, needed - held)

    def _wanted(self, segments: list[list[int]], max_tokens: int, caches: list[Any]) -> int:
        """Blocks that a request will take beside those that it has from a prompt that was kept."""
        admission = self.admission
        assert admission is not None
        offset, held = _position(_paged(caches))
        return max(
            0,
            admission.blocks(
                offset + sum(map(len, segments)) + max_tokens,
                chunk=self.prefill_step_size,
                n_forks=_MAX_SEGMENTS,
            )
            - held,
        )

    def _let_go(self) -> bool:
        """Frees blocks where nothing runs whose end would: those of responses that the caller had,
        and then those that waiting requests share with prompts that were kept, from the last."""
        assert self.admission is not None
        if self.admission.let_go():
            return True
        waiting = self._unprocessed_sequences
        for i in reversed(range(len(waiting))):
            uid, segments, max_tokens, caches, tokens, *rest = waiting[i]
            offset, held = _position(_paged(caches))
            if held > 0 and offset == len(tokens):
                segments = [tokens + segments[0], *segments[1:]]
                caches = self.model.make_cache()
                waiting[i] = (uid, segments, max_tokens, caches, [], *rest)
                return True
        return False


def _alive(references: list[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    return [reference for reference in references if reference() is not None]


def _paged(caches: list[Any]) -> list[Any]:
    """Those that lie in pages, of one request or of a batch."""
    return [cache for cache in caches if hasattr(cache, "n_blocks_held")]


def _position(caches: list[Any]) -> tuple[int, int]:
    """A request's tokens, and the blocks that it holds in all layers."""
    offset = max((cache.offset for cache in caches), default=0)
    return offset, sum(cache.n_blocks_held() for cache in caches)
