"""The Python in README.md and docs/ runs as it stands, page by page, with a tiny model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import kvpool
import mlx.core as mx
import mlx_lm
from tiny_models import write_llama

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    if BLOCK.search(page.read_text())
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return mlx_lm.load(str(write_llama(tmp_path_factory.mktemp("tiny"))))[:2]


def given(page: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What a page's code takes to be there."""
    names: dict[str, Any] = {
        "mx": mx,
        "mlx_lm": mlx_lm,
        "kvpool": kvpool,
        "model": model,
        "tokenizer": tokenizer,
        "request_id": 7,
        "prompt": "Why?",
        "question": "And why that?",
        "prompts": [tokenizer.encode(text) for text in ("One?", "Two?")],
        "pool": kvpool.BlockPoolAllocator(kvpool.PoolConfig(n_blocks=4096)),
    }
    if page == "mlx-lm.md":
        names["prompt"] = mx.array(tokenizer.encode("Why?"))
        names["another_request"] = kvpool.build_pooled_caches(model, names["pool"], owner=9)
    if page == "methods.md":
        names |= {"n": 5, "keys": mx.random.normal((2, 6, 128)), "queries": mx.ones((4, 1, 128))}
        names["values"] = names["keys"]
    if page == "storage.md":
        names |= {"codes": mx.ones((1, 128), mx.uint8)}
        names |= dict.fromkeys(("key", "value", "query"), mx.ones((128,)))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(
    page: Path, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    generate, batch_generate = mlx_lm.generate, mlx_lm.batch_generate
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlx_lm, "load", lambda name: loaded)
    # Answers are cut short; a pool of gigabytes would have millions of blocks of so small a model.
    monkeypatch.setattr(
        mlx_lm, "generate", lambda *args, **options: generate(*args, max_tokens=4, **options)
    )
    monkeypatch.setattr(
        mlx_lm,
        "batch_generate",
        lambda *args, **options: batch_generate(*args, **(options | {"max_tokens": 4})),
    )
    names = given(page.name, model, tokenizer)
    try:
        for code in BLOCK.findall(page.read_text()):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code.replace('"4GB"', '"4MB"'), str(page), "exec"), names)
    finally:
        kvpool.uninstall_attention()
