"""Laws of all records of stored formats. The cases are built by the libraries that define the formats."""

from dataclasses import replace

import pytest
import torch
from stored_cases import CASE_NAMES, CASES, NAME, OTHER_ROWS, StoredCase, built, read, rows_of
from torch import Tensor

from embedlayer.core.class_identifiers import KINDS
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.recognition import FORMATS, recognise
from embedlayer.formats.stored import StoredRows
from embedlayer.saving import build, describe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


ONE_OF_EACH = [
    "MLX 4 bits, groups of 32, bfloat16",
    "MLX nvfp4",
    "pack-quantized 4 bits, group, asymmetric, bfloat16",
    "pack-quantized 3 bits, width 50",
    "int-quantized channel, asymmetric, float32",
    "float-quantized tensor, float32",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
    "ModelOpt NVFP4",
    "ModelOpt FP8",
    "ModelOpt FP8 by row",
    "Gemma 4 bits",
    "Gemma 8 bits, head",
    "torchao int8",
    "torchao 4 bits, bfloat16",
]


@pytest.fixture(params=CASE_NAMES)
def case(request: pytest.FixtureRequest) -> StoredCase:
    return built(request.param)


@pytest.fixture(params=ONE_OF_EACH)
def one_of_each(request: pytest.FixtureRequest) -> StoredCase:
    return built(request.param)


@pytest.fixture(params=[*ONE_OF_EACH, *OTHER_ROWS])
def stored(request: pytest.FixtureRequest) -> StoredRows:
    """Stored rows of every format: of other libraries, of our own, and blocks of GGUF."""
    return rows_of(request.param)


def have_same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))


def test_rows_are_those_of_the_library_bit_for_bit(case: StoredCase) -> None:
    rows = read(case)
    assert rows.shape == case.rows.shape
    assert rows.format.dtype == case.rows.dtype
    for dtype in DTYPES:
        own, expected = rows.dequantise(dtype), case.rows_in(dtype)
        if "load_in_4bit" in case.settings:  # the sign of its zeros depends on the processor
            own, expected = own + 0.0, expected + 0.0
        assert have_same_bits(own, expected)


def test_any_rows_are_dequantised_alone(stored: StoredRows) -> None:
    ids = torch.tensor([5, 70, 5, 0])
    for dtype in DTYPES:
        every = stored.dequantise(dtype)
        assert have_same_bits(stored.take(ids).dequantise(dtype), every[ids])
        assert have_same_bits(stored.take(slice(7, 9)).dequantise(dtype), every[7:9])
        assert stored.take(ids[:0]).dequantise(dtype).shape == (0, stored.shape[1])


def test_codes_and_scales_are_not_copied(one_of_each: StoredCase) -> None:
    rows = read(one_of_each)
    codec = rows.format.codec(rows.rows, rows.shared, torch.float32)
    assert codec is not None
    stored = {tensor.untyped_storage().data_ptr() for tensor in one_of_each.tensors.values()}
    assert codec.codes.untyped_storage().data_ptr() in stored
    assert codec.scale.untyped_storage().data_ptr() in stored


def test_one_format_recognises_the_tensors_of_a_module(one_of_each: StoredCase) -> None:
    assert sum(record.recognise(one_of_each.module) is not None for record in FORMATS) == 1


def test_a_dense_module_is_of_no_format() -> None:
    dense = StoredCase({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, {}, torch.zeros(0))
    assert recognise(dense.module) is None


def test_a_record_is_rebuilt_from_its_description(stored: StoredRows) -> None:
    assert build(describe(stored.format)) == stored.format


def test_sizes_that_no_file_has_are_refused(stored: StoredRows) -> None:
    for name, value in stored.format.config.items():
        damaged: tuple[object, ...] = ("F8_E5M2",) if isinstance(value, str) else (-1, 0, 1 << 50)
        for each in () if isinstance(value, bool) else damaged:
            if each != 0 or name not in ("group_size", "layout_index"):
                with pytest.raises((SizeError, CheckpointError), match=f"{name}|embed_dim|{each}"):
                    replace(stored.format, **{name: each})


def test_every_format_has_an_identifier_and_a_case() -> None:
    assert {f"{record.__module__}:{record.__qualname__}" for record in FORMATS} <= set(KINDS.values())


def test_parts_are_described_as_they_are_read(stored: StoredRows) -> None:
    for name, part in stored.format.row_parts.items():
        assert (stored.rows[name].dtype, stored.rows[name].shape) == (part.dtype, (stored.shape[0], *part.shape))
    for name, part in stored.format.shared_parts.items():
        assert (stored.shared[name].dtype, stored.shared[name].shape) == (part.dtype, part.shape)


def parts(case: StoredCase) -> list[str]:
    """Return the names of the tensors that are needed to dequantise rows."""
    record = read(case).format
    return [*record.row_parts, *record.shared_parts]


def assert_refused(case: StoredCase, *names: str) -> None:
    """Reading is one error that names the file and one of the tensors."""
    with pytest.raises(CheckpointError) as refusal:
        read(case)
    assert any(f"model.safetensors: {NAME}.{name} " in str(refusal.value) for name in names), str(refusal.value)


def test_a_missing_tensor_is_named(one_of_each: StoredCase) -> None:
    for name in parts(one_of_each)[1:]:
        if name != "weight_zero_point":  # without it the configuration contradicts the tensors
            assert_refused(one_of_each.changed(**{name: None}), name)


def test_a_tensor_that_is_cut_short_is_named(one_of_each: StoredCase) -> None:
    record, names = read(one_of_each).format, parts(one_of_each)
    has_groups = getattr(record, "group_size", 1) not in (0, record.embed_dim)
    for name in names:
        tensor = one_of_each.tensors[name]
        if tensor.dim() == 0:
            continue
        assert_refused(one_of_each.changed(**{name: tensor[:0]}), *names, "weight_shape")
        if name in record.row_parts and len(record.row_parts) > 1:
            assert_refused(one_of_each.changed(**{name: tensor[:-1].contiguous()}), *names, "weight_shape")
        if tensor.shape[-1] > 1 and has_groups:  # else the codes tell the width
            assert_refused(one_of_each.changed(**{name: tensor[:, :-1].contiguous()}), *names)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_named(one_of_each: StoredCase, number: float) -> None:
    for name in {*read(one_of_each).format.scales} & {*one_of_each.tensors}:
        tensor = one_of_each.tensors[name].clone()
        if tensor.dtype == torch.uint8 or tensor.itemsize == 1:
            is_e4m3 = tensor.dtype == torch.float8_e4m3fn or one_of_each.settings.get("mode") == "nvfp4"
            tensor.view(torch.uint8).view(-1)[-1] = 0x7F if is_e4m3 else 0xFF
        else:
            tensor.view(-1)[-1] = number
        assert_refused(one_of_each.changed(**{name: tensor}), name)


def test_a_tensor_of_another_type_is_named(one_of_each: StoredCase) -> None:
    for name in parts(one_of_each)[1:]:
        assert_refused(one_of_each.changed(**{name: one_of_each.tensors[name].to(torch.float64)}), name)


def test_every_format_has_a_case() -> None:
    """Blocks of GGUF files are no type of safetensors: `tests/checkpoints/test_gguf.py` reads them."""
    assert {type(read(CASES[name]()).format) for name in CASES} == {*FORMATS} - {GGUFRows}
