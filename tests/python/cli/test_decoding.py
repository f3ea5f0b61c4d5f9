"""The comparison of two requests, on requests that replay given tokens and times."""

from __future__ import annotations

from kvpool.cli.decoding import SEGMENT_TOKENS, Request, compare


class Replay(Request):
    """A request whose tokens and seconds a token are known."""

    def __init__(self, tokens: list[int], seconds: float, log: list[str], name: str = "") -> None:
        super().__init__(None, None, [1, 2, 3], [], len(tokens))
        self._script = tokens
        self._seconds = seconds
        self._log = log
        self._name = name

    def advance(self, n_tokens=None):
        self._log.append(self._name)
        begin = len(self.tokens)
        for token in self._script[begin : begin + n_tokens]:
            self.decode_seconds += self._seconds if self.tokens else 0.0
            self.tokens.append(token)
            yield str(token)


def compared(left, right, left_seconds=1.0, right_seconds=1.0):
    log: list[str] = []
    ticks: list[int] = []
    first = Replay(left, left_seconds, log, "first")
    second = Replay(right, right_seconds, log, "second")
    return compare(first, second, ticks.append), log, ticks


def test_equal_tokens_have_no_difference():
    result, _, ticks = compared(list(range(30)), list(range(30)))
    assert result.differs_at is None
    assert ticks[-1] == 30


def test_the_first_difference_is_found():
    assert compared([5, 6, 7, 8], [5, 6, 9, 8])[0].differs_at == 2


def test_a_shorter_answer_differs_at_its_end():
    assert compared([5, 6], [5, 6, 7])[0].differs_at == 2


def test_the_ratio_is_of_speeds_not_of_times():
    n_tokens = 1 + 3 * SEGMENT_TOKENS
    result, _, _ = compared([4] * n_tokens, [4] * n_tokens, left_seconds=1.0, right_seconds=4.0)
    assert result.speed_ratios == (4.0, 4.0, 4.0)
    assert result.speed_spread == (4.0, 4.0, 4.0)


def test_a_segment_cut_short_does_not_count():
    n_tokens = 1 + SEGMENT_TOKENS + 2
    assert compared([4] * n_tokens, [4] * n_tokens)[0].speed_ratios == (1.0,)
    assert compared([4] * 3, [4] * 3)[0].speed_ratios == ()


def test_the_two_take_turns_in_going_first():
    n_tokens = 1 + 2 * SEGMENT_TOKENS
    _, log, _ = compared([4] * n_tokens, [4] * n_tokens)
    prompts, segments = log[:2], log[2:6]
    assert prompts == ["first", "second"]
    assert segments == ["first", "second", "second", "first"]


def test_a_segment_pays_for_the_token_that_mlx_lm_computes_ahead(tiny_model):
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generation_stream
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = mlx_lm.load(str(tiny_model))[:2]
    request = Request(model, tokenizer, [3, 4, 5], make_prompt_cache(model), max_tokens=9)
    pieces = list(request.advance(4))
    assert len(pieces) == len(request.tokens) == 4
    assert request.cache[0].offset == 3 + 4  # the fourth token went in already
    mx.synchronize(generation_stream)
    list(request.advance())
    assert len(request.tokens) == 9
    assert request.decode_speed > 0
    request.close()
