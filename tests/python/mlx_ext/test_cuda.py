"""What is about a GPU alone: its memory, its compiler, its streams.

What its kernels answer is held to the contract of all backends, in the other files of this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import attention_oracle as oracle
import mlx.core as mx
import pytest
from kvpool._mlx_module import extension
from page_backends import Backend, Pages, find
from paged_layers import make_group

PAGES = Pages("bf16", key_dim=128, value_dim=128)


@pytest.fixture
def cuda() -> Iterator[Backend]:
    before = mx.default_device()
    backend = find("cuda")
    mx.set_default_device(backend.device)
    try:
        yield backend
    finally:
        mx.set_default_device(before)


def test_it_is_what_pools_get_by_default(cuda: Backend) -> None:
    assert extension.default_backend() == "cuda"
    assert extension.describe_backend("cuda").startswith("CUDA on ")


def test_blocks_come_back_when_readers_are_gone(cuda: Backend) -> None:
    pool = cuda.pool(64)
    for _ in range(20):
        group = make_group(pool)
        layer = PAGES.layer(group)
        fetched = layer.update_and_fetch(*PAGES.tokens().next(500))
        answer = cuda.attend(PAGES, PAGES.queries(), fetched, 0.1)
        mx.async_eval(answer)
        group.release()
        del fetched, layer
        assert mx.isfinite(answer).all()
        cuda.settle()
    del answer
    mx.synchronize()
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_more_sequences_than_a_launch_takes(cuda: Backend, name: str) -> None:
    pages = replace(PAGES, format=name)
    pool = cuda.used_pool(pages, 3000)
    layers = []
    for i in range(130):
        layers.append(pages.layer(make_group(pool, i)))
        layers[-1].update_and_fetch(*pages.tokens(i).next(1 + 7 * i % 90))
    queries = pages.queries(batch=len(layers))
    answer = cuda.attend(pages, queries, extension.fetch_batch(layers), 0.1)
    for i, layer in enumerate(layers):
        right = oracle.attention(queries[i : i + 1], *layer.keys_and_values(), 0.1)
        assert oracle.error(answer[i : i + 1], right) < cuda.tolerance(pages, mx.float32)


def test_more_key_heads_and_splits_than_the_device_has_processors(cuda: Backend) -> None:
    pages = replace(PAGES, heads=200, key_dim=64, value_dim=64)
    layer = pages.layer(make_group(cuda.pool(512)))
    fetched = layer.update_and_fetch(*pages.tokens().next(900))
    queries = pages.queries(1)
    right = oracle.attention(queries, *layer.keys_and_values(), 0.125)
    answer = cuda.attend(pages, queries, fetched, 0.125)
    assert oracle.error(answer, right) < cuda.tolerance(pages, mx.float32)


@pytest.mark.parametrize("name", ["fp16", "int4"])
def test_graphs_of_one_shape_at_lengths_that_are_split_otherwise(cuda: Backend, name: str) -> None:
    """MLX takes the graph of an earlier step again where it looks alike."""
    pages = replace(PAGES, format=name)
    queries = pages.queries()
    for n_tokens in (100, 300, 600, 900, 1200, 2000, 3000, 4000, 5000, 9000, 600, 100, 4000):
        layer = pages.layer(make_group(cuda.pool(2048)))
        mx.eval(layer.update_and_fetch(*pages.tokens(n_tokens).next(n_tokens - 1)))
        fetched = layer.update_and_fetch(*pages.tokens(7).next(1))
        answer = cuda.attend(pages, queries, fetched, 0.1)
        mx.eval(answer)
        mx.eval(queries + 1)  # a node of MLX's own where the kernel was
        right = oracle.attention(queries, *layer.keys_and_values(), 0.1)
        assert oracle.error(answer, right) < cuda.tolerance(pages, mx.float32)


def test_readers_on_two_streams_see_what_was_there_for_each(cuda: Backend) -> None:
    layer, tokens = PAGES.layer(make_group(cuda.used_pool(PAGES, 900))), PAGES.tokens()
    streams = [mx.new_stream(mx.gpu) for _ in range(2)]
    mx.eval(layer.update_and_fetch(*tokens.next(700)))
    readers = []
    for step in range(24):
        if step % 4 == 3:  # entries that were there change
            layer.trim(200)
            tokens.trim(200)
            layer.update_and_fetch(*tokens.next(200))
        layer.update_and_fetch(*tokens.next(1))
        with mx.stream(streams[step % 2]):
            fetched = layer.keys_and_values()
            answer = cuda.attend(PAGES, PAGES.queries(seed=step), fetched, 0.1)
            mx.async_eval(answer)
        readers.append((step, answer, tokens.keys, tokens.values))
    for step, answer, keys, values in readers:
        right = oracle.attention(PAGES.queries(seed=step), keys, values, 0.1)
        assert oracle.error(answer, right) < cuda.tolerance(PAGES, mx.float32)


_DECODE = """
import sys
sys.path.insert(0, sys.argv[1])
import mlx.core as mx
from page_backends import Pages, find
from paged_layers import make_group
mx.set_default_device(mx.gpu)
pages = Pages("int4")
backend = find("cuda")
layer = pages.layer(make_group(backend.pool()))
fetched = layer.update_and_fetch(*pages.tokens().next(100))
print(float(backend.attend(pages, pages.queries(), fetched, 0.1).sum()))
"""


def decode_in_a_process(folder: Path | None) -> str:
    environment = {**os.environ, "KVPOOL_KERNEL_CACHE_DIR": "" if folder is None else str(folder)}
    return subprocess.run(
        [sys.executable, "-c", _DECODE, str(Path(__file__).parent)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_machine_code_is_kept_for_the_processes_that_follow(cuda: Backend, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    answer = decode_in_a_process(folder)
    kept = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(kept) >= 2  # what moves tokens, and what attends
    assert decode_in_a_process(folder) == answer
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == kept

    for path in kept:  # what is damaged is made again
        path.write_bytes(path.read_bytes()[:-1])
    assert decode_in_a_process(folder) == answer
    assert {path for path in folder.iterdir()} == set(kept)
    assert all(path.stat().st_mtime_ns != kept[path] for path in folder.iterdir())

    before = set(tmp_path.iterdir())
    assert decode_in_a_process(None) == answer
    assert set(tmp_path.iterdir()) == before
