"""Fixtures shared by the tests of losses."""

from collections.abc import Iterator

import pytest

from embedlayer.kernels import kernel
from embedlayer.kernels.kernel import kernels_disabled


@pytest.fixture(params=["kernels", "torch operators"])
def both_paths(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with compiled kernels, and again with torch operators."""
    if request.param == "kernels":
        pytest.importorskip("numba")
        yield
        assert kernel._failure.reason is None
    else:
        with kernels_disabled():
            yield
