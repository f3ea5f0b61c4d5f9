"""The server over a paged pool that is too small for its requests together."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import kvpool
import pytest
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import server as pooled_server
from mlx_lm import server
from test_server import N_TOKENS, Running, options, serving

__all__ = ["options"]  # a fixture

PROMPTS = [f"What lies in block {i}, and " + "who put it there " * (i % 4) for i in range(8)]
# For one request of PROMPTS and a half: tokens are bytes here.
N_BLOCKS = 2 * 2 * (150 // 4 + 4)


@contextlib.contextmanager
def small_server(options, n_blocks: int = N_BLOCKS) -> Iterator[Running]:
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))
    provider = pooled_server.PooledModelProvider(options, lambda model: pool, paged=True)
    with (
        pooled_server.pooled_parts(lambda cli_args: provider),
        kvpool.attention(),
        serving(provider, handler=pooled_server.PooledHandler) as running,
    ):
        running.ask("warm up", max_tokens=1)
        yield running
        assert running.generator.is_healthy
    assert pool.stats.n_exhausted == 0
    pool.check_invariants()


def metrics(running: Running) -> dict[str, float]:
    with urllib.request.urlopen(f"{running.address}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line[:1] != "#"}


def test_requests_that_do_not_fit_together_are_all_answered(options):
    with serving(server.ModelProvider(options)) as stock:
        expected = [stock.ask(prompt) for prompt in PROMPTS]
    with small_server(options) as running:
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            assert list(threads.map(running.ask, PROMPTS)) == expected
        counted = metrics(running)
        assert counted["kvpool_block_pool_requests_admitted_total"] == len(PROMPTS) + 1
        assert counted["kvpool_block_pool_requests_refused_total"] == 0
        assert counted["kvpool_block_pool_requests_waited_total"] > 0
        assert counted["kvpool_block_pool_requests_waiting"] == 0
        assert counted["kvpool_block_pool_exhausted_total"] == 0


def test_what_never_fits_is_refused_beside_others(options):
    with small_server(options) as running, ThreadPoolExecutor(2) as threads:
        others = [threads.submit(running.ask, prompt) for prompt in PROMPTS[:2]]
        with pytest.raises(urllib.error.HTTPError) as caught:
            running.ask("much", max_tokens=5000)
        assert caught.value.code == 413
        error = json.load(caught.value)["error"]
        assert "max_tokens=5,000 need" in error and f"the pool has {N_BLOCKS}" in error
        for other in others:
            other.result()
        assert metrics(running)["kvpool_block_pool_requests_refused_total"] == 1


def test_requests_that_are_served_alone_make_room_for_themselves(options):
    with small_server(options) as running:
        for i in range(4):
            running.ask(PROMPTS[i], seed=i)  # mlx-lm does not batch what has a seed
        assert metrics(running)["kvpool_block_pool_requests_dropped_prompts_total"] > 0


def test_a_client_that_leaves_makes_room(options):
    with small_server(options) as running:
        body = json.dumps({"prompt": "go on", "max_tokens": 100, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", running.http.server_port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.recv(64)
        assert len(running.ask(PROMPTS[3])) > 0
        for _ in range(200):
            if metrics(running)["kvpool_block_pool_requests_waiting"] == 0:
                break
            time.sleep(0.05)
        assert metrics(running)["kvpool_block_pool_requests_waiting"] == 0


def test_other_errors_and_pages_are_mlx_lms(options):
    with small_server(options) as running:
        with pytest.raises(urllib.error.HTTPError) as caught:
            running.ask("x", model="/there/is/none")
        assert caught.value.code == 404
        with urllib.request.urlopen(f"{running.address}/health", timeout=60) as response:
            assert json.load(response) == {"status": "ok"}
        assert len(running.ask(PROMPTS[0], max_tokens=N_TOKENS)) > 0
