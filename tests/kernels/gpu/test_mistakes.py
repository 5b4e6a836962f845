"""Mistakes on purpose: each is one change of a Triton kernel, and a law of these tests finds it."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from compiled_code import compiled_code
from far_blocks import assert_places_beyond_2_to_31_are_those_of_a_small_block, far_blocks
from interpreted import WrongAccessError
from kernel_paths import running_on
from logit_blocks import (
    OBJECTIVES,
    a_block,
    assert_infinite_logits_count_as_in_the_definition,
    assert_largest_logits_are_in_order,
    assert_little_more_than_the_logits_is_moved,
    assert_no_worse_than_the_definition,
    assert_stored_logits_are_finished,
)
from pending_rows import (
    assert_pending_updates_are_the_loop_over_the_skipped_steps,
    assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table,
    assert_training_is_no_worse,
)

from embedlayer.kernels.gpu.launch import launch_table

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


def infinities(name: str) -> None:
    """Logits of -inf."""
    with running_on("triton"):
        assert_infinite_logits_count_as_in_the_definition(OBJECTIVES[name], torch.float32)


def row_steps(rule: str) -> None:
    """Training of a row-sparse table against torch operators."""
    with running_on("triton"):
        assert_training_is_no_worse(rule, torch.float32, 5, 0)


def pending_rows() -> None:
    """Pending updates against the loop over the skipped steps."""
    with running_on("triton"):
        assert_pending_updates_are_the_loop_over_the_skipped_steps((0.9, 0.95), 0.1)


def far_rows() -> None:
    """Rows beyond 2^31 numbers."""
    with running_on("triton"):
        assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(rowwise=False)


def order() -> None:
    """Order of equal logits."""
    with running_on("triton"):
        assert_largest_logits_are_in_order(4)


def machine_code(module: str, name: str) -> None:
    """Machine code: registers, spills, and 128-bit access."""
    entry = launch_table(module)[name]
    variant = next(iter(entry.variants))
    code = compiled_code.__wrapped__(module, name, variant, torch.bfloat16, 90)
    assert not code.narrow_accesses(entry.wide)
    assert (code.stack, code.local, code.spills) == (0, 0, 0)
    assert code.registers <= entry.variants[variant].registers


Mistake = tuple[str, str, str, type[AssertionError], Callable[[], None] | str]

MISTAKES: dict[str, Mistake] = {
    "a mask with one token too many": (
        "softmax",
        "inside = (i < stop) & (c < tokens)[None, :]",
        "inside = (i < stop) & (c <= tokens)[None, :]",
        WrongAccessError,
        lambda: values("statistics"),
    ),
    "a mask with one row too many": (
        "softmax",
        "inside = (i < stop) & kept[None, :]\n        place",
        "inside = (i <= stop) & kept[None, :]\n        place",
        WrongAccessError,
        lambda: values("statistics"),
    ),
    "missing rows at the end": (
        "divergences",
        "stop = tl.minimum((part + 1) * PART, rows)",
        "stop = tl.minimum((part + 1) * PART, rows // ROWS * ROWS)",
        AssertionError,
        lambda: values("forward KL"),
    ),
    "a wrong offset of a part": (
        "divergences",
        "place = found + part * (5 * stride) + c",
        "place = found + part * (4 * stride) + c",
        WrongAccessError,
        lambda: values("reverse KL"),
    ),
    "an offset of 32 bits": (
        "softmax",
        "    stride = tokens.to(tl.int64)\n    part = tl.program_id(1)",
        "    stride = tokens\n    part = tl.program_id(1)",
        WrongAccessError,
        "softmax.statistics",
    ),
    "an offset of 32 bits in a store": (
        "divergences",
        "tl.store(s + i[:, None] * stride + c[None, :]",
        "tl.store(s + i[:, None] * tokens + c[None, :]",
        WrongAccessError,
        "divergences.divergence_gradient",
    ),
    "rows and tokens exchanged": (
        "largest",
        "tl.where(inside, i, 0) * stride + token",
        "tl.where(inside, i, 0) + token * stride",
        AssertionError,
        lambda: values("largest logits"),
    ),
    "no guard of -inf": (
        "softmax",
        'above = tl.where(x == float("-inf"), -1000.0, x - top)',
        "above = x - top",
        AssertionError,
        lambda: infinities("statistics"),
    ),
    "a forgotten bias": (
        "divergences",
        "x += tl.load(bias + i, mask=i < rows, other=0.0)[:, None]",
        "x += 0.0",
        AssertionError,
        lambda: values("Jensen-Shannon"),
    ),
    "a wrong slope of the soft cap": (
        "softmax",
        "1.0 - share * share",
        "1.0 - share",
        AssertionError,
        lambda: assert_stored_logits_are_finished(4.0, 0.25, None, torch.float32),
    ),
    "a result that is not written": (
        "softmax",
        "tl.store(selected + k * stride + c, tl.where(is_here, x, 0.0), mask=kept)",
        "tl.store(selected + k * stride + c, x, mask=is_here)",
        AssertionError,
        lambda: values("statistics"),
    ),
    "a target counted twice": (
        "softmax",
        "g += tl.where(i == requested, more, 0.0)",
        "g += tl.where(i == requested, more + more, 0.0)",
        AssertionError,
        lambda: values("statistics", requests=1),
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
        lambda: machine_code("softmax", "statistics"),
    ),
    "a row with several programs": (
        "rows",
        "return (n == 0) | (tl.load(rows + tl.maximum(n - 1, 0)) != row)",
        "return (n == 0) | (tl.load(rows + tl.maximum(n - 1, 0)) != row) | (row >= 0)",
        WrongAccessError,
        lambda: row_steps("two moments"),
    ),
    "gradients of another row": (
        "rows",
        "equal = tl.load(rows + some, mask=inside, other=-1) == row",
        "equal = tl.load(rows + some, mask=inside, other=-1) >= row",
        AssertionError,
        lambda: row_steps("Adagrad"),
    ),
    "a gradient of the padding row": (
        "rows",
        "_is_first(rows, n, row) & (row != drop)",
        "_is_first(rows, n, row)",
        AssertionError,
        lambda: row_steps("two moments"),
    ),
    "moments that are taken for those of the values' step": (
        "rows",
        "lag = (at - at_moments).to(tl.float64)",
        "lag = (at - at).to(tl.float64)",
        AssertionError,
        lambda: row_steps("two moments"),
    ),
    "a forgotten decay of a row": (
        "rows",
        "decay - m * total",
        "1.0 - m * total",
        AssertionError,
        lambda: row_steps("two moments"),
    ),
    "no decay of one second moment": (
        "rows",
        "second = second * fade2 + add2",
        "second = second + add2",
        AssertionError,
        lambda: row_steps("float32 first moment"),
    ),
    "a step that is not recorded": (
        "rows",
        "tl.store(value_steps + row, step)",
        "tl.store(value_steps + row, step - 1)",
        AssertionError,
        lambda: row_steps("two moments"),
    ),
    "a rule of two nodes for every mean square": (
        "rows",
        "if least > 0.0:",
        "if least > 1e38:",
        AssertionError,
        pending_rows,
    ),
    "an offset of 32 bits in a row": (
        "rows",
        "here = row * width + i",
        "here = row.to(tl.int32) * width + i",
        WrongAccessError,
        far_rows,
    ),
    "more columns than registers": (
        "rows",
        '{"TERMS": 128, "COLUMNS": 512}',
        '{"TERMS": 128, "COLUMNS": 4096}',
        AssertionError,
        lambda: machine_code("rows", "adamw_step"),
    ),
    "more rows than registers": (
        "divergences",
        '"ROWS": 4',
        '"ROWS": 64',
        AssertionError,
        lambda: machine_code("divergences", "divergence"),
    ),
}
"""Module, the code, the code with the mistake, the error, and the law that finds it; for `far_blocks` the label."""


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
    with patch.dict(sys.modules, {name: changed}), patch.dict(launch_table(module), changed.LAUNCHES):
        yield


@pytest.mark.parametrize("label", MISTAKES)
def test_a_law_finds_each_mistake(label, blocks, tmp_path) -> None:
    module, code, mistake, error, law = MISTAKES[label]

    def check() -> None:
        torch.manual_seed(0)
        if callable(law):
            law()
        else:
            assert_places_beyond_2_to_31_are_those_of_a_small_block(law, blocks)

    check()
    with mistaken(module, code, mistake, tmp_path), pytest.raises(error):
        check()
