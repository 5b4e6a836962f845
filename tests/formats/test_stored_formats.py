"""Laws of all formats of stored rows. The cases are built by the libraries that define the formats."""

import contextlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from stored_cases import CASE_NAMES, NAME, OTHER_ROWS, StoredCase, built, load, read, rows_of, write
from stored_tables import table_of
from torch import Tensor

import embedlayer as el
from embedlayer.formats import GGUFBlocks
from embedlayer.formats.recognition import FORMATS

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
OTHERS = [  # the tensors of these have no row per token
    "GPTQ 4 bits, float16",
    "AWQ",
    "bitsandbytes int8",
    "bitsandbytes nf4, bfloat16",
]


def new_rows(stored: Any) -> Tensor:
    """Return new rows: random, zero, constant, tiny, of one sign, with an outlier or ties; large if scales may be."""
    rows = 0.05 * torch.randn(stored.shape, generator=torch.Generator().manual_seed(1))
    rows[3], rows[4], rows[5], rows[6] = 0.0, -0.125, 1e-7 * rows[6], 0.002 * rows[7]
    rows[7:9], rows[9:11], rows[11, 5] = rows[7:9].abs(), -rows[9:11].abs(), 0.2
    rows[12] *= torch.where(torch.arange(stored.shape[1]) % 5 == 0, 1.0, 0.0)
    rows[16:24] = (torch.arange(stored.shape[1]) % 49 - 24) / 2.0 ** torch.arange(4, 12).unsqueeze(1)
    rows[24:32] = torch.randint(-96, 97, (8, stored.shape[1]), generator=torch.Generator().manual_seed(3)) / 64
    if stored.format.value_range(stored.shared) is None:
        rows[13], rows[14], rows[15] = 900 * rows[13], 1e-5, torch.linspace(-1000, 1000, stored.shape[1])
    return rows


def have_same_bits(left: Tensor, right: Tensor) -> bool:
    left, right = left.contiguous(), right.contiguous()
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def assert_same_tensors(actual: Any, wanted: Any) -> None:
    assert actual.format == wanted.format
    for name, part in {**wanted.rows, **wanted.shared}.items():
        assert have_same_bits({**actual.rows, **actual.shared}[name], part), name


@pytest.mark.parametrize("name", CASE_NAMES)
def test_rows_and_new_rows_have_the_bits_of_the_library(name: str) -> None:
    case = built(name)
    stored = read(case)
    assert stored.shape == case.rows.shape
    assert stored.format.dtype == case.rows.dtype
    for dtype in DTYPES:
        expected = case.rows_in(dtype)
        for own in (stored.dequantise(dtype), load(case).to(dtype).rows(0, 999)):  # plain operators and kernels
            if "load_in_4bit" in case.settings:  # the sign of its zeros depends on the processor
                own, expected = own + 0.0, expected + 0.0
            assert have_same_bits(own, expected)
    if case.quantise is not None:
        # the data type of a model whose rows the library stores so: that of the scales, if they tell it
        of_scales = "scale_dtype" in stored.format.config
        for dtype in (stored.format.dtype,) if of_scales else (torch.float32, torch.bfloat16):
            values = new_rows(stored).to(dtype)
            assert_same_tensors(stored.quantised(values), read(case.changed(**case.quantise(values))))


@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_written_file_keeps_every_byte(tmp_path, name: str) -> None:
    case = built(name)
    write(tmp_path / "0", case)
    layer, count, stored = el.load(tmp_path / "0"), len(case.rows), read(case)
    multiple = stored.format.row_multiple
    few = 33 if multiple == 1 else 72  # a head of GPTQ has more rows than columns
    for step, kept in enumerate(([*range(count)][::-1], [*range(count)][::-1], [*range(few)])):
        el.vocab.edit_vocabulary(layer, keep=kept, order=kept)
        if len(kept) % multiple:
            with pytest.raises(el.CheckpointError, match=f"no {len(kept)} rows.*to_multiple_of={multiple}"):
                layer.write_into(tmp_path / f"{step}", tmp_path / f"{step + 1}")
            return
        layer.write_into(tmp_path / f"{step}", tmp_path / f"{step + 1}")
        stored = stored.take(torch.tensor(kept))
        assert_same_tensors(el.load(tmp_path / f"{step + 1}").table.stored_rows, stored)
    first, again = (tmp_path / step / "model.safetensors" for step in ("0", "2"))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", [*CASE_NAMES, *OTHER_ROWS])
def test_rows_are_quantised_in_the_range_of_their_scales(name: str) -> None:
    stored = rows_of(name)
    width = stored.shape[1]
    if not stored.format.can_quantise:
        with pytest.raises(el.CheckpointError, match="are not quantised to"):
            stored.quantised(torch.zeros(1, width))
        return
    assert_same_tensors(stored.quantised(torch.zeros(0, width)), stored.take(slice(0, 0)))

    span = stored.format.value_range(stored.shared)
    limit = 1.0 if span is None else min(-span[0], span[1], 1.0)
    values = limit * 0.2 * torch.randn(64, width, generator=torch.Generator().manual_seed(2)).tanh()
    once = stored.quantised(values)
    numbers = once.dequantise(torch.float32)
    again = stored.quantised(numbers).dequantise(torch.float32)
    if (
        "1 bits, " not in name or "asymmetric" in name
    ):  # else they are -1 and 0 with a scale of twice the largest number
        assert (again - numbers).norm() <= 1.5 * (numbers - values).norm()
        assert (numbers - values).norm() < values.norm()
    assert [part.dtype for part in once.rows.values()] == [part.dtype for part in stored.rows.values()]

    values = torch.zeros(3, width)
    for end in span or ():
        values[1, 2] = 0.999 * end
        clipped = stored.quantised(values).dequantise(torch.float32)[1, 2]
        assert abs(clipped - values[1, 2]) <= 0.15 * abs(end)
        values[1, 2] = 2.5 * end
        with pytest.raises(el.CheckpointError, match=r"is 2\.5 times the largest one .* Make the new rows smaller"):
            stored.quantised(values)
    values[1, 2] = torch.inf
    with pytest.raises(el.CheckpointError, match="NaN or infinity"):
        stored.quantised(values)
    values = torch.full((2, width), 3e38)
    values[:, ::2] *= -1
    with contextlib.suppress(el.CheckpointError):
        numbers = stored.quantised(values).dequantise(torch.float32)
        assert numbers.isfinite().all()
        assert (numbers - values).abs().max() <= 0.5 * 3e38


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *OTHERS, *OTHER_ROWS])
def test_rows_are_read_alone_and_a_saved_table_keeps_their_format(tmp_path, name: str) -> None:
    stored = rows_of(name)
    ids = torch.tensor([5, 70, 5, 0])
    for dtype in DTYPES:
        every = stored.dequantise(dtype)
        assert have_same_bits(stored.take(ids).dequantise(dtype), every[ids])
        assert have_same_bits(stored.take(slice(7, 9)).dequantise(dtype), every[7:9])
        assert stored.take(ids[:0]).dequantise(dtype).shape == (0, stored.shape[1])
    few = stored.take(ids)
    assert few.row_bytes.dtype == torch.uint8
    assert_same_tensors(stored.of_bytes(few.row_bytes), few)
    for part_name, part in stored.format.row_parts.items():
        part_shape = (stored.shape[0], *part.shape)
        assert (stored.rows[part_name].dtype, stored.rows[part_name].shape) == (part.dtype, part_shape)
    for part_name, part in stored.format.shared_parts.items():
        assert (stored.shared[part_name].dtype, stored.shared[part_name].shape) == (part.dtype, part.shape)

    codec = stored.codec(torch.float32)
    if name not in OTHER_ROWS:
        places = {part.untyped_storage().data_ptr() for part in (*stored.rows.values(), *stored.shared.values())}
        assert codec.codes.untyped_storage().data_ptr() in places
        assert codec.scale.untyped_storage().data_ptr() in places
    table = table_of(stored)
    table.save_pretrained(tmp_path)
    assert_same_tensors(type(table).from_pretrained(tmp_path).stored_rows, stored)

    for field, value in stored.format.config.items():  # sizes that no file has
        damaged: tuple[object, ...] = ("F8_E5M2",) if isinstance(value, str) else (-1, 0, 1 << 50)
        for each in () if isinstance(value, bool) else damaged:
            if each != 0 or field not in ("group_size", "layout_index", "zero_offset"):
                with pytest.raises((el.SizeError, el.CheckpointError), match=f"{field}|embed_dim|{each}"):
                    replace(stored.format, **{field: each})


@pytest.mark.parametrize("name", ["int8", "int4", "int4, groups of 36", "q4_0", "q8_0"])
def test_our_own_rows_are_those_of_from_table(name: str) -> None:
    stored = rows_of(name)
    values, form = new_rows(stored), stored.format.row_format
    group_size = None if name in ("int8", "int4") else form.group_size
    layout = GGUFBlocks() if name.startswith("q") else None
    table = el.QuantizedEmbedding.from_table(values, form.bits, group_size=group_size, layout=layout)
    assert_same_tensors(stored.quantised(values), table.stored_rows)


def assert_refused(case: StoredCase, *names: str) -> None:
    """Reading is one error that names the file and one of the tensors."""
    with pytest.raises(el.CheckpointError) as error:
        load(case)
    assert any(f"model.safetensors: {NAME}.{name} " in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_damaged_tensor_is_named(name: str) -> None:
    case = built(name)
    stored = read(case).format
    names = [*stored.row_parts, *stored.shared_parts]
    has_groups = getattr(stored, "group_size", 1) not in (0, stored.embed_dim)
    for part in names:
        tensor = case.tensors[part]
        if part != names[0]:
            assert_refused(case.changed(**{part: tensor.to(torch.float64)}), part)
            if part != "weight_zero_point":  # without it the configuration contradicts the tensors
                assert_refused(case.changed(**{part: None}), part)
        if tensor.dim():
            assert_refused(case.changed(**{part: tensor[:0]}), *names, "weight_shape")
            if part in stored.row_parts and len(stored.row_parts) > 1:
                assert_refused(case.changed(**{part: tensor[:-1]}), *names, "weight_shape")
            if tensor.shape[-1] > 1 and has_groups:  # else the codes tell the width
                assert_refused(case.changed(**{part: tensor[:, :-1]}), *names)
    for part, number in product({*stored.scales} & {*case.tensors}, (float("nan"), float("inf"))):
        tensor = case.tensors[part].clone()
        if tensor.itemsize == 1:
            is_e4m3 = tensor.dtype == torch.float8_e4m3fn or case.settings.get("mode") == "nvfp4"
            tensor.view(torch.uint8).view(-1)[-1] = 0x7F if is_e4m3 else 0xFF
        else:
            tensor.view(-1)[-1] = number
        assert_refused(case.changed(**{part: tensor}), part)


def test_every_format_has_a_case() -> None:
    """Blocks of GGUF files are no type of safetensors: `tests/checkpoints/test_gguf.py` reads them."""
    assert {type(read(built(name)).format) for name in (*ONE_OF_EACH, *OTHERS)} == {
        each for each in FORMATS if each.library != "GGUF"
    }
