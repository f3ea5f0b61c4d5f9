"""`kvpool generate --cache paged` on a tiny random model."""

from __future__ import annotations

import re

import kvpool
import pytest
from cache_kinds import ON_GPU
from kvpool.cli import main
from test_generate import N_PROMPT, field, run
from tiny_folder import HEAD_DIM, N_KEY_HEADS, N_LAYERS


@pytest.fixture(autouse=True)
def no_hook_is_left():
    yield
    assert not kvpool.is_attention_installed()


def calls_by(who: str, report: str) -> int:
    found = re.findall(rf"([\d,]+) by {who}", field(report, "attention"))
    return sum(int(number.replace(",", "")) for number in found)


def test_it_says_who_attended_and_what_the_blocks_hold(tiny_model, capsys):
    assert run(tiny_model, "--max-tokens", "22", "--cache", "paged") == 0
    report = capsys.readouterr().out
    # One call a layer for the prompt's first tokens, its last one, and each token but the last.
    here, elsewhere = calls_by("the kernels", report), calls_by("mlx-lm", report)
    assert here + elsewhere >= 22 * N_LAYERS
    assert (here if ON_GPU else elsewhere) == 0  # a GPU gathers pages of fp32
    n_blocks = 2 * N_LAYERS * 2  # keys and values; 32 tokens lie in two blocks of 16
    assert field(report, "they hold") == f"fp32 in {n_blocks}"
    a_token = N_LAYERS * 2 * N_KEY_HEADS * HEAD_DIM * 4  # keys and values, heads, dims, bytes
    n_tokens = N_PROMPT + 22
    expected = 32 * a_token / n_tokens
    assert re.search(rf", {expected:,.0f} a token$", field(report, "bytes held"))
    assert field(report, "after the release") == "0 in use"


@pytest.mark.parametrize("format", ["fp16", "int4", "fp16/int8"])
def test_kernels_of_every_device_read_halves_and_codes(tiny_model, format, capsys):
    options = ["--max-tokens", "22", "--cache", "paged", "--format", format]
    assert run(tiny_model, *options) == 0
    report = capsys.readouterr().out
    assert calls_by("the kernels", report) >= 21 * N_LAYERS
    # A GPU gathers for a prompt of more than eight tokens.
    assert calls_by("mlx-lm", report) <= (2 * N_LAYERS if ON_GPU else 0)
    assert field(report, "after the release") == "0 in use"


def test_compare_stock_finds_the_same_tokens(tiny_model, capsys):
    assert run(tiny_model, "--max-tokens", "40", "--compare-stock", "--cache", "paged") == 0
    assert field(capsys.readouterr().out, "tokens") == "identical, all 40"


def test_fewer_bits_are_reported_and_may_change_tokens(tiny_model, capsys):
    options = ["--cache", "paged", "--age-policy", "fp16:16,int4", "--compare-stock"]
    assert run(tiny_model, "--max-tokens", "60", *options) == 0
    formats = field(capsys.readouterr().out, "they hold")
    assert "int4 in" in formats and "fp16 in" in formats


def test_keys_and_values_may_have_formats_of_their_own(tiny_model, capsys):
    options = ["--max-tokens", "22", "--cache", "paged", "--format", "int8/int4"]
    assert run(tiny_model, *options) == 0
    n_blocks = N_LAYERS * 2
    held = set(field(capsys.readouterr().out, "they hold").split(", "))
    assert held == {f"int8 in {n_blocks}", f"int4 in {n_blocks}"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "int8"], "--format needs --cache paged"),
        (["--backend", "gather"], "--backend needs --cache paged"),
        (["--age-policy", "fp16:1,int8"], "--age-policy needs --cache paged"),
        (["--cache", "paged", "--format", "fp8"], "format must be one of"),
        (["--cache", "paged", "--format", "int8/fp8"], "format must be one of"),
        (["--cache", "paged", "--age-policy", "fp16"], "the first format needs a number"),
        (["--cache", "paged", "--method", "kivy"], "method must be one of"),
        (["--cache", "paged", "--bits", "3"], "bits needs a method"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(tiny_model, options, message, capsys):
    assert run(tiny_model, *options) == 2
    assert message in capsys.readouterr().err


def test_info_says_whether_the_extension_is_there(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  mlx extension +for MLX \d", out, re.MULTILINE)
    assert re.search(r"^  threads +\d+$", out, re.MULTILINE)
