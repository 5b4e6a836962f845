"""The error tree, and errors about dependencies: one that is missing, one of a release that is not supported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from processes import run_program
from torch import nn

import embedlayer as el
from embedlayer.core import errors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.EmbedLayerError)]
    for cls in classes:
        if cls is not errors.EmbedLayerError:
            *ours, builtin = cls.__bases__
            assert all(issubclass(base, errors.EmbedLayerError) for base in ours)
            row = next(line for line in errors.__doc__.splitlines() if f" {cls.__name__} " in line)
            assert all(base.__name__ in row for base in (*ours, builtin) if base is not errors.EmbedLayerError)


def test_a_missing_extra_names_its_install_line() -> None:
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'embedlayer\[plots\]'"):
        errors.require("no_such_module_anywhere", extra="plots")
    assert errors.require("json", extra="plots").__name__ == "json"


def test_the_supported_releases_are_those_of_the_project_file() -> None:
    written = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    for name, (oldest, end) in errors.SUPPORTED.items():
        assert f"{name}>={oldest}" + (f",<{end}" if end else "") in written


def test_make_installs_the_oldest_supported_releases_and_otherwise_the_newest() -> None:
    make = lambda target: subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True).stdout  # noqa: E731
    oldest, newest = make("test-oldest"), make("test-newest")
    assert all(f'"{name}=={oldest_release}.*"' in oldest for name, (oldest_release, _) in errors.SUPPORTED.items())
    assert '"numpy==1.26.*"' in oldest
    assert "--upgrade-strategy eager" in newest
    assert "==" not in newest.partition("pip install")[2]


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.10.1"), ("torch", "1.13.0+cpu"), ("transformers", "5.22.2"), ("transformers", "6.0.0.dev0")],
)
def test_a_release_that_is_not_supported_is_named_with_what_to_install(name, version) -> None:
    supported = {"torch": "torch>=2.11", "transformers": "transformers>=5.23,<6"}[name]
    message = rf"supports {re.escape(supported)}, and {name} {re.escape(version)} is .*\n.*pip install '{supported}'"
    with pytest.raises(errors.VersionError, match=message):
        errors.check_release(name, version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "3.0.0a1"])
def test_a_release_that_is_supported_is_accepted(version) -> None:
    errors.check_release("torch", version)


def test_every_layer_is_refused_on_an_old_torch_and_the_package_is_still_imported() -> None:
    program = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "embedlayer"]:
    del sys.modules[name]
torch.__version__ = "2.10.0"
import embedlayer as el
for name in ("load", "patch", "DecoderLM", "EmbeddingLayer", "TokenEmbedding", "OutputHead", "AlibiBias",
        "RotaryEmbedding", "RowAdamW", "RowAdagrad", "linear_cross_entropy", "Trainer", "clip_grad_norm_"):
    try:
        getattr(el, name)
    except el.VersionError as error:
        assert "torch 2.10.0 is installed" in str(error), error
    else:
        print(name)
"""
    code, out, err = run_program("-c", program)
    assert (code, out) == (0, ""), err


def test_a_model_of_a_transformers_that_is_not_supported_is_not_patched(monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.2")
    with pytest.raises(el.VersionError, match=r"transformers 5\.22\.2 is installed"):
        el.patch(model)
    assert type(model.lm_head) is nn.Linear
    with pytest.raises(el.VersionError, match=r"pip install 'transformers>=5\.23,<6'"):
        errors.require("transformers", extra="hf")
    own: Any = nn.Module()
    own.table = nn.Embedding(9, 4)
    own.get_input_embeddings = lambda: own.table
    assert type(el.patch(own).table) is el.TokenEmbedding  # no class of transformers
