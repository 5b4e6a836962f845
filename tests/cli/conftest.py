"""Fixtures of the tests of the commands."""

import pytest


@pytest.fixture(autouse=True)
def shapes_unchecked(request: pytest.FixtureRequest) -> None:
    """Check shapes in the tests of what the commands call, and here with `--all`."""
    if not request.config.getoption("--all"):
        request.getfixturevalue("unchecked")
