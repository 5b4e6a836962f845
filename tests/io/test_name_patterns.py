"""Patterns mean what they mean in `re`, as PEFT calls it, and no pattern takes long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlayer.core.errors import CheckpointError
from embedlayer.io.name_patterns import LONGEST, NamePattern

ELEMENTS = ["a", "b", "1", ".", r"\.", r"\d", r"\w", "[ab]", "[^a-c]", "*", "+", "?", "|", "(", "(?:", ")", "^", "$"]


@given(st.lists(st.sampled_from(ELEMENTS), max_size=8).map("".join), st.text("ab.1c", max_size=7))
def test_a_pattern_matches_what_re_matches(pattern: str, name: str) -> None:
    try:
        ours = NamePattern(pattern, "file")
    except CheckpointError:
        return
    assert ours.matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "((a*)*)*b", "(a|a)*b", "(a|aa)+$b", ".*.*.*.*.*.*b", "(" * 20 + "a*" + ")*" * 20 + "b"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    assert not NamePattern(pattern, "file").matches("a" * 300)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a{3}", "none of"),
        ("a**", "none of"),
        ("*a", "repeats nothing"),
        ("^*a", "repeats nothing"),
        ("a(?=b)", "the group"),
        ("(?P<n>a)", "the group"),
        (r"(a)\1", r"\\1"),
        (r"\bq", r"\\b"),
        ("(a", "not closed"),
        ("a)", "closes nothing"),
        ("[a", "ends too early"),
        ("[]a]", "escape it"),
        ("[z-a]", "the range"),
        ("a\\", "ends too early"),
        ("(" * 30 + ")" * 30, "nested"),
        ("a" * (LONGEST + 1), f"at most {LONGEST}"),
    ],
)
def test_other_patterns_are_refused_with_the_reason(pattern: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"adapter.json, alpha_pattern: the pattern .* is not read: .*{why}"):
        NamePattern(pattern, "adapter.json, alpha_pattern")
