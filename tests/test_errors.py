"""The error tree."""

import pytest

from embedlayer import errors


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
