"""Tables and heads that torchao quantised, as transformers saves them.

The types of the tensors are stored as JSON in the metadata of the file. Weights alone are read: a type that also
quantises the input of a head computes other logits.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import E4M3, Codec, rounding_range, signed
from embedlayer.formats.refused import FULL_PRECISION, INPUT_FACTOR
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows, codec_dtype, whole_groups
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import DTYPES

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
FACTOR = "_weight_act_pre_scale"
_FLOATS = ("F32", "F16", "BF16")
_CODE_TYPES = {"Int8Tensor": "I8", "IntxUnpackedToInt8Tensor": "I8", "Float8Tensor": "F8_E4M3"}
"""Data type of the codes of each type of torchao that is read."""

_INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}
_ROW_DTYPES = {str(DTYPES[name]).removeprefix("torch."): DTYPES[name] for name in _FLOATS}


@dataclass(frozen=True)
class TorchAORows(StoredFormat):
    """torchao's `Int8Tensor`, `IntxUnpackedToInt8Tensor` and `Float8Tensor`: `number = (code - zero) * scale`."""

    # A code is a byte also for fewer bits. The product has the wider dtype of result and scales (FP8: float32), and is
    # rounded to that of the result. Reference: `dequantize` of these classes.

    library: ClassVar[str] = "torchao"
    title: ClassVar[str] = "int8, integers of 1 to 8 bits by group and FP8, a byte for each number"
    scales: ClassVar[tuple[str, ...]] = (SCALE,)

    tensor_type: str
    group_size: int
    scale_dtype: str
    has_zero_points: bool
    row_dtype: str
    bits: int = 8
    is_symmetric: bool = False

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes, types and names that the library has."""
        return {
            "embed_dim": whole_groups(self.group_size),
            "tensor_type": tuple(_CODE_TYPES),
            "group_size": range(self.embed_dim + 1),
            "scale_dtype": _FLOATS,
            "row_dtype": tuple(_ROW_DTYPES),
            "bits": range(1, 9),
        }

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `_weight_qdata` of a type that is read, and the number of rows."""
        tensor_type, data, names = tensor_metadata(module)
        if CODES not in module.tensors or (tensor_type and tensor_type not in _CODE_TYPES):
            return None
        if not tensor_type:
            raise module.error(CODES, "has no type of torchao in the metadata of the file")
        for name in names:
            if name not in module.tensors:
                raise module.error(name, f"is missing beside {', '.join(sorted(module.tensors))}")
        vocab_size, embed_dim = module.matrix(CODES, _CODE_TYPES[tensor_type])
        rows, groups = module.matrix(SCALE, *_FLOATS)
        if rows not in (1, vocab_size) or (rows == 1 < vocab_size and groups > 1) or embed_dim % groups:
            raise module.error(
                SCALE,
                f"has shape [{rows}, {groups}] for {vocab_size} rows of {embed_dim} columns, which is not read",
                FULL_PRECISION,
            )
        blocks = data.get("block_size")
        if isinstance(blocks, list) and blocks and blocks != [vocab_size // rows, embed_dim // groups]:
            raise module.error(SCALE, f"has shape [{rows}, {groups}], and the metadata of the file states {blocks}")
        if ZERO in module.tensors:
            module.matrix(ZERO, "I8")
        if FACTOR in module.tensors:
            raise INPUT_FACTOR.error(module, FACTOR)
        row_dtype = _dtype_of(data, "dtype") if _dtype_of(data, "dtype") in _ROW_DTYPES else "float32"
        bits = _INTEGERS.get(_dtype_of(data, "target_dtype"), 7 if data.get("reduce_range") is True else 8)
        size = 0 if rows == 1 < vocab_size else embed_dim // groups
        has_zeros = ZERO in module.tensors
        is_symmetric = not has_zeros or not module.read(ZERO).any()
        scale_dtype = module.dtype(SCALE)
        return cls(embed_dim, tensor_type, size, scale_dtype, has_zeros, row_dtype, bits, is_symmetric), vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the matrix that was quantised."""
        return _ROW_DTYPES[self.row_dtype]

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return the codes, and what each row has of scales and zero points."""
        codes = Part(DTYPES[_CODE_TYPES[self.tensor_type]], (self.embed_dim,))
        return {CODES: codes} | (self._scale_parts if self.group_size else {})

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return scale and zero point of the whole matrix, if it has one scale."""
        return {} if self.group_size else self._scale_parts

    @property
    def _scale_parts(self) -> dict[str, Part]:
        shape = (self.embed_dim // self.group_size,) if self.group_size else (1, 1)
        zero = {ZERO: Part(torch.int8, shape)} if self.has_zero_points else {}
        return {SCALE: Part(DTYPES[self.scale_dtype], shape), **zero}

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        codes = rows[CODES].view(torch.uint8)
        scale, zero = (
            shared[name].expand(codes.shape[0], 1) if name in shared else rows.get(name) for name in (SCALE, ZERO)
        )
        assert scale is not None
        rounding = torch.float32 if self._is_float else codec_dtype(torch.promote_types(dtype, scale.dtype))
        levels, group_size = E4M3 if self._is_float else signed(8), self.group_size or self.embed_dim
        return Codec(codes, 8, levels, scale, group_size, self.embed_dim, rounding, zero=zero)

    @property
    def _is_float(self) -> bool:
        return self.tensor_type == "Float8Tensor"

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of a scale of the whole matrix, up to the rounding of this scale; else `None`."""
        if self.group_size:
            return None
        zero = float(shared.get(ZERO, torch.zeros(1)))
        low, high = rounding_range(E4M3 if self._is_float else signed(self.bits))
        scale = float(shared[SCALE]) * (1 + torch.finfo(self.dtype).eps)
        return scale * (low - zero), scale * (high - zero)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows, rounded to the dtype of the matrix, as `from_hp` of torchao's class quantises them."""
        # A group of zeros has codes of 0 also in FP8, where torchao divides zero by zero.
        groups = values.to(self.dtype).unflatten(1, (-1, self.group_size or self.embed_dim))
        parts = self._scales_of(groups) if self.group_size else dict(shared)
        scale = parts[SCALE].unsqueeze(-1)
        if self._is_float:
            codes = (groups.to(torch.float32) / scale).nan_to_num(0.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        else:
            top = 2 ** (self.bits - 1)
            zero = parts[ZERO].unsqueeze(-1) if ZERO in parts else 0
            codes = ((groups * (1.0 / scale)).round() + zero).clamp(-top, top - 1).to(torch.int8)
        return {CODES: codes.flatten(1)} | (parts if self.group_size else {})

    def _scales_of(self, groups: Float[Tensor, "N G size"]) -> dict[str, Tensor]:
        """Return scales and zero points of groups."""
        if self._is_float:
            return {SCALE: (groups.abs().amax(-1) / 448.0).to(DTYPES[self.scale_dtype])}
        low, high, top = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), 2 ** (self.bits - 1)
        is_int8 = self.tensor_type == "Int8Tensor"
        smallest = torch.finfo(torch.float32).eps if is_int8 else torch.finfo(self.dtype).smallest_normal
        if self.is_symmetric or not self.has_zero_points:
            scale = (torch.maximum(-low, high) / (top - 0.5)).clamp(min=smallest)
            zero = torch.zeros_like(scale)
        else:
            scale = ((high - low) / (2.0 * top - 1)).clamp(min=smallest)
            zero = (-top - (low / scale).round()).clamp(-top, top - 1)
        zeros = {ZERO: zero.to(torch.int8)} if self.has_zero_points else {}
        return {SCALE: scale.to(DTYPES[self.scale_dtype]), **zeros}

    def metadata(self, stored: StoredRows, module: StoredModule) -> dict[str, str]:
        """Return what the file states about the matrix, with the size of a block that has all rows in step."""
        name = f"{module.name}.weight"
        if self.group_size or name not in module.metadata:
            return {}
        stated = json.loads(module.metadata[name])
        stated["_data"]["block_size"] = list(stored.shape)
        return {name: json.dumps(stated)}


def _dtype_of(data: JsonObject, name: str) -> str:
    """Return the name of a data type that the metadata state as JSON; `""` if they state none."""
    value = data.get(name)
    dtype = value.get("_data") if isinstance(value, dict) else None
    return dtype if isinstance(dtype, str) else ""


def tensor_metadata(module: StoredModule) -> tuple[str, JsonObject, list[str]]:
    """Return what the metadata of the file states about the weight of a module."""
    try:
        stated = json.loads(module.metadata.get(f"{module.name}.weight", "{}"))
    except json.JSONDecodeError:
        return "", {}, []
    if not isinstance(stated, dict) or not isinstance(stated.get("_type"), str):
        return "", {}, []
    data, names = stated.get("_data"), stated.get("_tensor_data_names")
    return (
        stated["_type"],
        data if isinstance(data, dict) else {},
        [f"_weight_{name}" for name in names] if isinstance(names, list) else [],
    )
