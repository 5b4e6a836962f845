"""The error tree, and errors about dependencies: one that is missing, one of a release that is not tested."""

import re
import sys
import warnings
from typing import Any

import pytest
from processes import run_program
from torch import nn

import embedlayer as el
from embedlayer.core import errors


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, el.EmbedLayerError)]
    for cls in classes:
        if cls is not el.EmbedLayerError:
            *ours, builtin = cls.__bases__
            assert all(issubclass(base, el.EmbedLayerError) for base in ours)
            row = next(line for line in errors.__doc__.splitlines() if f" {cls.__name__} " in line)
            assert all(base.__name__ in row for base in (*ours, builtin) if base is not el.EmbedLayerError)


def test_a_missing_extra_names_its_install_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    table = el.TokenEmbedding(9, 4)
    with pytest.raises(el.core.MissingExtraError, match=r"matplotlib is needed.*\n.*pip install 'embedlayer\[plots\]'"):
        el.plots.norm_histogram(table)


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


def test_models_of_an_untested_transformers_are_patched_after_one_warning(monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)

    def patched(version: str) -> list[str]:
        """Patch a model with this release, and return the warnings."""
        model = transformers.GPT2LMHeadModel(config)
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            el.patch(model)
        assert type(model.lm_head) is not nn.Linear
        return [str(each.message) for each in caught]

    tested = set()
    for version in ("5.5.9", "6.0.0.dev0"):
        (warning,) = patched(version)
        found = re.fullmatch(
            rf"transformers {version} is installed; .* with transformers ([\d.]+) to ([\d.]+)\.", warning
        )
        assert found is not None, warning
        assert patched(version) == []
        tested |= {*found.groups()}
    assert len(tested) == 2
    assert [patched(f"{end}.7+cpu") for end in tested] == [[], []]

    own: Any = nn.Module()
    own.table = nn.Embedding(9, 4)
    own.get_input_embeddings = lambda: own.table
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.5.0")
    assert type(el.patch(own).table) is el.TokenEmbedding  # no class of transformers, and no warning
