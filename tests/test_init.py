"""The public names."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections import Counter

import jaxtyping
import pytest
import torch

import embedlayer

SUBPACKAGES = [name for name in embedlayer.__all__ if inspect.ismodule(getattr(embedlayer, name))]
TOP_LEVEL = sorted({*embedlayer.__all__} - {*SUBPACKAGES})


@pytest.mark.parametrize("package", ["embedlayer", *(f"embedlayer.{name}" for name in SUBPACKAGES)])
def test_every_public_name_can_be_imported(package) -> None:
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        assert getattr(value, "__name__", name).rpartition(".")[2] == name
        assert name in dir(module)


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_a_public_name_is_defined_in_the_package_that_lists_it(package) -> None:
    module = importlib.import_module(f"embedlayer.{package}")
    homes = {name: getattr(getattr(module, name), "__module__", None) for name in getattr(module, "__all__", ())}
    others = {name: home for name, home in homes.items() if str(home).startswith("embedlayer.")}
    assert all(f"{home}.".startswith(f"{module.__name__}.") for home in others.values()), others


def test_a_name_of_the_top_level_is_the_same_object_in_one_package() -> None:
    paths: Counter[str] = Counter()
    for package in SUBPACKAGES:
        module = importlib.import_module(f"embedlayer.{package}")
        defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = {*getattr(module, "__all__", defined)}
        assert all(getattr(module, name) is getattr(embedlayer, name) for name in names.intersection(TOP_LEVEL))
        paths.update(names)
    assert [name for name in TOP_LEVEL if paths[name] != 1] == []
    assert [name for name, count in paths.items() if count > 1] == []


def test_no_public_name_is_hidden_by_a_module() -> None:
    for package in SUBPACKAGES:
        module = importlib.import_module(f"embedlayer.{package}")
        modules = {found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()))}
        assert modules.isdisjoint(getattr(module, "__all__", ())), package


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No embedlayer attribute TokenEmbeding"):
        _ = embedlayer.TokenEmbeding


def test_the_command_loads_no_torch_a_table_no_losses_and_training_in_one_process_no_distributed_tensors() -> None:
    code = """
import sys, embedlayer.cli.main
print({"torch", "numpy", "rich", "tokenizers"} & sys.modules.keys())
by_command = {*sys.modules}
embedlayer.TokenEmbedding
print(len([name for name in sys.modules.keys() - by_command if name.startswith("embedlayer")]) <= 32)
embedlayer.Trainer
print({"torch.distributed.tensor"} & sys.modules.keys())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n") == ["set()", "True", "set()", ""]


def test_shapes_in_signatures_are_checked_in_tests() -> None:
    table = embedlayer.TokenEmbedding(10, 4)
    with pytest.raises(jaxtyping.TypeCheckError):
        table.logits(torch.zeros(3, dtype=torch.int64))
