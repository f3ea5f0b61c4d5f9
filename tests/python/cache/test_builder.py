"""KVCacheConfig, KVCacheBuilder and KVCacheFactory."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from attention import normal
from kvpool import (
    STANDALONE_METHODS,
    KVCache,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
)
from kvpool.cache import METHODS, Method
from kvpool.cache import base as cache_base


def test_methods_are_the_six():
    assert {
        "kivi",
        "turboquant_mse",
        "turboquant_prod",
        "polar",
        "qjl",
        "spectral",
    } == STANDALONE_METHODS
    assert cache_base.STANDALONE_METHODS is STANDALONE_METHODS
    assert {method.value for method in Method} == STANDALONE_METHODS
    assert Method.KIVI == "kivi"


@pytest.mark.parametrize("method", [*sorted(STANDALONE_METHODS), *Method])
def test_every_method_can_be_built_by_name_and_by_enum(method):
    cache = KVCacheBuilder().with_method(method).with_head_dim(64).build()
    assert isinstance(cache, KVCache)
    cache.append(normal(64), normal(64))
    assert len(cache) == 1


def test_defaults_are_turboquant_mse_with_two_bits_of_128_numbers():
    cache = KVCacheBuilder().build()
    assert (cache.method, cache.head_dim) == ("turboquant_mse", 128)
    assert KVCacheFactory.create(KVCacheConfig()).method == "turboquant_mse"


def test_every_with_returns_the_builder_and_sets_its_field():
    builder = KVCacheBuilder()
    given = {
        "with_method": ("method", "polar"),
        "with_head_dim": ("head_dim", 96),
        "with_bit_width": ("bit_width_inlier", 3),
        "with_value_bits": ("value_bits", 4),
        "with_jl_dim": ("jl_dim", 512),
        "with_n_outlier_channels": ("n_outlier_channels", 4),
        "with_n_calib_tokens": ("n_calib_tokens", 10),
        "with_vectorized_attend": ("enable_vectorized_attend", False),
        "with_outlier_two_stream": ("enable_outlier_two_stream", True),
        "with_fused_query_dot": ("enable_fused_query_dot", True),
        "with_seed": ("seed", 7),
        "with_precision": ("dtype", "bf16"),
        "with_capacity": ("capacity", 100),
        "with_sliding_window": ("sliding_window", 50),
        "with_exact_window": ("exact_window", 16),
        "with_unbiased_scores": ("unbiased_scores", True),
        "with_polar_level_bits": ("polar_level_bits", (4, 3, 2, 2)),
        "with_published_choices": ("as_published", True),
        "with_artifact_store": ("store", None),
    }
    names = {name for name, _ in inspect.getmembers(KVCacheBuilder) if name.startswith("with_")}
    assert names == {*given, "with_observer"}
    for name, (field, value) in given.items():
        assert getattr(builder, name)(value) is builder
        assert getattr(builder._config, field) == value
    cache = builder.build()
    assert cache.capacity == 50
    cache.append(*normal(2, 1, 60, 96))
    assert len(cache) == 50


def test_a_built_cache_does_not_follow_the_builder():
    builder = KVCacheBuilder().with_head_dim(64)
    cache = builder.build()
    builder.with_head_dim(32)
    assert cache.head_dim == cache.config.head_dim == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "foo"}, "method must be one of .*, got 'foo'"),
        ({"head_dim": 0}, r"head_dim must be 1\.\.1024, got 0"),
        (
            {"head_dim": 40, "method": "polar"},
            "head_dim must be a multiple of 16 for polar, got 40",
        ),
        ({"head_dim": 64.0}, r"head_dim must be an int, got 64\.0"),
        ({"bit_width_inlier": 9}, r"bit_width_inlier must be 1\.\.8 for turboquant_mse, got 9"),
        ({"bit_width_inlier": True}, "bit_width_inlier must be an int, got True"),
        ({"bit_width_inlier": [2, 4]}, "bit_width_inlier must be one int"),
        ({"bit_width_outlier": 4}, "bit_width_outlier must be left empty"),
        ({"value_bits": 0}, r"value_bits must be 1\.\.8, got 0"),
        ({"jl_dim": 0}, r"jl_dim must be 1\.\.65536, got 0"),
        ({"capacity": -5}, "capacity must be >= 1, got -5"),
        ({"store": object()}, "store must be left empty"),
        ({"observers": [print]}, "observers must be left empty"),
        ({"options": {"x": 1}}, "options must be left empty"),
        ({"dtype": "int4"}, "precision must be fp32, fp16 or bf16, got 'int4'"),
        ({"polar_level_bits": (1, 2)}, "polar_level_bits must be 4 ints, got 2"),
        ({"enable_outlier_two_stream": True}, "needs n_outlier_channels"),
        (
            {"enable_outlier_two_stream": True, "n_outlier_channels": 128},
            r"n_outlier_channels must be 0\.\.127, got 128",
        ),
        ({"n_calib_tokens": 0}, "n_calib_tokens must be 1"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields, message):
    with pytest.raises(QuantizerConfigError, match=r"KVCacheConfig.*" + message):
        KVCacheFactory.create(KVCacheConfig(**fields))


def test_fault_F46_the_builder_takes_what_methods_can_do():
    for dims in (80, 96, 192):
        for method in STANDALONE_METHODS:
            KVCacheBuilder().with_method(method).with_head_dim(dims).build()
    wide = KVCacheBuilder().with_method("qjl").with_jl_dim(4 * 128).build()
    wide.append(normal(128), normal(128))
    assert wide.memory_bytes() == 64 * (2 + 64 + 130)


def test_observers_and_stores_are_refused_through_the_builder():
    with pytest.raises(QuantizerConfigError, match="observers"):
        KVCacheBuilder().with_observer(print).build()
    with pytest.raises(QuantizerConfigError, match="store"):
        KVCacheBuilder().with_artifact_store(object()).build()


def test_capacity_of_zero_is_no_limit():
    assert KVCacheBuilder().with_capacity(0).build().capacity is None


def test_for_model_makes_a_cache_a_layer():
    args = SimpleNamespace(hidden_size=192, num_attention_heads=3)
    model = SimpleNamespace(layers=[None] * 4, args=args)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="polar"))
    assert [cache.head_dim for cache in caches] == [64] * 4
    caches[0].append(normal(64), normal(64))
    assert [len(cache) for cache in caches] == [1, 0, 0, 0]
    args.head_dim = 32
    assert KVCacheBuilder.for_model(model, KVCacheConfig())[0].head_dim == 32
    with pytest.raises(QuantizerConfigError, match="does not say its head_dim"):
        KVCacheBuilder.for_model(SimpleNamespace(layers=[1]), KVCacheConfig())


def test_same_seed_same_answers_and_another_seed_others():
    keys, values = normal(2, 1, 50, 64)
    q = normal(64, seed=5)

    def answer(seed: int) -> np.ndarray:
        cache = KVCacheBuilder().with_head_dim(64).with_seed(seed).build()
        cache.append(keys, values)
        return cache.attend(q)

    assert np.array_equal(answer(1), answer(1))
    assert not np.array_equal(answer(1), answer(2))


def test_registry_says_what_each_method_reads():
    fields = set(KVCacheConfig.__dataclass_fields__)
    for info in METHODS.values():
        assert info.summary and info.title and info.authors
        assert {parameter.name for parameter in info.parameters} <= fields


def test_importing_the_caches_imports_no_mlx():
    code = (
        "import sys, kvpool; kvpool.KVCacheBuilder().with_method('kivi').build(); "
        "sys.exit(any(name.partition('.')[0] == 'mlx' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
