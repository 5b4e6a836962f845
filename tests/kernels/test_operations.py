"""The list of operations has every kernel, with a definition."""

from importlib import import_module
from operator import attrgetter

import pytest
from package_modules import package_modules

from embedlayer.cli.operations import OPERATIONS
from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.operation import Operation


def test_the_list_has_every_record_once() -> None:
    records = {
        id(each) for module in package_modules() for each in vars(module).values() if isinstance(each, Operation)
    }
    assert sorted(map(id, OPERATIONS)) == sorted(records)
    assert len({each.what for each in OPERATIONS}) == len(OPERATIONS)


def test_each_kernel_belongs_to_an_operation_with_a_definition() -> None:
    kernels = {each for module in package_modules() for each in vars(module).values() if isinstance(each, Kernel)}
    of_blocks = {each for each in kernels if each.function.__code__.co_varnames[:2] == ("start", "stop")}
    assert {kernel for each in OPERATIONS for kernel in each.cpu} == of_blocks
    for each in OPERATIONS:
        module, _, name = each.definition_name.partition(":")
        assert callable(attrgetter(name)(import_module(f"embedlayer.{module}")))


def test_each_launch_belongs_to_an_operation() -> None:
    pytest.importorskip("triton")
    assert {name for each in OPERATIONS for name in each.launches} == {
        name for each in OPERATIONS for name in each.gpu()
    }
    for each in OPERATIONS:
        assert set(each.launches) <= each.gpu().keys()
