"""Mistakes on purpose: each is one change of a Triton kernel, and a law of these tests finds it."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
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
from looked_up_rows import (
    assert_no_worse_than_the_definition as assert_look_up_is_no_worse,
)
from looked_up_rows import (
    assert_rows_beyond_2_to_31_are_read,
    assert_the_first_is_recorded,
)
from pending_rows import (
    assert_pending_updates_are_the_loop_over_the_skipped_steps,
    assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table,
    assert_training_is_no_worse,
)
from quantised_tables import (
    assert_logits_are_no_worse_than_the_products,
    assert_rows_are_those_of_the_definition,
    assert_rows_beyond_2_to_31_are_those_of_a_small_table,
    assert_stored_bytes_are_read_once,
    assert_the_first_bad_id_is_recorded,
)
from rotary_schemes import (
    assert_far_heads_are_rotated_as_near_ones,
    assert_little_more_than_queries_and_keys_is_moved,
    assert_rotation_is_no_worse_than_by_operators,
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


def stored_logits() -> None:
    """Scale and soft cap of stored logits, and their gradients."""
    with running_on("triton"):
        assert_stored_logits_are_finished(4.0, 0.25, None, torch.float32)


def row_steps(rule: str) -> None:
    """Training of a row-sparse table against torch operators."""
    with running_on("triton"):
        assert_training_is_no_worse(rule, torch.float32, 5, 0)


def pending_rows() -> None:
    """Pending updates against the loop over the skipped steps."""
    with running_on("triton"):
        assert_pending_updates_are_the_loop_over_the_skipped_steps((0.9, 0.95), 0.1)


def far_pending_rows() -> None:
    """Rows beyond 2^31 numbers."""
    with running_on("triton"):
        assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(rowwise=False)


def order() -> None:
    """Order of equal logits."""
    with running_on("triton"):
        assert_largest_logits_are_in_order(4)


def look_up(added: str = "none", dropout: float = 0.0, width: int = 8) -> None:
    """Values, gradients and records of a look-up."""
    with running_on("triton"):
        assert_look_up_is_no_worse(torch.float32, added, 2.0, dropout, (3, 5), width)


def record() -> None:
    """Record of the first bad index."""
    with running_on("triton"):
        assert_the_first_is_recorded([5, 517, 518], torch.int64)


def far_rows() -> None:
    """Rows beyond 2^31 numbers."""
    with TemporaryDirectory() as folder:
        assert_rows_beyond_2_to_31_are_read(Path(folder))


def rows(kind: tuple[int, int | str | None], width: int = 96) -> None:
    """Numbers of quantised rows."""
    assert_rows_are_those_of_the_definition("triton", kind, width, torch.float32)


def products(kind: tuple[int, int | str | None], width: int = 96) -> None:
    """Products with quantised rows."""
    assert_logits_are_no_worse_than_the_products("triton", kind, width, torch.float32)


def far_quantised_rows() -> None:
    """Quantised rows beyond 2^31 bytes."""
    with TemporaryDirectory() as folder:
        assert_rows_beyond_2_to_31_are_those_of_a_small_table(Path(folder))


def machine_code(module: str, name: str) -> None:
    """Machine code: registers, spills, and 128-bit access."""
    entry = launch_table(module)[name]
    variant = next(iter(entry.variants))
    code = compiled_code.__wrapped__(module, name, variant, torch.bfloat16, 90)
    assert not code.narrow_accesses(entry.wide)
    assert (code.stack, code.local, code.spills) == (0, 0, 0)
    assert code.registers <= entry.variants[variant].registers


def rotation(name: str, positions: str = "each sequence") -> None:
    """Rotated queries and keys against torch operators."""
    with running_on("triton"):
        assert_rotation_is_no_worse_than_by_operators(name, torch.float32, positions=positions)


Mistake = tuple[str, str, str, type[AssertionError], Callable[..., None] | str]

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
        stored_logits,
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
    "a record by every bad index": (
        "index_check",
        "mask=(place >= first) & (place < end)",
        "mask=place < end",
        WrongAccessError,
        record,
    ),
    "a record that is overwritten": (
        "index_check",
        "other=0) < 0:",
        "other=0) < 2**62:",
        AssertionError,
        record,
    ),
    "a row for a bad ID": (
        "input",
        "mask=inside & (is_bad == 0), other=0.0)",
        "mask=inside, other=0.0)",
        AssertionError,
        look_up,
    ),
    "a gradient for a bad ID": (
        "input",
        "tl.store(kept_ids + n, tl.where(is_bad, ignored, row))",
        "tl.store(kept_ids + n, tl.where(is_bad, 0, row))",
        AssertionError,
        look_up,
    ),
    "positions without their offset": (
        "input",
        "place = tl.load(places + at) + places_offset",
        "place = tl.load(places + at)",
        AssertionError,
        lambda: look_up("positions (B, T)"),
    ),
    "random bits of another token": (
        "input",
        "word = n * ((width + 3) // 4)",
        "word = n * (width // 4)",
        AssertionError,
        lambda: look_up(dropout=0.25, width=7),
    ),
    "an offset of 32 bits in a look-up": (
        "input",
        "x + tl.where(is_bad, 0, row) * stride + i",
        "x + tl.where(is_bad, 0, row).to(tl.int32) * width + i",
        WrongAccessError,
        far_rows,
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
        far_pending_rows,
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
    "a token too many": (
        "rotary",
        "is_token = (n < tokens)",
        "is_token = (n <= tokens)",
        WrongAccessError,
        lambda: rotation("plain"),
    ),
    "a pair too many": (
        "rotary",
        "mask = is_token & (pair < PAIRS)",
        "mask = is_token & (pair <= PAIRS)",
        WrongAccessError,
        lambda: rotation("plain"),
    ),
    "an offset of 32 bits between heads": (
        "rotary",
        "x_at = at + tl.cast(head, tl.int64) * x_head * UNIT",
        "x_at = at + head * x_head * UNIT",
        WrongAccessError,
        lambda blocks: assert_far_heads_are_rotated_as_near_ones(False, blocks),
    ),
    "an offset of 32 bits between tokens": (
        "rotary",
        "(n % length).to(tl.int64)[:, None]",
        "(n % length)[:, None]",
        WrongAccessError,
        lambda blocks: assert_far_heads_are_rotated_as_near_ones(True, blocks),
    ),
    "a sine of the wrong sign": (
        "rotary",
        "c_b, s_b = c, -s",
        "c_b, s_b = c, s",
        AssertionError,
        lambda: rotation("plain"),
    ),
    "gradients that are rotated forward": (
        "rotary",
        "s, s_b = s_b, s",
        "s, s_b = s, s_b",
        AssertionError,
        lambda: rotation("alternating"),
    ),
    "one angle for both channels": (
        "rotary",
        "if not OWN:",
        "if True:",
        AssertionError,
        lambda: rotation("channels", "each axis"),
    ),
    "pairs over all channels": (
        "rotary",
        "pair + pair // DISTANCE * DISTANCE",
        "pair",
        AssertionError,
        lambda: rotation("axial, within"),
    ),
    "keys with the factor of queries": (
        "rotary",
        "k_out_token, cos, sin, None,",
        "k_out_token, cos, sin, factor,",
        AssertionError,
        lambda: rotation("query scaling"),
    ),
    "channels that are not copied": (
        "rotary",
        "is_rest = is_token & (other < WIDTH - 2 * PAIRS)",
        "is_rest = is_token & (other < WIDTH - 2 * PAIRS - 1)",
        AssertionError,
        lambda: rotation("reversed, trailing"),
    ),
    "the angles of the first sequence": (
        "rotary",
        "row = sequence * angle_length + t",
        "row = sequence * 0 + t",
        AssertionError,
        lambda: rotation("plain"),
    ),
    "positions of the first axis": (
        "rotary",
        "positions + of_axis * tokens + n",
        "positions + of_axis * 0 + n",
        AssertionError,
        lambda: rotation("chunked", "each axis"),
    ),
    "a quarter of a rotation with the wrong sign": (
        "rotary",
        "((quarter + 1) & 2) == 2",
        "(quarter & 2) == 2",
        AssertionError,
        lambda: rotation("plain"),
    ),
    "queries read twice": (
        "rotary",
        "        a, b = _pairs(x, x_at + FIRST, channel, mask, DISTANCE)\n",
        2 * "        a, b = _pairs(x, x_at + FIRST, channel, mask, DISTANCE)\n",
        AssertionError,
        lambda: assert_little_more_than_queries_and_keys_is_moved(False),
    ),
    "strides that the compiler cannot divide by 8": (
        "rotary",
        "x_at = at + tl.cast(head, tl.int64) * x_head * UNIT",
        "x_at = at + tl.cast(head, tl.int64) * x_head",
        AssertionError,
        lambda: machine_code("rotary", "rotate"),
    ),
    "codes of a byte exchanged": (
        "quantized",
        "place // 16 if BLOCKS else place % 2",
        "place // 16 if BLOCKS else 1 - place % 2",
        AssertionError,
        lambda: rows((4, 32)),
    ),
    "codes of the wrong columns": (
        "quantized",
        "place = word * WORD + j // 2 + j % 2 * 16",
        "place = word * WORD + j % 2 + j // 2 * 16",
        AssertionError,
        lambda: products((4, "gguf")),
    ),
    "a step of the group before": (
        "quantized",
        "header = packed + i.to(tl.int64) * group_bytes + code_bytes",
        "header = packed + tl.maximum(i - 1, 0).to(tl.int64) * group_bytes + code_bytes",
        AssertionError,
        lambda: products((8, None)),
    ),
    "a forgotten scale of the row": (
        "quantized",
        "total *= tl.load(row_scale + i, mask=i < rows, other=0.0)",
        "total *= 1.0",
        AssertionError,
        lambda: products((4, 32)),
    ),
    "columns that no row has": (
        "quantized",
        "has_column = (column < width) & (place < group_size)",
        "has_column = column <= width",
        AssertionError,
        lambda: products((8, 5), 33),
    ),
    "an ID that is not checked": (
        "quantized",
        "is_bad = (row < 0) | (row >= rows)",
        "is_bad = row < 0",
        WrongAccessError,
        lambda: assert_the_first_bad_id_is_recorded("triton", (8, "gguf")),
    ),
    "a bad ID that is recorded by no program": (
        "quantized",
        "record_first_bad(ids, record, n, n + 1, rows",
        "record_first_bad(ids, record, n + 1, n + 1, rows",
        AssertionError,
        lambda: assert_the_first_bad_id_is_recorded("triton", (8, "gguf")),
    ),
    "an offset of 32 bits in a quantised look-up": (
        "quantized",
        "at = packed + row * (groups * group_bytes)",
        "at = packed + row.to(tl.int32) * (groups * group_bytes)",
        WrongAccessError,
        far_quantised_rows,
    ),
    "an offset of 32 bits of a row": (
        "quantized",
        "row = packed + (i.to(tl.int64) * (groups * group_bytes))",
        "row = packed + (i * (groups * group_bytes))",
        WrongAccessError,
        far_quantised_rows,
    ),
    "stored bytes read twice": (
        "quantized",
        "            sums += step * product\n",
        "            sums += _number(header, stored, SIZE, UNIT) * product\n",
        AssertionError,
        lambda: assert_stored_bytes_are_read_once((4, 32)),
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
    with patch.dict(sys.modules, {name: changed}), patch.dict(launch_table(module), changed.LAUNCHES):
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
