"""Tokenizers built from the token lists of a GGUF file."""

from __future__ import annotations

import io
import random

import pytest
import sentencepiece
from kvpool.models.tokenizers import byte_level_bpe, sentencepiece_bpe, write_tokenizer
from sentencepiece import sentencepiece_model_pb2
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards boil green tea"
WORDS = SENTENCE.split(" ")


def byte_level(merges=("h e", "t he", "Ġ the")):
    tokens = ["<|end|>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    return byte_level_bpe(tokens, [3] + [1] * (len(tokens) - 1), merges)


def pieces(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_merges_are_applied_within_words():
    assert pieces(byte_level(), "the the") == ["the", "Ġthe"]


def test_digits_are_split_singly():
    merges = ["1 2", "12 3"]
    assert pieces(byte_level(merges), "x123") == ["x", "1", "2", "3"]


def test_control_tokens_are_matched_in_the_text():
    assert pieces(byte_level(), "he<|end|>he") == ["he", "<|end|>", "he"]


@pytest.mark.parametrize("text", ["naïve café", "日本語 😀", " two  spaces\n\ttab ", "a1b22"])
def test_any_text_comes_back(text):
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.fixture(scope="module")
def trained():
    """A SentencePiece model with byte fall-back, and its tokens as a GGUF file would list them."""
    rng = random.Random(7)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(400)]
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        model_type="bpe",
        vocab_size=256 + 4 + 90,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<turn>"],
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(stream.getvalue())
    # SentencePiece's and GGUF's piece types agree, but that GGUF counts <unk> among the controls.
    tokens = [piece.piece for piece in proto.pieces]
    types = [3 if piece.type == 2 else piece.type for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    reference = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    return reference, sentencepiece_bpe(tokens, types, scores, unknown="<unk>", bos="<s>")


def test_scores_give_the_tokens_of_sentencepiece(trained):
    reference, tokenizer = trained
    rng = random.Random(8)
    letters = "".join(WORDS) + "   "
    texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(100)]
    texts += ["".join(rng.choices(letters, k=40)) for _ in range(200)]
    texts += ["über 日本 😀", "  leading", "trailing  ", "quick<turn>brown", "a\nb\tc", ""]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text


def test_the_first_token_is_put_before_a_text(trained):
    _, tokenizer = trained
    with_bos = tokenizer.encode("quick").tokens
    assert with_bos == ["<s>", *pieces(tokenizer, "quick")]


def test_transformers_reads_what_is_written(tmp_path):
    from mlx_lm.tokenizer_utils import load

    write_tokenizer(
        tmp_path,
        byte_level(),
        bos="<|end|>",
        eos="<|end|>",
        pad="<|end|>",
        unknown="<|end|>",
        max_tokens=77,
        chat_template="{% for message in messages %}{{ message['content'] }}!{% endfor %}",
    )
    read = load(tmp_path)
    assert read.model_max_length == 77
    assert read.eos_token_ids == {0}
    ids = read.apply_chat_template([{"role": "user", "content": "the"}])
    assert read.decode(ids) == "the!"
