"""Numbers are copied to the host while later kernels run. No result shows when a copy began: it is made here."""

import pytest
import torch
from kernel_paths import running_on

from embedlayer.core.devices import HostCopy


@pytest.mark.parametrize("backend", ["numba", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_to_the_host_has_the_numbers_of_when_it_began(backend) -> None:
    with running_on(backend):
        numbers = torch.ones(3, 2**20, dtype=torch.int64).cumsum(1).sum(1)
        copy = HostCopy(numbers)
        if backend == "cuda":
            numbers.zero_()
        for _ in range(2):
            assert copy.tolist() == [2**19 * (2**20 + 1)] * 3
        assert HostCopy(numbers[0] == numbers[1]).tolist() is True
