"""The examples for mlx-lm run, with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cache_kinds import ON_GPU
from tiny_models import write_llama

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"))


def run(example: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / example, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_requests_in_a_batch(model):
    out = run("batch_requests.py", model, "One?", "And the other one?", "--max-tokens", 8)
    # One token a byte: 4 and 18 of them, and 8 more that were made.
    assert "[12 tokens in 4 blocks]" in out
    assert "[26 tokens in 8 blocks]" in out
    assert "in_use=0/" in out


def test_a_prompt_that_is_saved_and_loaded(model, tmp_path):
    file = tmp_path / "prompt.safetensors"
    out = run("saved_prompt.py", model, "One?", "--max-tokens", 8, "--file", file)
    assert file.exists()
    assert "tokens came from the file]" in out
    assert "in_use=0/" in out


def test_answers_that_share_their_prompt(model):
    out = run("parallel_sampling.py", model, "A prompt of some length.", "--max-tokens", 6)
    # 24 tokens and one that is fed again with each answer: two blocks a stream in two layers.
    assert "8 blocks hold the prompt, and 8 after the forks" in out
    assert out.count("\n- ") == 4
    # A GPU gathers pages of fp32.
    assert ("58 by mlx-lm" if ON_GPU else "58 by the kernels") in out


def test_beams_that_share_what_they_have_in_common(model):
    out = run("beam_search.py", model, "A prompt of some length.", "--max-tokens", 6)
    scores = [float(line.split()[0]) for line in out.splitlines()[:3]]
    assert scores == sorted(scores, reverse=True)
    shared, alone = (int(word) for word in out.splitlines()[-1].split() if word.isdecimal())
    assert shared < alone
