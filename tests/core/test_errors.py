"""The error tree, and errors about dependencies: one that is missing, one of a release that is not tested."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from processes import run_program
from torch import nn

import embedlayer as el
from embedlayer.core import errors


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


@pytest.fixture
def unwarned() -> Iterator[None]:
    """A process in which no release was warned of."""
    errors.warn_if_untested.cache_clear()
    yield
    errors.warn_if_untested.cache_clear()


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.8.1"), ("torch", "3.0.0a1"), ("transformers", "5.5.9"), ("transformers", "6.0.0.dev0")],
)
def test_a_release_outside_of_the_tested_range_is_warned_of_once(name, version, unwarned) -> None:
    oldest, newest = errors.TESTED[name]
    message = rf"{name} {re.escape(version)} is installed; .* tested with {name} {oldest} to {newest}\."
    with pytest.warns(el.EmbedLayerWarning, match=message):
        errors.warn_if_untested(name, version)
    errors.warn_if_untested(name, version)  # pytest makes an error of a second warning


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", errors.TESTED)
def test_the_ends_of_the_tested_range_are_not_warned_of(name, place, unwarned) -> None:
    errors.warn_if_untested(name, f"{errors.TESTED[name][place]}.7+cpu")


@pytest.mark.parametrize("version", ["2.8.0", "2.99.0"])
def test_with_another_torch_everything_is_imported_after_one_warning(version) -> None:
    program = f"""
import sys
import warnings
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "embedlayer"]:
    del sys.modules[name]
torch.__version__ = "{version}"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import embedlayer as el
    for name in ("load", "patch", "DecoderLM", "EmbeddingLayer", "TokenEmbedding", "OutputHead", "AlibiBias",
            "RotaryEmbedding", "RowAdamW", "RowAdagrad", "linear_cross_entropy", "Trainer", "clip_grad_norm_"):
        getattr(el, name)
print(*[each.message for each in caught if "is installed" in str(each.message)], sep="\\n")
"""
    code, out, err = run_program("-c", program)
    assert (code, out.count("\n")) == (0, 1), err
    assert out.startswith(f"torch {version} is installed; embedlayer is tested with torch ")


def test_a_model_of_an_untested_transformers_is_patched_after_one_warning(monkeypatch, unwarned) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    own: Any = nn.Module()
    own.table = nn.Embedding(9, 4)
    own.get_input_embeddings = lambda: own.table
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.5.0")
    assert type(el.patch(own).table) is el.TokenEmbedding  # no class of transformers
    with pytest.warns(el.EmbedLayerWarning, match=r"transformers 5\.5\.0 is installed"):
        el.patch(model)
    assert type(model.lm_head) is not nn.Linear
    errors.require("transformers", extra="hf")
