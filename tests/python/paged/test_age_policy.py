"""AgePolicy: what it says, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpool.mlx_lm.paged import AgePolicy


def test_a_policy_says_from_which_age_on_a_format_is_used():
    policy = AgePolicy(256, [("int8", 2048), ("int4", None)])
    assert policy.steps() == [("int8", 256), ("int4", 2304)]
    assert (policy.recent, policy.then, policy.first) == (
        256,
        (("int8", 2048), ("int4", None)),
        None,
    )
    assert str(policy) == "auto:256,int8:2048,int4"


@pytest.mark.parametrize("text", ["fp16:256,int8:2048,int4", "auto:0,int8", "bf16:1,int2"])
def test_the_text_form_comes_back(text):
    assert str(AgePolicy.parse(text)) == text
    assert AgePolicy.parse(text) == AgePolicy.parse(text.replace(",", " , "))


def test_a_policy_is_a_value():
    policy = AgePolicy.parse("fp16:256,int8")
    assert policy == AgePolicy(256, [("int8", None)], first="fp16")
    assert hash(policy) == hash(AgePolicy(256, (("int8", None),), "fp16"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.recent = 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, [("int8", None)]), ValueError, "recent must be >= 0, got -1"),
        ((True, [("int8", None)]), TypeError, "recent"),
        ((1.0, [("int8", None)]), TypeError, "recent"),
        ((1, []), ValueError, "then"),
        ((1, ["int8"]), TypeError, "pairs"),
        ((1, [("int8", None, 3)]), TypeError, "pairs"),
        ((1, [("int8", 0), ("int4", None)]), ValueError, "then must be >= 1, got 0"),
        ((1, [("int8", None), ("int4", None)]), ValueError, "only the last"),
        ((1, [("int8", 5)]), ValueError, "last number must be None, got 5"),
        ((1, [("int5", None)]), ValueError, "one of fp32, fp16"),
        ((1, [(8, None)]), TypeError, "must be a str"),
        ((1, [("int4", 5), ("int8", None)]), ValueError, "int8 must be narrower than int4"),
        ((1, [("int8", 5), ("int8", None)]), ValueError, "narrower"),
        ((1, [("bf16", None)], "fp16"), ValueError, "narrower"),
        ((1, [("int8", None)], "int1"), ValueError, "first"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, message):
    with pytest.raises(error, match=r"\[AgePolicy\]") as caught:
        AgePolicy(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "fp16", "fp16:x,int8", "fp16:-1,int8", "fp16:256", ":", "fp16:1,,"]
)
def test_text_that_reads_otherwise_is_refused(text):
    with pytest.raises(ValueError, match=r"\[AgePolicy"):
        AgePolicy.parse(text)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from([None, "fp32", "fp16"]))
def test_every_policy_can_be_written_and_read(recent, middle, first):
    policy = AgePolicy(recent, [("int8", middle), ("int2", None)], first)
    assert AgePolicy.parse(str(policy)) == policy
