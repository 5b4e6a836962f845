"""The kind of device of a tensor."""

import pytest
import torch
from kernel_paths import running_on

from embedlayer.core.devices import TAKEN_AS, HostCopy, device_kind


def test_a_kind_is_the_type_of_the_device_or_the_type_as_which_tests_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kind(torch.zeros(2)) == device_kind(torch.device("cpu")) == "cpu"
    assert device_kind(torch.device("cuda", 1)) == "cuda"
    monkeypatch.setitem(TAKEN_AS, "meta", "cuda")
    assert device_kind(torch.zeros(2, device="meta")) == "cuda"


@pytest.mark.parametrize("backend", ["numba", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_to_the_host_has_the_numbers_of_when_it_began(backend) -> None:
    with running_on(backend):
        numbers = torch.ones(3, 2**20, dtype=torch.int64).cumsum(1).sum(1)
        copy = HostCopy(numbers)
        if backend == "cuda":
            numbers.zero_()
        assert copy.tolist() == [2**19 * (2**20 + 1)] * 3
        assert HostCopy(numbers[0] == numbers[1]).tolist() is True
