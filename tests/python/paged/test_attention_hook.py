"""The attention hook: reversible, counted, and stock for whatever is not ours."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import kvpool
import mlx.core as mx
import mlx_lm.models
import pytest
from cache_kinds import ON_GPU
from kvpool.core.exceptions import AttentionHookError
from kvpool.mlx_lm.paged import hook
from mlx_lm.models import base, llama
from mlx_lm.models.base import scaled_dot_product_attention as imported_before
from tiny_models import needs_quantised_attention

STOCK_CODE = base.scaled_dot_product_attention.__code__


@pytest.fixture(autouse=True)
def stock_again():
    kvpool.reset_attention_stats()
    yield
    kvpool.uninstall_attention()
    assert base.scaled_dot_product_attention.__code__ is STOCK_CODE
    assert not kvpool.is_attention_installed()


@pytest.fixture
def native(monkeypatch):
    """Stands for the extension: says what it is told to, and remembers what it was asked."""
    asked = []

    def attend(*arguments):
        asked.append(arguments)
        return fake.answer

    fake = SimpleNamespace(attend=attend, answer=None, asked=asked)
    monkeypatch.setitem(sys.modules, "kvpool._mlx", fake)
    return fake


def arrays(dtype=mx.float32):
    mx.random.seed(3)
    return [
        mx.random.normal((1, heads, n, 8)).astype(dtype) for heads, n in ((4, 2), (2, 5), (2, 5))
    ]


def stock(queries, keys, values, **options):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, **options)


def call(**options):
    """A model's call, by the name that was imported before the hook."""
    return imported_before(*arrays(), cache=None, scale=0.5, mask=None, **options)


def test_the_kernels_answer_for_names_imported_before_and_after(native):
    native.answer = mx.array(7.0)
    late = importlib.import_module("mlx_lm.models.qwen3")
    with kvpool.attention():
        for function in (
            imported_before,
            llama.scaled_dot_product_attention,
            late.scaled_dot_product_attention,
        ):
            assert function(*arrays(), cache=None, scale=0.5, mask="causal") is native.answer
    assert kvpool.attention_stats() == kvpool.AttentionStats(kernel=3)
    queries, keys, values, scale, mask, sinks = native.asked[0]
    assert (scale, mask, sinks) == (0.5, "causal", None)
    assert queries.shape == (1, 4, 2, 8) and keys.shape == values.shape == (1, 2, 5, 8)


def test_what_is_not_ours_gets_mlx_lms_answer(native):
    sinks = mx.zeros((4,))
    with kvpool.attention():
        assert mx.array_equal(call(), stock(*arrays(), mask=None))
        assert mx.array_equal(call(sinks=sinks), stock(*arrays(), mask=None, sinks=sinks))
    assert kvpool.attention_stats() == kvpool.AttentionStats(not_ours=2)


def test_what_the_kernels_do_not_cover_is_counted_by_its_reason(native):
    with kvpool.attention():
        for native.answer in ("a", "b", "a"):
            assert mx.array_equal(call(), stock(*arrays(), mask=None))
    stats = kvpool.attention_stats()
    assert (dict(stats.fell_back), stats.kernel, stats.total) == ({"a": 2, "b": 1}, 0, 3)
    assert str(stats) == "0 by the kernels, 2 by mlx-lm (a), 1 by mlx-lm (b)"


def test_a_quantised_cache_of_mlx_lm_keeps_its_own_attention(native):
    needs_quantised_attention()
    queries, keys, values = arrays()
    packed = [mx.quantize(mx.tile(x, (1, 1, 1, 8)), bits=8) for x in (keys, values)]
    wide = mx.tile(queries, (1, 1, 1, 8))
    cache = SimpleNamespace(bits=8, group_size=64)
    expected = imported_before(mx.array(wide), *packed, cache=cache, scale=0.5, mask=None)
    with kvpool.attention():
        found = imported_before(mx.array(wide), *packed, cache=cache, scale=0.5, mask=None)
        with pytest.raises(ValueError, match="sinks"):
            imported_before(wide, *packed, cache=cache, scale=0.5, mask=None, sinks=mx.zeros((4,)))
    assert mx.array_equal(found, expected)


def test_without_the_extension_everything_is_mlx_lms(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvpool._mlx", raising=False)
    with kvpool.attention():
        assert mx.array_equal(call(), stock(*arrays(), mask=None))
    assert kvpool.attention_stats() == kvpool.AttentionStats(not_ours=1)


def test_nothing_comes_by_unless_asked(native):
    native.answer = mx.array(7.0)
    assert mx.array_equal(call(), stock(*arrays(), mask=None))
    assert (native.asked, kvpool.attention_stats().total) == ([], 0)


def test_installing_twice_is_the_same_as_once():
    for _ in range(2):
        kvpool.install_attention()
        assert kvpool.is_attention_installed()
    for _ in range(2):
        kvpool.uninstall_attention()
        assert not kvpool.is_attention_installed()


def test_blocks_are_counted_and_do_not_undo_an_installation():
    with kvpool.attention():
        with kvpool.attention():
            pass
        assert kvpool.is_attention_installed()
    assert not kvpool.is_attention_installed()
    kvpool.install_attention()
    with kvpool.attention():
        pass
    assert kvpool.is_attention_installed()
    with kvpool.attention():
        kvpool.uninstall_attention()
        assert kvpool.is_attention_installed()
    assert not kvpool.is_attention_installed()


def test_an_error_in_the_block_leaves_no_hook():
    with pytest.raises(KeyError), kvpool.attention():
        raise KeyError("a model's error")
    assert base.scaled_dot_product_attention.__code__ is STOCK_CODE


def test_another_version_of_mlx_lm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(hook.metadata, "version", lambda name: "0.99.0")
    for refused in (kvpool.install_attention, kvpool.attention().__enter__):
        with pytest.raises(AttentionHookError, match=r"mlx-lm must be 0\.32\.2, got 0\.99\.0"):
            refused()
        assert not kvpool.is_attention_installed()


@pytest.mark.parametrize(
    "other",
    [
        lambda queries, keys, values, cache, scale, mask: None,
        lambda queries, keys, values, cache, scale, mask, sinks=1: None,
        mx.fast.scaled_dot_product_attention,
    ],
)
def test_another_function_is_refused_by_name(monkeypatch, other):
    with monkeypatch.context() as patch:
        patch.setattr(base, "scaled_dot_product_attention", other)
        with pytest.raises(AttentionHookError, match=r"\[install_attention\] mlx_lm.models.base"):
            kvpool.install_attention()
    assert not kvpool.is_attention_installed()


def test_a_replacement_by_somebody_else_is_not_undone():
    def somebody_elses(queries, keys, values, cache, scale, mask, sinks=None):
        return None

    function = base.scaled_dot_product_attention
    kvpool.install_attention()
    ours, function.__code__ = function.__code__, somebody_elses.__code__
    for call_again in (kvpool.uninstall_attention, kvpool.install_attention):
        with pytest.raises(AttentionHookError, match="something else since"):
            call_again()
        assert function.__code__ is somebody_elses.__code__
    function.__code__ = ours


def test_threads_that_install_and_leave_at_once(native):
    """Each call is answered by somebody, and the last thread to leave takes the hook along."""
    native.answer = mx.array(7.0)
    expected = stock(*arrays(), mask=None)
    mx.eval(expected)
    errors = []

    def work():
        try:
            for _ in range(100):
                with kvpool.attention():
                    if call() is not native.answer:
                        errors.append("not hooked within the block")
                found = call()  # another thread's block may be open
                if found is not native.answer and found.shape != expected.shape:
                    errors.append("no answer")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert kvpool.attention_stats().kernel >= 400


def test_stats_can_be_compared_and_reset(native):
    native.answer = "reason"
    with kvpool.attention():
        call()
        before = kvpool.attention_stats()
        call()
        native.answer = None
        call()
    since = kvpool.attention_stats().since(before)
    assert (dict(since.fell_back), since.not_ours, since.total) == ({"reason": 1}, 1, 2)
    kvpool.reset_attention_stats()
    assert kvpool.attention_stats().total == 0


# --- over pages -----------------------------------------------------------------------------------


# Numbers that the kernels of every device read.
SCALE, TOLERANCE = 0.125, 2e-3


def drawn(heads: int, n: int) -> mx.array:
    return mx.random.normal((1, heads, n, 64)).astype(mx.float16)


def paged(n: int, seed: int):
    """The keys and values of a cache of their own, and what they should be."""
    pool = kvpool.BlockPoolAllocator(kvpool.PoolConfig(block_size=16, n_blocks=64))
    mx.random.seed(seed)
    exact = [drawn(2, n) for _ in range(2)]
    return kvpool.PagedKVCache(pool, 1).update_and_fetch(*exact), exact


def stock_close(answer, queries, keys, values, mask=None, **options) -> bool:
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask=mask, **options
    )
    return mx.allclose(answer, expected, rtol=TOLERANCE, atol=TOLERANCE).item()


def answers_by_the_kernels(n_queries: int, masks: list) -> None:
    (keys, values), exact = paged(21, 1)
    queries = drawn(4, n_queries)
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]).astype(mx.float16)
    with kvpool.attention():
        for mask in masks:
            for options in ({}, {"sinks": sinks}):
                ours = imported_before(queries, keys, values, None, SCALE, mask, **options)
                assert stock_close(ours, queries, *exact, mask=mask, **options)
    assert kvpool.attention_stats() == kvpool.AttentionStats(kernel=2 * len(masks))


def test_the_kernels_answer_over_pages_as_mlx_does():
    answers_by_the_kernels(1, [None, "causal"])


def test_the_kernels_answer_several_queries():
    answers_by_the_kernels(2, [None, "causal"])


@pytest.mark.skipif(ON_GPU, reason="a GPU gathers for masks of arrays")
def test_the_kernels_answer_masks_of_arrays():
    column = mx.arange(21) > 3
    bias = mx.where(column, 0.5, -mx.inf).astype(mx.float16)
    answers_by_the_kernels(2, [column, bias])


def test_the_cache_that_is_passed_does_not_matter_the_arrays_do():
    (keys, values), exact = paged(9, 2)
    queries = drawn(4, 1)
    with kvpool.attention():
        both = imported_before(queries, keys, keys, object(), SCALE, None)  # a latent, as both
        copied = imported_before(queries, keys + 0, values + 0, None, SCALE, None)
        mx.eval(keys, values)
        late = imported_before(queries, keys, values, None, SCALE, None)
    assert stock_close(both, queries, exact[0], exact[0])
    assert stock_close(copied, queries, *exact) and stock_close(late, queries, *exact)
    assert kvpool.attention_stats() == kvpool.AttentionStats(kernel=1, not_ours=2)


def test_the_extension_says_why_it_does_not_answer():
    (keys, _), exact = paged(9, 3)
    (_, values), others = paged(9, 4)
    queries = drawn(4, 1)
    with kvpool.attention():
        answer = imported_before(queries, keys, values, None, SCALE, None)
    assert stock_close(answer, queries, exact[0], others[1])
    assert dict(kvpool.attention_stats().fell_back) == {"keys and values from different places": 1}


# --- which models the hook does not reach ---------------------------------------------------------


def attends_itself(function: ast.FunctionDef) -> bool:
    """Two products and a softmax between them, or a call of MLX's own attention."""
    called = [n.func.attr for n in ast.walk(function) if _is_method_call(n)]
    products = [n for n in ast.walk(function) if _is_product(n)]
    return "scaled_dot_product_attention" in called or ("softmax" in called and len(products) >= 2)


def _is_method_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)


# Attention, but over no cache.
NO_CACHE = {
    ("base", "scaled_dot_product_attention"),
    ("kimi_k3", "_attn_res_combine"),  # over layers
    ("muse_spark", "_attention"),  # over a picture
}


def test_the_models_that_bypass_the_hook_are_those_that_are_named():
    found = set()
    for path in sorted(Path(mlx_lm.models.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and attends_itself(node):
                found.add((path.stem, node.name))
    assert {module for module, _ in found - NO_CACHE} == set(hook.BYPASSING_MODELS)
    assert found > NO_CACHE
