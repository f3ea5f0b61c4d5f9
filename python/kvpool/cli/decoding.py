"""Runs one request through mlx-lm's own generation loop and keeps its tokens and times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["Comparison", "Request", "compare"]

SEGMENT_TOKENS = 8


@dataclass
class Request:
    """A prompt and a cache on their way through ``mlx_lm.stream_generate``.

    Attributes:
        tokens: What was generated so far, an end token included.
        prompt_seconds: From the start to the first token.
        decode_seconds: Spent on the tokens after the first.
    """

    model: Any
    tokenizer: Any
    prompt: Sequence[int]
    cache: list[Any]
    max_tokens: int
    sampler: Callable[[Any], Any] | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    _responses: Iterator[Any] | None = None

    def advance(self, n_tokens: int | None = None) -> Iterator[str]:
        """Yields the text of the next ``n_tokens`` tokens, all that are left where None."""
        import mlx.core as mx
        from mlx_lm.generate import generation_stream, stream_generate

        if self._responses is None:
            self._responses = stream_generate(
                self.model,
                self.tokenizer,
                list(self.prompt),
                max_tokens=self.max_tokens,
                prompt_cache=self.cache,
                sampler=self.sampler,
            )
        taken = 0
        while n_tokens is None or taken < n_tokens:
            begin = time.perf_counter()
            response = next(self._responses, None)
            # mlx-lm computes one token ahead. A segment pays for all it has started, lest the next
            # request's segment wait for it.
            if taken + 1 == n_tokens:
                mx.synchronize(generation_stream)
            seconds = time.perf_counter() - begin
            if response is None:
                return
            if self.tokens:
                self.decode_seconds += seconds
            else:
                self.prompt_seconds = seconds
            self.tokens.append(response.token)
            taken += 1
            yield response.text

    def close(self) -> None:
        """Ends the generation, wherever it is: nothing reads the caches any more."""
        if self._responses is not None:
            import mlx.core as mx
            from mlx_lm.generate import generation_stream

            self._responses.close()  # type: ignore[attr-defined]
            mx.synchronize(generation_stream)  # the token that was computed ahead

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens a second."""
        return len(self.prompt) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Comparison:
    """Two requests of one prompt, decoded in alternating segments of ``SEGMENT_TOKENS`` tokens.

    Attributes:
        differs_at: Index of the first token that differs; None where all are the same.
        speed_ratios: The first request's speed over the second's in each pair of whole segments.
    """

    differs_at: int | None
    speed_ratios: tuple[float, ...]

    @property
    def speed_spread(self) -> tuple[float, float, float]:
        """The lowest, the median and the highest of ``speed_ratios``, which are not empty."""
        return min(self.speed_ratios), median(self.speed_ratios), max(self.speed_ratios)


def compare(first: Request, second: Request, tick: Callable[[int], None]) -> Comparison:
    """Decodes both to their end, in turns, so that a busy machine slows both alike.

    Args:
        first: Its speed is the numerator of the ratio.
        second: Its speed is the denominator.
        tick: Called with the number of tokens that both have.
    """
    for request in (first, second):  # the prompt and the first token are no decoding
        _segment(request, 1)
    ratios: list[float] = []
    turns = itertools.cycle([(first, second), (second, first)])
    grown = True
    while grown:
        took = {id(request): _segment(request, SEGMENT_TOKENS) for request in next(turns)}
        (n_first, first_seconds), (n_second, second_seconds) = took[id(first)], took[id(second)]
        if n_first == n_second == SEGMENT_TOKENS:
            ratios.append(second_seconds / first_seconds)
        grown = n_first > 0 or n_second > 0
        tick(min(len(first.tokens), len(second.tokens)))
    return Comparison(
        differs_at=_first_difference(first.tokens, second.tokens),
        speed_ratios=tuple(ratios),
    )


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _segment(request: Request, n_tokens: int) -> tuple[int, float]:
    """Decodes up to ``n_tokens`` more; returns how many there were and the seconds they took."""
    n_before, seconds_before = len(request.tokens), request.decode_seconds
    for _ in request.advance(n_tokens):
        pass
    return len(request.tokens) - n_before, request.decode_seconds - seconds_before
