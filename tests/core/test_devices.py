"""The kind of device of a tensor."""

import pytest
import torch

from embedlayer.core.devices import TAKEN_AS, device_kind


def test_a_kind_is_the_type_of_the_device_or_the_type_as_which_tests_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kind(torch.zeros(2)) == device_kind(torch.device("cpu")) == "cpu"
    assert device_kind(torch.device("cuda", 1)) == "cuda"
    monkeypatch.setitem(TAKEN_AS, "meta", "cuda")
    assert device_kind(torch.zeros(2, device="meta")) == "cuda"
