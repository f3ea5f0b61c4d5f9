"""What narrower pages cost a real model: perplexity and greedy agreement against bytes a token.

python benchmarks/paged_quality.py [--model smollm2 --model gemma3] [--only REGEX] [--json FILE]

A model with fp32 weights reads data/quality_text.txt in chunks; every chunk attends over what its
cache kept of the ones before. Compared are paged caches of each format, some age policies, some
methods, and the numbers that mlx-lm's QuantizedKVCache keeps (which pass through mx.quantize and
lie in fp32 pages then: its own attention takes an hour on a CPU). The reference are fp32 pages.

  perplexity   exp of the mean negative log-likelihood of the text's next tokens
  agreement    share of positions where the most likely next token is the reference's

SmolLM2 also goes on from passages of the text by itself, greedily, and is held against what it
says over the reference:

  common prefix  tokens up to the first that differs, of CONTINUATION, mean over the passages
  equal tokens   share of positions with the same token: low once the answers part, however good

Bytes a token are those of all layers at the end of the text; mlx-lm's are what its codes and its
scales of half precision would take, and its window layers' fp16 rows, which it does not
quantise. Draws docs/paged_quality.svg and writes docs/paged_quality.json unless told otherwise, as
it goes: what is measured takes the place of what the file has for the same cache and model.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.cli.blas import prefer_openblas

prefer_openblas()  # before MLX

import mlx.core as mx
from harness import ROOT, machine
from kvpool import AgePolicy, attention, build_paged_caches
from kvpool.cli.loading import load
from kvpool.memory import BlockPoolAllocator, PoolConfig

TEXT = ROOT / "benchmarks" / "data" / "quality_text.txt"
OUTPUT = ROOT / "docs" / "paged_quality.json"
CHUNK = 128
MAX_TOKENS = 2305
GROUP = 64
MODELS = ("smollm2", "gemma3")
# Which models go on freely: from N_PASSAGES passages of PASSAGE tokens each, for CONTINUATION more.
FREE = ("smollm2",)
N_PASSAGES, PASSAGE, CONTINUATION = 4, 384, 48
BLOCK_SIZE = 32
# What the plot shows smaller differences as, in per cent.
LEAST = 0.01


@dataclass
class Point:
    """One cache on one model."""

    model: str
    cache: str
    family: str
    bytes_a_token: float
    perplexity: float
    agreement: float
    n_tokens: int
    seconds: float
    common_prefix: float | None = None
    equal_tokens: float | None = None


@dataclass
class Setup:
    """How to make the caches of one contestant, and what they hold at the end."""

    name: str
    family: str
    make: Callable[[Any], list[Any]]
    held: Callable[[list[Any]], float]


def paged(name: str, **options: Any) -> Setup:
    def make(model: Any) -> list[Any]:
        pool = BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=32768))
        return build_paged_caches(model, pool, pool.new_owner(), **options)

    family = "paged, by age" if "age_policy" in options else "paged"
    return Setup(name, family, make, lambda caches: sum(cache.nbytes for cache in caches))


def quantized(bits: int) -> Setup:
    """mlx-lm's quantised cache where a layer keeps everything; windows have no such cache there."""

    def rounded(rows: Any) -> Any:
        codes = mx.quantize(rows, group_size=GROUP, bits=bits)
        return mx.dequantize(*codes, group_size=GROUP, bits=bits)

    def make(model: Any) -> list[Any]:
        caches = paged("", format="fp32").make(model)
        for cache in caches:
            if cache.window is None:
                update = cache.update_and_fetch
                cache.update_and_fetch = lambda keys, values, update=update: update(
                    rounded(keys), rounded(values)
                )
        return caches

    def held(caches: list[Any]) -> float:
        bits_a_number = bits + 2 * 16 / GROUP
        return sum(
            cache.nbytes / 32 * (bits_a_number if cache.window is None else 16) for cache in caches
        )

    return Setup(f"mlx-lm, {bits} bits", "mlx-lm quantised", make, held)


def setups() -> list[Setup]:
    formats = ("fp16", "int8", "int8/int4", "int4/int8", "int4", "int3", "int2")
    chosen = [paged(name, format=name) for name in formats]
    for policy in (
        "fp16:256,int8:1024,int4",
        "fp16:256,int8/int4",
        "fp16:256,int4",
        "fp16:256,int8:512,int3",
    ):
        chosen.append(paged(policy, format="fp16", age_policy=AgePolicy.parse(policy)))
    for method, bits in (("turboquant_mse", 3), ("turboquant_mse", 4), ("kivi", 2), ("kivi", 4)):
        chosen.append(paged(f"{method}, {bits} bits", method=method, bits=bits))
    chosen += [quantized(bits) for bits in (8, 4, 3, 2)]
    return chosen


def read(model: Any, caches: list[Any], tokens: list[int]) -> tuple[float, list[int]]:
    """Perplexity of the tokens, and the most likely token after each."""
    loss, likely = 0.0, []
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = mx.array(tokens[start : start + CHUNK])
        logits = model(chunk[None], cache=caches)[0].astype(mx.float32)
        following = tokens[start + 1 : start + CHUNK + 1]
        log_probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = log_probabilities[mx.arange(len(following)), mx.array(following)]
        best = mx.argmax(logits, axis=-1)
        mx.eval(picked, best)
        loss -= float(mx.sum(picked))
        likely += best.tolist()[: len(following)]
    return float(mx.exp(mx.array(loss / (len(tokens) - 1)))), likely


def go_on(model: Any, caches: list[Any], passage: list[int]) -> list[int]:
    """The CONTINUATION tokens that greedy decoding says after a passage."""
    answer: list[int] = []
    for start in range(0, len(passage), CHUNK):
        logits = model(mx.array(passage[start : start + CHUNK])[None], cache=caches)
        mx.eval(logits)
    while True:
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        if len(answer) == CONTINUATION:
            return answer
        logits = model(mx.array(answer[-1:])[None], cache=caches)


def go_on_from_all(model: Any, setup: Setup, tokens: list[int]) -> list[list[int]]:
    """What the model says after each passage, spread evenly over the text."""
    step = (len(tokens) - PASSAGE) // (N_PASSAGES - 1)
    starts = [i * step for i in range(N_PASSAGES)]
    return [go_on(model, setup.make(model), tokens[at : at + PASSAGE]) for at in starts]


def compare(answers: list[list[int]], expected: list[list[int]]) -> tuple[float, float]:
    """The mean length of the common prefix, and the share of equal tokens."""
    same = [
        [a == b for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(answers, expected, strict=True)
    ]
    prefixes = [([*row, False]).index(False) for row in same]
    return sum(prefixes) / len(same), sum(map(sum, same)) / sum(map(len, same))


def measure(name: str, only: str) -> Iterator[Point]:
    """The reference, and the contestants whose names ``only`` is found in."""
    model, tokenizer = load(name, fp32=True)
    tokens = tokenizer.encode(TEXT.read_text())[:MAX_TOKENS]

    reference = paged("fp32", format="fp32")
    expected: list[int] = []
    expected_answers: list[list[int]] = []
    for setup in [reference, *(setup for setup in setups() if re.search(only, setup.name))]:
        begin = time.perf_counter()
        with attention():
            caches = setup.make(model)
            perplexity, likely = read(model, caches, tokens)
            bytes_a_token = setup.held(caches) / len(tokens)
            answers = go_on_from_all(model, setup, tokens) if name in FREE else []
        if setup is reference:
            expected, expected_answers = likely, answers
        same = sum(a == b for a, b in zip(likely, expected, strict=True)) / len(likely)
        yield Point(
            name,
            setup.name,
            setup.family,
            bytes_a_token,
            perplexity,
            same,
            len(tokens),
            time.perf_counter() - begin,
            *(compare(answers, expected_answers) if answers else ()),
        )


def describe(point: Point) -> str:
    text = (
        f"{point.model:10} {point.cache:28} {point.bytes_a_token:9.0f} B a token  perplexity "
        f"{point.perplexity:8.3f}  agreement {point.agreement:6.2%}  {point.seconds:5.0f} s"
    )
    if point.common_prefix is None:
        return text
    return f"{text}  common prefix {point.common_prefix:4.1f}  equal {point.equal_tokens:6.2%}"


def draw(points: list[Point], picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvpool"
    from matplotlib import pyplot

    models = list(dict.fromkeys(point.model for point in points))
    figure, axes = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        mine = [point for point in points if point.model == model]
        exact = next(point.perplexity for point in mine if point.cache == "fp32")
        placed = [
            (point, max(LEAST, 100 * (point.perplexity / exact - 1)))
            for point in mine
            if point.cache != "fp32"
        ]
        for family in dict.fromkeys(point.family for point, _ in placed):
            row = [(point, more) for point, more in placed if point.family == family]
            axis.plot(
                [point.bytes_a_token for point, _ in row],
                [more for _, more in row],
                "o",
                label=family,
            )
        for point, more in placed:
            left = point.family == "mlx-lm quantised"  # they are near ours of as many bits
            axis.annotate(
                point.cache,
                (point.bytes_a_token, more),
                fontsize=7,
                xytext=(-5 if left else 5, -2),
                ha="right" if left else "left",
                textcoords="offset points",
            )
        axis.set(title=model, xlabel="bytes a token, all layers", xscale="log", yscale="log")
        axis.set_ylabel(f"perplexity above fp32's, % (at least {LEAST})")
        held = [point.bytes_a_token for point, _ in placed]
        axis.set_xlim(0.7 * min(held), 2 * max(held))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="a known model or a folder; may repeat")
    parser.add_argument("--only", default="", help="caches whose name this is found in")
    parser.add_argument("--json", type=Path, default=OUTPUT, help="default %(default)s")
    options = parser.parse_args()
    points = read_points(options.json)
    for name in options.model or MODELS:
        for point in measure(name, options.only):
            print(describe(point), flush=True)
            points[point.model, point.cache] = point
            report = {"machine": machine(), "points": [asdict(p) for p in in_order(points)]}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    draw(in_order(points), options.json.with_suffix(".svg"))


def read_points(file: Path) -> dict[tuple[str, str], Point]:
    known = json.loads(file.read_text())["points"] if file.exists() else []
    return {(point["model"], point["cache"]): Point(**point) for point in known}


def in_order(points: dict[tuple[str, str], Point]) -> list[Point]:
    """As they are listed here, whatever the order in which they were measured."""
    names = ["fp32", *(setup.name for setup in setups())]
    return sorted(
        points.values(),
        key=lambda p: (MODELS.index(p.model) if p.model in MODELS else 99, names.index(p.cache)),
    )


if __name__ == "__main__":
    main()
