"""Fixtures of the tests of trainers of other libraries."""

from typing import Any

import pytest
from torch import Tensor

from embedlayer.heads import deferred


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """Each call of the loss without logits."""
    found: list[Any] = []
    ours = deferred.cross_entropy_of

    def counted(*args: Any) -> Tensor:
        found.append(args)
        return ours(*args)

    monkeypatch.setattr(deferred, "cross_entropy_of", counted)
    return found
