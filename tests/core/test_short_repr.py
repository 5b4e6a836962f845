"""Records print as one line."""

import dataclasses
import inspect
import re
from collections.abc import Iterator

import torch
from package_modules import package_modules

from embedlayer import DecoderLM, RotaryEmbedding, TokenEmbedding, train_tokenizer
from embedlayer.analysis import table_health
from embedlayer.opening import OpenedModel, open_model
from embedlayer.vocab import add_tokens


def records() -> Iterator[type]:
    """Every dataclass and named tuple of the package."""
    for module in package_modules():
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
                yield value


def test_every_record_with_a_tokenizer_prints_short() -> None:
    holder = re.compile(r"(<class ')?[\w.(\[']*\bTokenizer['>)\]]*( \| None)?")
    with_tokenizer = [
        record for record in records() if any(holder.fullmatch(str(kind)) for kind in record.__annotations__.values())
    ]
    assert OpenedModel in with_tokenizer
    for record in with_tokenizer:
        calls = inspect.unwrap(record.__repr__).__code__.co_names
        assert record.__repr__.__name__ == "short_repr" or "short_repr" in calls, record


def test_a_run_and_what_is_found_of_it_print_as_one_short_line(tmp_path) -> None:
    tokenizer = train_tokenizer("I love dogs and cats . " * 50, vocab_size=300)
    table = TokenEmbedding(tokenizer.get_vocab_size(), 16, scale="sqrt_dim")
    model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=2)
    model.save_pretrained(tmp_path / "run", tokenizer=tokenizer)
    opened = open_model(tmp_path / "run")
    receipt = add_tokens(tmp_path / "run", [f" word{i}" for i in range(40)], out=tmp_path / "more")
    for record in (opened, receipt, table_health(table, tokenizer)):
        assert len(repr(record)) < 1200, repr(record)
        assert "\n" not in repr(record)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (
        f"model=<DecoderLM, {parameters:,} parameters>, "
        f"tokenizer=<BPE tokenizer, {tokenizer.get_vocab_size():,} tokens>, "
    ) in repr(opened)


def test_a_value_prints_as_it_is_where_it_is_short(unchecked) -> None:
    for value, shown in [
        (torch.zeros(3, 4), "<float32 tensor (3, 4)>"),
        ([1, 2], "[1, 2]"),
        ({i: i for i in range(5000)}, "<dict of 5,000>"),
        (None, "None"),
        ("x" * 100, "<str>"),
    ]:
        assert f"(title={shown}, table=<TokenEmbedding, 8 parameters>, " in repr(
            OpenedModel(value, TokenEmbedding(2, 4))
        )
