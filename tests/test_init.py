"""The public names."""

import ast
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

import embedlayer


def test_every_public_name_is_there_once() -> None:
    assert len(embedlayer.__all__) == len(set(embedlayer.__all__))
    for name in embedlayer.__all__:
        value = getattr(embedlayer, name)
        assert getattr(value, "__name__", name) == name
        assert name in dir(embedlayer)


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(Path(embedlayer.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, alias.name) for node in block.body for alias in node.names}
    assert seen == {(module, name) for name, module in embedlayer._HOME.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TokenEmbeding'"):
        _ = embedlayer.TokenEmbeding


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, embedlayer.cli.main; print(sorted({'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_shapes_in_signatures_are_checked_in_tests() -> None:
    table = embedlayer.TokenEmbedding(10, 4)
    with pytest.raises(jaxtyping.TypeCheckError):
        table.logits(torch.zeros(3, dtype=torch.int64))
