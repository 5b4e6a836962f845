"""What runs of a product always: each value of each axis, and each pair of values of axes that meet."""

import os
from itertools import product

import pytest
from covering import LONG, cases, covering, looped, some
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_value_and_every_pair_of_axes_that_meet_is_covered(sizes, data) -> None:
    axes = st.sampled_from(range(len(sizes)))
    pairs = data.draw(st.lists(st.tuples(axes, axes).filter(lambda pair: pair[0] < pair[1]), max_size=2))
    whole = list(product(*map(range, sizes)))
    chosen = covering(whole, pairs)
    assert chosen <= set(whole)
    for axis, size in enumerate(sizes):
        assert {case[axis] for case in chosen} == set(range(size))
    for one, other in pairs:
        assert len({(case[one], case[other]) for case in chosen}) == sizes[one] * sizes[other]
    assert len(chosen) <= max(sizes) if not pairs else True


def test_the_rest_of_a_product_is_long() -> None:
    parameters = cases("letter, number", "abc", (1, 2)).args[1]
    assert [case.values for case in parameters] == list(product("abc", (1, 2)))
    assert [case.values for case in parameters if not case.marks] == [("a", 1), ("b", 2), ("c", 1)]
    assert not [case for case in cases("letter, number", "abc", (1, 2), pairs=["letter, number"]).args[1] if case.marks]


def test_values_that_do_not_exist_are_no_part_of_an_axis() -> None:
    assert [getattr(value, "values", value) for value in some(["b"], "ab")] == [("a",), "b"]
    with pytest.raises(AssertionError, match="not among the values: {'c'}"):
        some(["c"], "ab")


def test_a_law_over_all_cases_runs_each_afresh_and_names_those_that_fail(request, tmp_path, monkeypatch) -> None:
    seen: list[tuple[str, int]] = []

    @looped("letter, number", "ab", (1, 2, pytest.param(3, marks=LONG)), pairs=["letter, number"])
    def law(letter, number, tmp_path, monkeypatch) -> None:
        (tmp_path / "file").touch(exist_ok=False)
        monkeypatch.setenv("LETTER", letter)
        seen.append((letter, number))
        if letter == "b":
            raise ValueError

    fixtures = {"request": request, "own_state": seen.clear, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    with pytest.raises(BaseExceptionGroup) as error:
        law(**fixtures)
    assert [each.__notes__ for each in error.value.exceptions] == [["case 3: b, 1"], ["case 4: b, 2"]]
    assert seen == [("b", 2)]
    assert "LETTER" not in os.environ

    @looped("value", (1, 2))
    def skipped(value) -> None:
        pytest.skip(f"value {value}")

    with pytest.raises(pytest.skip.Exception, match="value 2"):
        skipped(request=request, own_state=seen.clear)
