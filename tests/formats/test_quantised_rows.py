"""Laws of all records of stored formats that quantise rows, and of the tensors that they write.

The cases are built by the libraries that define the formats, and so are the bytes of new rows.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from stored_cases import CASE_NAMES, NAME, OTHER_ROWS, StoredCase, built, read, rows_of
from torch import Tensor

from embedlayer import QuantizedEmbedding
from embedlayer.core.errors import CheckpointError
from embedlayer.formats import GGUFBlocks
from embedlayer.formats.quantized import QuantizedRows
from embedlayer.formats.stored import StoredModule, StoredRows

NEW_FILE = StoredModule(NAME, {}, {}.__getitem__, {}, {})


@pytest.fixture(params=CASE_NAMES)
def case(request: pytest.FixtureRequest) -> StoredCase:
    return built(request.param)


@pytest.fixture(params=[*CASE_NAMES, *OTHER_ROWS])
def stored(request: pytest.FixtureRequest) -> StoredRows:
    """Stored rows of every format that quantises: of other libraries, of our own, and blocks of GGUF."""
    rows = rows_of(request.param)
    if not rows.format.can_quantise:
        with pytest.raises(CheckpointError, match="are not quantised to"):
            rows.quantised(torch.zeros(1, rows.shape[1]))
        pytest.skip("no function quantises to this format")
    return rows


def new_rows(stored: StoredRows) -> Tensor:
    """Return new rows: random, zero, constant, tiny, of one sign, with an outlier or ties; large if scales may be."""
    count = 43 if stored.format.row_multiple == 1 else 96  # a head of GPTQ has more rows than columns
    rows = 0.05 * torch.randn(count, stored.shape[1], generator=torch.Generator().manual_seed(1))
    rows[3], rows[4], rows[5], rows[6] = 0.0, -0.125, 1e-7 * rows[6], 0.002 * rows[7]
    rows[7:9], rows[9:11], rows[11, 5] = rows[7:9].abs(), -rows[9:11].abs(), 0.2
    rows[12] *= torch.where(torch.arange(stored.shape[1]) % 5 == 0, 1.0, 0.0)
    rows[16:24] = (torch.arange(stored.shape[1]) % 49 - 24) / 2.0 ** torch.arange(4, 12).unsqueeze(1)
    rows[24:32] = torch.randint(-96, 97, (8, stored.shape[1]), generator=torch.Generator().manual_seed(3)) / 64
    if stored.format.value_range(stored.shared) is None:
        rows[13], rows[14], rows[15] = 900 * rows[13], 1e-5, torch.linspace(-1000, 1000, stored.shape[1])
    return rows


def limit(stored: StoredRows) -> float:
    """Return a size of numbers that rows can have with shared scales; 1 if each row has its own."""
    span = stored.format.value_range(stored.shared)
    return 1.0 if span is None else min(-span[0], span[1], 1.0)


def have_same_bits(left: Tensor, right: Tensor) -> bool:
    left, right = left.contiguous(), right.contiguous()
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def assert_same_tensors(actual: StoredRows, wanted: StoredRows) -> None:
    assert actual.format == wanted.format
    for name, part in {**wanted.rows, **wanted.shared}.items():
        assert have_same_bits({**actual.rows, **actual.shared}[name], part), name


def row_dtypes(stored: StoredRows) -> Iterator[torch.dtype]:
    """Return the data types of a model whose rows the library stores so: those of the scales, if they tell it."""
    yield from {stored.format.dtype} if "scale_dtype" in stored.format.config else (torch.float32, torch.bfloat16)


def test_new_rows_have_the_bytes_of_the_library(case: StoredCase) -> None:
    stored = read(case)
    if case.quantise is None:
        pytest.skip("no function of the library quantises to this layout")
    for dtype in row_dtypes(stored):
        values = new_rows(stored).to(dtype)
        tensors = case.quantise(values)
        actual = stored.quantised(values)
        metadata = {**case.metadata, **stored.format.metadata(actual, case.module)}
        assert_same_tensors(actual, read(case.changed(**tensors)._replace(metadata=metadata)))
        written = stored.format.write(actual, case.module)
        assert all(have_same_bits(written[name], tensors[name]) for name in tensors)


def test_reading_and_writing_keep_every_byte(case: StoredCase) -> None:
    stored = read(case)
    multiple = stored.format.row_multiple
    for count in (7, 8, 33, 64, stored.shape[0]):
        few = stored.take(torch.arange(count))
        for module in (case.module, NEW_FILE):
            if count % multiple:
                with pytest.raises(CheckpointError, match=f"cannot have {count} rows.*pad_to_multiple_of={multiple}"):
                    stored.format.write(few, module)
            elif multiple == 1 or count >= stored.shape[1]:  # a head of GPTQ has more rows than columns
                tensors = stored.format.write(few, module)
                metadata = {**case.metadata, **stored.format.metadata(few, case.module)}
                assert_same_tensors(read(case.changed(**tensors)._replace(metadata=metadata)), few)
                if count == stored.shape[0] and module is not NEW_FILE:
                    assert metadata == case.metadata
                    assert all(have_same_bits(tensors[name], case.tensors[name]) for name in tensors)


def test_rows_are_their_bytes(stored: StoredRows) -> None:
    few = stored.take(torch.tensor([5, 70, 5]))
    assert few.row_bytes.dtype == torch.uint8
    assert_same_tensors(stored.of_bytes(few.row_bytes), few)


def test_quantising_again_costs_no_more_than_quantising(stored: StoredRows) -> None:
    if stored.format.config.get("bits") == 1 and stored.format.config.get("is_symmetric"):
        pytest.skip("compressed-tensors rounds to -1 and 0 with a scale of twice the largest number")
    values = limit(stored) * 0.2 * torch.randn(64, stored.shape[1], generator=torch.Generator().manual_seed(2)).tanh()
    once = stored.quantised(values)
    numbers = once.dequantise(torch.float32)
    again = stored.quantised(numbers).dequantise(torch.float32)
    assert (again - numbers).norm() <= 1.5 * (numbers - values).norm()
    assert (numbers - values).norm() < values.norm()
    assert {name: part.dtype for name, part in once.rows.items()} == {
        name: part.dtype for name, part in stored.rows.items()
    }


def test_no_rows_are_quantised_to_no_rows(stored: StoredRows) -> None:
    none = stored.quantised(torch.zeros(0, stored.shape[1]))
    assert_same_tensors(none, stored.take(slice(0, 0)))


def test_a_row_that_the_shared_scale_clips_is_refused_with_the_factor(stored: StoredRows) -> None:
    span = stored.format.value_range(stored.shared)
    values = torch.zeros(3, stored.shape[1])
    if span is not None:
        for end in span:
            values[1, 2] = 0.999 * end
            clipped = stored.quantised(values).dequantise(torch.float32)[1, 2]
            assert abs(clipped - values[1, 2]) <= 0.15 * abs(end)
            values[1, 2] = 2.5 * end
            with pytest.raises(CheckpointError, match=r"is 2\.5 times the largest one .* Make the new rows smaller"):
                stored.quantised(values)
    values[1, 2] = torch.inf
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        stored.quantised(values)


def test_a_row_of_the_largest_numbers_is_refused_or_stored(stored: StoredRows) -> None:
    values = torch.full((2, stored.shape[1]), 3e38)
    values[:, ::2] *= -1
    with contextlib.suppress(CheckpointError):
        numbers = stored.quantised(values).dequantise(torch.float32)
        assert numbers.isfinite().all()
        assert (numbers - values).abs().max() <= 0.5 * 3e38


@pytest.mark.parametrize("name", [name for name in OTHER_ROWS if not name.startswith("GGUF")])
def test_our_own_rows_are_those_of_from_table(name: str) -> None:
    stored = OTHER_ROWS[name]()
    assert isinstance(stored.format, QuantizedRows)
    values, form = new_rows(stored), stored.format.row_format
    group_size = None if name in ("int8", "int4") else form.group_size
    layout = form.layout() if isinstance(form.layout(), GGUFBlocks) else None
    table = QuantizedEmbedding.from_table(values, form.bits, group_size=group_size, layout=layout)
    assert_same_tensors(stored.quantised(values), table.stored_rows)
