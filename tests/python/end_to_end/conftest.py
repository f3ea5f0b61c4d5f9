"""The real models, in fp32, and what mlx-lm's own caches make of them."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvpool import models
from kvpool.cli.loading import load
from stock import (
    GEMMA3_PREFILL_STEP,
    GEMMA3_TOKENS,
    GEMMA3_WINDOW,
    SMOLLM2_TOKENS,
    stock_tokens,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.model)


def folder_of(name: str) -> Path:
    spec = models.spec_for(name)
    if not models.is_prepared(spec):
        if not os.environ.get("KVPOOL_TEST_FETCH"):
            pytest.skip(
                f"{name} is not prepared: run kvpool model fetch {name}, or set KVPOOL_TEST_FETCH=1"
            )
        models.fetch(name)
    return models.model_path(spec)


@pytest.fixture(scope="session")
def beside() -> Iterator[ProcessPoolExecutor]:
    """A process that decodes with stock caches while this one decodes with pooled ones."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """Model and tokenizer."""
    return load(str(folder_of("smollm2")), fp32=True)


@pytest.fixture(scope="session")
def smollm2_bf16() -> tuple[Any, Any]:
    """The same in the precision that such models are published in."""
    model, tokenizer = load(str(folder_of("smollm2")), fp32=True)
    model.set_dtype(mx.bfloat16)
    return model, tokenizer


@pytest.fixture(scope="session")
def smollm2_prompt(smollm2: tuple[Any, Any]) -> list[int]:
    question = [{"role": "user", "content": "Tell me a story about a lighthouse keeper."}]
    return list(smollm2[1].apply_chat_template(question, add_generation_prompt=True))


@pytest.fixture(scope="session")
def smollm2_stock(beside: ProcessPoolExecutor, smollm2_prompt: list[int]) -> Future[list[int]]:
    folder = str(folder_of("smollm2"))
    return beside.submit(stock_tokens, folder, smollm2_prompt, SMOLLM2_TOKENS)


@pytest.fixture(scope="session")
def gemma3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 with a lowered window."""
    original = folder_of("gemma3")
    folder = tmp_path_factory.mktemp("gemma3")
    for path in original.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": GEMMA3_WINDOW}))
    return folder


@pytest.fixture(scope="session")
def gemma3(gemma3_folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    return load(str(gemma3_folder), fp32=True)


@pytest.fixture(scope="session")
def gemma3_prompt(gemma3: tuple[Any, Any]) -> list[int]:
    text = (
        "The history of the city of Paris begins with a small settlement on an island in the river "
        "Seine. Roman engineers later built roads, baths and an arena on its left bank, and the "
        "town"
    )
    return list(gemma3[1].encode(text))


@pytest.fixture(scope="session")
def gemma3_stock(
    beside: ProcessPoolExecutor, gemma3_folder: Path, gemma3_prompt: list[int]
) -> Future[list[int]]:
    return beside.submit(
        stock_tokens,
        str(gemma3_folder),
        gemma3_prompt,
        GEMMA3_TOKENS,
        prefill_step_size=GEMMA3_PREFILL_STEP,
    )
