"""`help` of a function lists its keyword options, which are documented once, at the class that declares them."""

import inspect
from typing import get_args, get_type_hints

import pytest

import embedlayer as el
from embedlayer import vocab
from embedlayer.models.sampling import SamplingOptions
from embedlayer.option_docs import show_options
from embedlayer.vocab import EditOptions

SHOWN = {
    EditOptions: [
        vocab.edit_vocabulary,
        vocab.add_tokens,
        vocab.remove_tokens,
        vocab.trim_vocabulary,
        vocab.transplant,
    ],
    SamplingOptions: [el.generate],
}


@pytest.mark.parametrize(("options", "function"), [(kind, each) for kind, all_ in SHOWN.items() for each in all_])
def test_help_lists_every_option_once_with_its_text(options, function) -> None:
    text, documented = inspect.getdoc(function), inspect.getdoc(options)
    for name in get_type_hints(options):
        entry = next(line.strip() for line in documented.splitlines() if line.strip().startswith(f"{name}: "))
        assert text.count(f"\n    {entry}") == 1
    assert text.index("    **") < text.index(f"\n    {next(iter(get_type_hints(options)))}: ")
    *_, parameter = inspect.signature(function).parameters.values()
    assert get_args(parameter.annotation) == (options,)


def test_a_function_without_docstring_stays_as_it_is() -> None:
    def build(**options: object) -> None: ...

    assert show_options(EditOptions)(build) is build
    assert build.__doc__ is None
