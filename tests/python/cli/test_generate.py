"""`kvpool generate` on a tiny random model, in the test's own process."""

from __future__ import annotations

import json
import re
import sys

import pytest
from kvpool.cli import generate, main
from kvpool.cli.caches import CacheChoice
from kvpool.cli.decoding import Request
from tiny_folder import N_LAYERS

# The template adds two tokens to the prompt's eight bytes.
PROMPT = "12345678"
N_PROMPT = 10


@pytest.fixture
def pools(monkeypatch):
    """The pools that the command makes."""
    made = []
    make = generate._make_pool

    def recording(*arguments):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(generate, "_make_pool", recording)
    return made


def run(model, *options: str) -> int:
    return main(["generate", "--model", str(model), "--prompt", PROMPT, *options])


def field(report: str, label: str) -> str:
    """The value beside a label of the plain table."""
    found = re.search(rf"^  {re.escape(label)}  +(.*)$", report, re.MULTILINE)
    assert found, report
    return found[1]


def test_it_says_what_the_request_held_and_that_all_came_back(tiny_model, pools, capsys):
    assert run(tiny_model, "--max-tokens", "22") == 0
    report = capsys.readouterr().out
    assert field(report, "prompt").startswith(f"{N_PROMPT} tokens, ")
    assert field(report, "answer").startswith("22 tokens, ")
    blocks = 2 * N_LAYERS * 2  # keys and values; 32 tokens lie in two blocks of 16
    assert field(report, "in use") == f"{blocks} of {blocks}, peak {blocks}"
    assert field(report, "reused") == f"0 of {blocks} handed out"
    assert field(report, "after the release") == "0 in use"
    assert pools[0].stats.blocks_in_use() == 0
    pools[0].check_invariants()


def test_quiet_prints_the_text_alone(tiny_model, capsys):
    run(tiny_model, "--max-tokens", "5")
    text = capsys.readouterr().out.partition("\n\nThe request\n")[0]
    run(tiny_model, "--max-tokens", "5", "--quiet")
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert captured.err == ""


def test_raw_leaves_the_chat_template_out(tiny_model, capsys):
    run(tiny_model, "--max-tokens", "1", "--raw")
    assert field(capsys.readouterr().out, "prompt").startswith(f"{len(PROMPT)} tokens, ")


def test_fp32_dequantises_the_weights(tiny_model, tmp_path, pools, capsys):
    import mlx_lm
    from kvpool.cli.loading import load
    from mlx_lm.utils import quantize_model, save_model

    model, _, config = mlx_lm.load(str(tiny_model), return_config=True)
    model, config = quantize_model(model, config, group_size=32, bits=8)
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))

    weights = load(str(tmp_path), fp32=True)[0].parameters()["model"]["embed_tokens"]
    assert str(weights["weight"].dtype) == "mlx.core.float32"
    assert "scales" not in weights
    assert run(tmp_path, "--fp32", "--max-tokens", "5", "--compare-stock") == 0
    assert field(capsys.readouterr().out, "tokens") == "identical, all 5"


def test_the_pool_gets_the_asked_geometry(tiny_model, pools):
    run(tiny_model, "--max-tokens", "4", "--block-size", "8", "--n-blocks", "60", "--grow")
    config = pools[0].config
    assert (config.block_size, config.n_blocks, config.grow_on_exhaustion) == (8, 60, True)


def test_the_request_belongs_to_the_asked_owner(tiny_model, pools, monkeypatch):
    owners = []
    build = CacheChoice.build

    def recording(self, model, pool, owner):
        owners.append(owner)
        return build(self, model, pool, owner)

    monkeypatch.setattr(CacheChoice, "build", recording)
    run(tiny_model, "--max-tokens", "1", "--owner", "-7")
    assert owners == [-7]


def test_compare_stock_finds_the_same_tokens(tiny_model, pools, capsys):
    assert run(tiny_model, "--max-tokens", "40", "--compare-stock") == 0
    report = capsys.readouterr().out
    assert field(report, "tokens") == "identical, all 40"
    ratio = field(report, "speed, pool / mlx-lm")
    spread = r"\d+\.\d\d \(median; \d+\.\d\d to \d+\.\d\d in 4 segments in turns\)"
    assert re.fullmatch(spread, ratio)
    held = pools[0].config.n_blocks
    assert field(report, "blocks reused") == f"{held} of {held} handed out"
    assert pools[0].stats.blocks_in_use() == 0


def test_compare_stock_says_where_the_tokens_differ(tiny_model, monkeypatch, capsys):
    stock_caches = generate._stock_caches

    def astray(model):
        import mlx.core as mx

        caches = stock_caches(model)
        model(mx.array([[9, 8, 7]]), cache=caches)
        return caches

    monkeypatch.setattr(generate, "_stock_caches", astray)
    assert run(tiny_model, "--max-tokens", "12", "--compare-stock") == 4
    said = field(capsys.readouterr().out, "tokens")
    assert re.fullmatch(r"they differ from token \d+ on", said)


def test_exhaustion_says_how_many_tokens_fit(tiny_model, pools, capsys):
    limits = ["--n-blocks", "20", "--block-size", "4"]  # 5 blocks a layer and stream: 20 tokens
    fitting = 20 - N_PROMPT
    assert run(tiny_model, "--max-tokens", str(fitting), *limits) == 0
    capsys.readouterr()
    assert run(tiny_model, "--max-tokens", str(fitting + 1), *limits) == 3
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvpool: error: the pool ran out: 20 blocks of 4 hold 20 tokens")
    assert f"the prompt has {N_PROMPT}" in error
    assert pools[1].stats.blocks_in_use() == 0
    pools[1].check_invariants()

    advised = re.search(r"--n-blocks (\d+) holds all 21", error)
    assert advised, error
    enough = ["--n-blocks", advised[1], "--block-size", "4"]
    assert run(tiny_model, "--max-tokens", str(fitting + 1), *enough) == 0


def test_a_prompt_that_does_not_fit_is_exhaustion_too(tiny_model, capsys):
    assert run(tiny_model, "--n-blocks", "8", "--block-size", "4") == 3
    error = capsys.readouterr().err.splitlines()[-1]
    assert "8 blocks of 4 hold 8 tokens of this model" in error
    assert "0 were generated" in error


def test_grow_adds_blocks(tiny_model, pools, capsys):
    assert run(tiny_model, "--max-tokens", "30", "--n-blocks", "4", "--grow") == 0
    assert pools[0].stats.n_grown > 0
    assert field(capsys.readouterr().out, "answer").startswith("30 tokens")


def test_metrics_go_to_a_file(tiny_model, tmp_path):
    target = tmp_path / "metrics.prom"
    assert run(tiny_model, "--max-tokens", "22", "--metrics", str(target)) == 0
    lines = target.read_text().splitlines()
    assert "# TYPE kvpool_block_pool_blocks_in_use gauge" in lines
    assert "kvpool_block_pool_blocks_in_use 8" in lines


def test_metrics_go_to_standard_output(tiny_model, capsys):
    assert run(tiny_model, "--max-tokens", "3", "--quiet", "--metrics", "-") == 0
    assert "\nkvpool_block_pool_exhausted_total 0\n" in capsys.readouterr().out


def test_metrics_are_written_when_the_pool_runs_out(tiny_model, capsys):
    assert run(tiny_model, "--n-blocks", "4", "--quiet", "--metrics", "-") == 3
    assert "kvpool_block_pool_exhausted_total 1\n" in capsys.readouterr().out


def test_a_seed_makes_sampling_repeatable(tiny_model, capsys):
    def text(seed: str) -> str:
        run(tiny_model, "--max-tokens", "12", "--temp", "2", "--seed", seed, "--quiet")
        return capsys.readouterr().out

    assert text("3") == text("3")
    assert text("3") != text("4")


def test_an_interrupt_gives_the_blocks_back(tiny_model, pools, monkeypatch, capsys):
    advance = Request.advance

    def interrupted(self, n_tokens=None):
        for n, text in enumerate(advance(self, n_tokens)):
            if n == 3:
                assert pools[0].stats.blocks_in_use() > 0
                raise KeyboardInterrupt
            yield text

    monkeypatch.setattr(Request, "advance", interrupted)
    assert run(tiny_model) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted\n")
    assert pools[0].stats.blocks_in_use() == 0
    pools[0].check_invariants()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "argument --max-tokens: must be a whole number >= 1, got '0'"),
        (["--n-blocks", "many"], "argument --n-blocks: must be a whole number >= 1, got 'many'"),
        (["--block-size", "-4"], "argument --block-size: must be a whole number >= 1, got '-4'"),
        (["--temp", "-1"], "argument --temp: must be a number >= 0, got '-1'"),
        (["--temp", "nan"], "argument --temp: must be a number >= 0, got 'nan'"),
        (["--owner", "me"], "argument --owner: must be a whole number of 64 bits, got 'me'"),
    ],
)
def test_options_out_of_range_are_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("smollm2", *options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_comparison_has_to_be_greedy(tiny_model, capsys):
    assert run(tiny_model, "--compare-stock", "--temp", "1") == 2
    assert "leave --temp out" in capsys.readouterr().err


def test_an_unknown_model_is_wrong_usage(capsys):
    assert run("smollm9") == 2
    assert "no folder and no model is called 'smollm9'" in capsys.readouterr().err


def test_a_folder_without_a_model_is_an_error(tmp_path, capsys):
    assert run(tmp_path) == 1
    assert f"kvpool: error: cannot load {tmp_path}: " in capsys.readouterr().err


def test_without_mlx_lm_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert run("smollm2") == 1
    assert "pip install 'kvpool[cpu,mlx-lm]'" in capsys.readouterr().err


def test_an_empty_prompt_is_wrong_usage(tiny_model, capsys):
    assert main(["generate", "--model", str(tiny_model), "--raw", "--prompt", ""]) == 2
    assert "the prompt has no tokens" in capsys.readouterr().err
