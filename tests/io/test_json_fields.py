"""Numbers of configurations, checked by kind and range."""

import math

import pytest

from embedlayer import CheckpointError
from embedlayer.io.json_fields import as_number, as_whole_number


def test_numbers_are_returned() -> None:
    assert as_number(-2, "key") == -2.0
    assert as_number(1e-5, "key", above=0.0) == 1e-5
    assert (as_whole_number(4, "key"), as_whole_number(4.0, "key"), as_whole_number(8, "key", most=8)) == (4, 4, 8)
    assert type(as_whole_number(4.0, "key")) is int


@pytest.mark.parametrize("value", [None, "1", True, [1], math.nan, math.inf, 10**400])
def test_other_values_are_refused_by_their_key(value) -> None:
    for check in (as_number, as_whole_number):
        if not (check is as_number and value == 10**400):
            with pytest.raises(CheckpointError, match="The configuration's key "):
                check(value, "key")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: as_number(0, "key", above=0.0), "key must be a positive number, not 0"),
        (lambda: as_whole_number(0, "key"), "key must be a whole number of at least 1, not 0"),
        (lambda: as_whole_number(2.5, "key"), "key must be a whole number of at least 1, not 2.5"),
        (lambda: as_whole_number(9, "key", most=8), "key 9 is larger than in any model: the file is damaged"),
    ],
)
def test_numbers_out_of_range_are_refused(check, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        check()
