"""Mistakes on purpose: a change of a Triton kernel of each kind that the interpreter or the compiler must find."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from compiled_code import compiled_code
from far_blocks import assert_places_beyond_2_to_31_are_those_of_a_small_block, far_blocks
from interpreted import WrongAccessError
from kernel_paths import running_on
from kernel_records import operation_of
from logit_blocks import (
    OBJECTIVES,
    a_block,
    assert_largest_logits_are_in_order,
    assert_little_more_than_the_logits_is_moved,
    assert_no_worse_than_the_definition,
)

pytestmark = [pytest.mark.usefixtures("triton"), pytest.mark.long]


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return far_blocks(tmp_path_factory.mktemp("sparse"))


def values(name: str, requests: int = 2, rows: int = 259, tokens: int = 17) -> None:
    """Values against the definition."""
    with running_on("triton"):
        assert_no_worse_than_the_definition(OBJECTIVES[name], a_block(rows, tokens, torch.bfloat16, requests=requests))


def order() -> None:
    """Order of equal logits."""
    with running_on("triton"):
        assert_largest_logits_are_in_order(4)


def machine_code(name: str) -> None:
    """Machine code: registers, spills, and 128-bit access."""
    operation = operation_of(name)
    entry = operation.gpu()[name]
    variant = next(iter(entry.variants))
    code = compiled_code.__wrapped__(operation, name, variant, torch.bfloat16, 90)
    assert not code.narrow_accesses(entry.wide)
    assert (code.stack, code.local, code.spills) == (0, 0, 0)
    assert code.registers <= entry.variants[variant].registers


Mistake = tuple[str, str, str, type[AssertionError], Callable[..., None] | str]

MISTAKES: dict[str, Mistake] = {
    "a mask with one token too many": (
        "softmax",
        "inside = (i < stop) & (c < tokens)[None, :]",
        "inside = (i < stop) & (c <= tokens)[None, :]",
        WrongAccessError,
        lambda: values("statistics"),
    ),
    "an offset of 32 bits": (
        "softmax",
        "    stride = tokens.to(tl.int64)\n    part = tl.program_id(1)",
        "    stride = tokens\n    part = tl.program_id(1)",
        WrongAccessError,
        "softmax.statistics",
    ),
    "rows and tokens exchanged": (
        "largest",
        "tl.where(inside, i, 0) * stride + token",
        "tl.where(inside, i, 0) + token * stride",
        AssertionError,
        lambda: values("largest logits"),
    ),
    "a result that is not written": (
        "softmax",
        "tl.store(selected + k * stride + c, tl.where(is_here, x, 0.0), mask=kept)",
        "tl.store(selected + k * stride + c, x, mask=is_here)",
        AssertionError,
        lambda: values("statistics"),
    ),
    "of equal logits the last": (
        "softmax",
        "order > best",
        "order >= best",
        AssertionError,
        order,
    ),
    "programs that write to one place": (
        "divergences",
        "to = row_sums + tl.program_id(0) * tl.cast(rows, tl.int64) + i",
        "to = row_sums + i",
        WrongAccessError,
        lambda: values("forward KL", rows=20, tokens=264),
    ),
    "a missing barrier": (
        "divergences",
        "        tl.store(s + i[:, None] * stride + c[None, :], g.to(s.dtype.element_ty), mask=inside)\n",
        "        tl.store(s + i[:, None] * stride + c[None, :], g.to(s.dtype.element_ty), mask=inside)\n"
        "        tl.store(s + i[:, None] * stride + c[None, :], tl.load(s + i[:, None] * stride + c[None, :],"
        " mask=inside), mask=inside)\n",
        WrongAccessError,
        lambda: values("forward KL"),
    ),
    "logits read twice": (
        "softmax",
        "        x = tl.load(z + i * stride + c[None, :], mask=inside, other=0.0)\n",
        2 * "        x = tl.load(z + i * stride + c[None, :], mask=inside, other=0.0)\n",
        AssertionError,
        lambda: assert_little_more_than_the_logits_is_moved("statistics"),
    ),
    "a mask that the compiler cannot divide by 8": (
        "softmax",
        "inside = (i < stop) & (c < tokens)[None, :]",
        "inside = (i < stop) & (c < tokens - 1 + (c >= 0))[None, :]",
        AssertionError,
        lambda: machine_code("statistics"),
    ),
    "more columns than registers": (
        "rows",
        '{"TERMS": 128, "COLUMNS": 512}',
        '{"TERMS": 128, "COLUMNS": 4096}',
        AssertionError,
        lambda: machine_code("adamw_step"),
    ),
}
"""Module, the code, the code with the mistake, the error, and the law that finds it. A law with an argument gets the
result of `far_blocks`; a text is the label of what is compared there."""


@contextmanager
def mistaken(module: str, code: str, mistake: str, folder: Path) -> Iterator[None]:
    """Replace a part of the code of a module of kernels in a `with` block."""
    name = f"embedlayer.kernels.gpu.{module}"
    source = Path(str(import_module(name).__file__)).read_text(encoding="utf-8")
    assert code in source
    path = folder / f"{module}.py"
    path.write_text(source.replace(code, mistake), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    with patch.dict(sys.modules, {name: changed}), patch.dict(import_module(name).LAUNCHES, changed.LAUNCHES):
        yield


@pytest.mark.parametrize("label", MISTAKES)
def test_a_law_finds_each_mistake(label, blocks, tmp_path) -> None:
    module, code, mistake, error, law = MISTAKES[label]

    def check() -> None:
        torch.manual_seed(0)
        if callable(law):
            law(*[blocks for each in signature(law).parameters.values() if each.default is each.empty])
        else:
            assert_places_beyond_2_to_31_are_those_of_a_small_block(law, blocks)

    check()
    with mistaken(module, code, mistake, tmp_path), pytest.raises(error):
        check()
