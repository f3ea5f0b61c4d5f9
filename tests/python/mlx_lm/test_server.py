"""mlx-lm's server over a pool, on the loopback: two requests at one time."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from typing import Any

import kvpool
import pytest
from kvpool import PagedKVCache
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import server as pooled_server
from mlx_lm import server
from tiny_models import write_llama

PROMPTS = ["What lies in a block?", "Say it again, and this time a little more slowly."]
N_TOKENS = 24


@pytest.fixture
def options(tmp_path, monkeypatch) -> argparse.Namespace:
    """The options of ``mlx_lm.server`` for a tiny model."""
    taken: list[argparse.Namespace] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: taken.append(provider.cli_args))
    monkeypatch.setattr("sys.argv", ["mlx_lm.server", "--model", str(write_llama(tmp_path))])
    server.main()
    return taken[0]


class Running:
    """A server in this process, at a free port."""

    def __init__(
        self, provider: server.ModelProvider, handler: type[server.APIHandler] = server.APIHandler
    ) -> None:
        self.kept = server.LRUPromptCache(provider.cli_args.prompt_cache_size)
        self.generator = server.ResponseGenerator(provider, self.kept)
        self.http = ThreadingHTTPServer(
            ("127.0.0.1", 0),
            lambda *args: handler(self.generator, *args, system_fingerprint="tests"),
        )
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def ask(self, prompt: str, **options: Any) -> str:
        body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0.0, **options}
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["text"]

    def kept_caches(self) -> list[Any]:
        """Every layer of what is kept for prompts to come."""
        entries = [entry for lru in self.kept._lru._lrus.values() for entry in lru]
        return [
            cache
            for model, tokens in entries
            for cache in self.kept._trie.get(model, tokens).prompt_cache
        ]

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.generator.stop_and_join()
        self.thread.join(timeout=60)


@contextlib.contextmanager
def serving(provider: server.ModelProvider, **options: Any) -> Iterator[Running]:
    running = Running(provider, **options)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("paged", [False, True])
def test_two_requests_at_once(options, paged):
    with serving(server.ModelProvider(options)) as stock:
        expected = [stock.ask(prompt) for prompt in PROMPTS]
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=1024))
    provider = pooled_server.PooledModelProvider(options, lambda model: pool, paged=paged)
    with kvpool.attention() if paged else contextlib.nullcontext(), serving(provider) as running:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(running.ask, PROMPTS)) == expected
        assert provider.pool is pool and provider.is_batchable
        # What is in use now is what the server keeps of both for prompts to come.
        assert len(running.kept) == 2
        caches = running.kept_caches()
        kept = sum(cache.n_blocks_held() for cache in caches)
        assert len({cache.owner for cache in caches}) == 2
        # mlx-lm still holds the cache of the prompt that it processed last.
        assert pool.stats.blocks_in_use() <= 2 * kept
        assert paged or kept <= pool.stats.blocks_in_use()  # what is paged may be shared
        del caches
        assert running.ask(PROMPTS[0]) == expected[0]
        pool.check_invariants()
    del running
    gc.collect()
    for _ in range(200):  # a reader of pages that the server left behind may still be at work
        if pool.stats.blocks_in_use() == 0:
            break
        time.sleep(0.05)
    assert pool.stats.blocks_in_use() == 0
    assert pool.stats.n_exhausted == 0
    pool.check_invariants()


def test_the_command_hands_its_options_on(options, monkeypatch):
    providers: list[pooled_server.PooledModelProvider] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    stock = server.ModelProvider
    arguments = ["--model", options.model, "--pool-memory", "1MB", "--pool-block-size", "8"]
    pooled_server.main([*arguments, "--prompt-cache-size", "3"])
    assert server.ModelProvider is stock
    (provider,) = providers
    assert provider.cli_args.prompt_cache_size == 3
    provider.load_default()
    assert provider.pool.config.block_size == 8
    assert provider.model.make_cache()[0].pool is provider.pool


def test_the_command_serves_paged_caches(options, monkeypatch):
    hooked: list[bool] = []
    providers: list[pooled_server.PooledModelProvider] = []

    def run(host, port, provider):
        hooked.append(kvpool.is_attention_installed())
        providers.append(provider)

    monkeypatch.setattr(server, "run", run)
    arguments = ["--model", options.model, "--pool-memory", "1MB", "--pool-cache", "paged"]
    pooled_server.main([*arguments, "--pool-age-policy", "fp16:64,int8"])
    assert hooked == [True] and not kvpool.is_attention_installed()
    providers[0].load_default()
    (cache, *_) = providers[0].model.make_cache()
    assert isinstance(cache, PagedKVCache) and cache.pool is providers[0].pool


def test_the_command_sizes_the_pool_for_the_formats_of_keys_and_values(options, monkeypatch):
    providers: list[pooled_server.PooledModelProvider] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    arguments = ["--model", options.model, "--pool-memory", "1MB", "--pool-cache", "paged"]
    for extra in ([], ["--pool-format", "int8/int4"]):
        pooled_server.main([*arguments, *extra])
    plain, apart = providers
    for provider in providers:
        provider.load_default()
    assert repr(apart.model.make_cache()[0]).endswith("format=int8/int4)")
    # Heads of so few dims pay for their scales.
    assert apart.pool.config.n_blocks > 2 * plain.pool.config.n_blocks


def test_the_command_refuses_formats_of_pooled_caches(options, capsys):
    with pytest.raises(SystemExit):
        pooled_server.main(["--model", options.model, "--pool-format", "int8"])
    assert "need --pool-cache paged" in capsys.readouterr().err
