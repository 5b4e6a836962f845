"""Fixtures of the tests of the commands."""

from pydoc_data.topics import topics

import pytest


@pytest.fixture(autouse=True)
def shapes_unchecked(request: pytest.FixtureRequest) -> None:
    """Check shapes in the tests of what the commands call, and here with `--all`."""
    if not request.config.getoption("--all"):
        request.getfixturevalue("unchecked")


@pytest.fixture(scope="session")
def reference() -> str:
    """The reference of Python's language, which `embedlayer demo` trains on."""
    return "\n\n".join(topics[name] for name in sorted(topics))
