"""Tables and heads that compressed-tensors stores: the files of llm-compressor, which vLLM and transformers read.

Weights alone are read: a runtime that also quantises the input of a head, by `input_scale`, computes other logits.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import BLOCK_FLOATS, E2M1, E4M3, Codec, pack, rounding_range, shifted, signed, unpack
from embedlayer.formats.refused import COLUMN_ORDER
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows, whole_groups
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import DTYPES

METHOD = "compressed-tensors"
"""Name of the library in the key `quant_method` of a configuration."""

DEQUANTISE = (
    "Dequantise the model with the packages transformers and compressed-tensors: model = AutoModelForCausalLM."
    "from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True)); "
    "model.save_pretrained(new_folder)"
)
"""Advice for a folder of this library that is not read."""

SCALE, ZERO, GLOBAL = "weight_scale", "weight_zero_point", "weight_global_scale"
_FLOATS = ("F32", "F16", "BF16")
_GROUP, _PACKED = "embedding", "pack-quantized"
_CODES = {"I8": signed(8), "F8_E4M3": E4M3}


@dataclass(frozen=True)
class ScaledRows(StoredFormat):
    """Abstract base class of `number = scale * (code - zero)`, computed in the dtype of the scales."""

    # `weight_scale` is `(V, G)`, `(V, 1)`, or `(1,)` for one scale of the whole matrix (`group_size` 0).

    library: ClassVar[str] = METHOD
    scales: ClassVar[tuple[str, ...]] = (SCALE,)
    code_choices: ClassVar[dict[str, Collection[int | str]]]
    """Values that the argument for the codes may have, by its name."""

    group_size: int
    scale_dtype: str
    is_symmetric: bool

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes and types that the library has, with those of codes."""
        return {
            "embed_dim": whole_groups(self.group_size),
            "group_size": range(self.embed_dim + 1),
            "scale_dtype": _FLOATS,
            **self.code_choices,
        }

    @property
    @abstractmethod
    def codes(self) -> tuple[str, Part]:
        """Return name, data type and row shape of the tensor of codes."""

    @property
    @abstractmethod
    def levels(self) -> tuple[int, Tensor]:
        """Return the bits of a code, and the number of each code."""

    @abstractmethod
    def encode(self, numbers: Float[Tensor, "N D"]) -> Tensor:
        """Return the stored codes of numbers between the smallest and the largest level, each that of the nearest."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.scale_dtype]

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return the codes, and what each row has of scales and zero points."""
        name, codes = self.codes
        return {name: codes} | (self._scale_parts if self.group_size else {})

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return scale and zero point of the whole matrix, if it has one scale."""
        return {} if self.group_size else self._scale_parts

    @property
    def _scale_parts(self) -> dict[str, Part]:
        scale = Part(self.dtype, (self.embed_dim // (self.group_size or self.embed_dim),))
        return {SCALE: scale} | ({} if self.is_symmetric else {ZERO: Part(torch.int8, scale.shape)})

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part; zero points that are packed along the rows are unpacked to int8, `(V, G)`."""
        tensor = module.read(part)
        if part in self.shared_parts:
            return tensor.reshape(1) if tensor.numel() == 1 else tensor
        if part != ZERO or self.codes[0] == "weight":
            return tensor
        bits = self.levels[0]
        shape, wanted = module.matrix(part, "I32"), (-(-vocab_size * bits // 32), self.embed_dim // self.group_size)
        if shape != wanted:
            raise module.error(part, f"has shape {list(shape)}, and by the other tensors of the module {list(wanted)}")
        words = tensor.T.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps strides of sizes of 1
        codes: Tensor = unpack(words.view(torch.uint8), bits, vocab_size)
        zeros: Tensor = (codes.T.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return zeros.contiguous()

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them; the library computes in the dtype of the scales."""
        codes = rows[self.codes[0]].view(torch.uint8)
        scale, zero = (
            shared[name].expand(codes.shape[0], 1) if name in shared else rows.get(name) for name in (SCALE, ZERO)
        )
        assert scale is not None
        return Codec(
            codes, *self.levels, scale, self.group_size or self.embed_dim, self.embed_dim, self.dtype, zero=zero
        )

    @property
    def can_quantise(self) -> bool:
        """Return whether the library has such rows: it stores no zero points of FP8 as integers."""
        return self.is_symmetric or self.levels[1] is not E4M3

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of a scale of the whole matrix, up to the rounding of this scale; else `None`."""
        if self.group_size:
            return None
        zero, scale = float(shared.get(ZERO, torch.zeros(1))), float(shared[SCALE])
        low, high = rounding_range(self.levels[1])
        scale *= 1 + torch.finfo(self.dtype).eps
        return scale * (low - zero), scale * (high - zero)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as the library quantises them with scales of `calculate_qparams`, or with shared ones."""
        if not self.can_quantise:
            return super().quantise(values, shared)
        groups = values.to(self.dtype).unflatten(1, (-1, self.group_size or self.embed_dim))
        levels = self.levels[1][self.levels[1].isfinite()]
        lowest, highest = float(levels.min()), float(levels.max())
        parts = self._scales(groups, lowest, highest) if self.group_size else dict(shared)
        zero = parts[ZERO].unsqueeze(-1).to(self.dtype) if ZERO in parts else 0
        scaled = groups / parts[SCALE].unsqueeze(-1) + zero  # a sum of zeros has no sign
        codes = {self.codes[0]: self.encode(scaled.clamp(lowest, highest).flatten(1))}
        return codes | (parts if self.group_size else {})

    def _scales(self, groups: Float[Tensor, "N G size"], lowest: float, highest: float) -> dict[str, Tensor]:
        """Return scales and zero points of groups; `lowest` and `highest` are the numbers of codes at the ends."""
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        if self.is_symmetric:
            scale, zeros = torch.maximum(low.abs(), high) / ((highest - lowest) / 2), {}
        else:
            scale = (high - low) / (highest - lowest)
            zero = (lowest - low / scale).nan_to_num(0.0).clamp(lowest, highest).round()  # NaN where all are zero
            zeros = {ZERO: zero.to(torch.int8)}
        return {SCALE: scale.where(scale != 0, torch.finfo(self.dtype).eps), **zeros}

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return the tensors of a file; beside packed codes also `weight_shape`, and zero points packed along rows."""
        tensors = super().write(stored, module)
        if self.codes[0] == "weight":
            return tensors
        dtype = module.tensors["weight_shape"].dtype if "weight_shape" in module.tensors else "I64"
        tensors["weight_shape"] = torch.tensor(stored.shape, dtype=DTYPES[dtype])
        if ZERO in stored.rows:
            bits = self.levels[0]
            codes = (stored.rows[ZERO].to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
            tensors[ZERO] = pack(codes.T, bits, torch.int32).T.contiguous()
        return tensors


@dataclass(frozen=True)
class PackQuantizedRows(ScaledRows):
    """`pack-quantized`: integers of 1 to 8 bits in words of 32 bits, for each group of columns or each row."""

    # `weight_packed` int32 `(V, ceil(D bits / 32))`, codes plus `2^(bits - 1)`; zero points packed along the rows,
    # `(ceil(V bits / 32), G)`, and unpacked on reading; `weight_shape` `[V, D]`. Reference:
    # `PackedQuantizationCompressor`.

    title: ClassVar[str] = "pack-quantized: integers of 1 to 8 bits by group, row or matrix, also asymmetric"
    code_choices: ClassVar[dict[str, Collection[int | str]]] = {"bits": range(1, 9)}

    bits: int

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight_packed` of int32, and the number of rows; see the base class."""
        if module.dtype("weight_packed") != "I32":
            return None
        vocab_size, words = module.matrix("weight_packed", "I32")
        if module.dtype("weight_shape") not in ("I64", "I32") or module.tensors["weight_shape"].shape != (2,):
            raise module.error("weight_shape", "with two integers is missing")
        rows, embed_dim = module.read("weight_shape").tolist()
        if rows != vocab_size or embed_dim < 1:
            raise module.error("weight_shape", f"says [{rows}, {embed_dim}] beside {vocab_size} rows of weight_packed")
        if "weight_g_idx" in module.tensors:
            raise COLUMN_ORDER._replace(advice=DEQUANTISE).error(module, "weight_g_idx")
        size, is_symmetric = _group_size(module, vocab_size, embed_dim), ZERO not in module.tensors
        fitting = [bits for bits in range(1, 9) if -(-embed_dim * bits // 32) == words]
        schemes = _schemes(module)
        chosen = [
            bits
            for bits in fitting
            if not schemes or any(_fits(each, bits, "int", embed_dim, size, is_symmetric) for each in schemes)
        ]
        if len(chosen) != 1:
            layout = f"{' or '.join(map(str, fitting)) or 'no number of'} bits in {_grouping(size)}"
            symmetry = "without" if is_symmetric else "with"
            raise module.error(
                "weight_packed",
                f"has {words} words for {embed_dim} columns: {layout}, {symmetry} zero points",
                stated=_stated(module),
            )
        return cls(embed_dim, size, module.dtype(SCALE), is_symmetric, chosen[0]), vocab_size

    @property
    def codes(self) -> tuple[str, Part]:
        """Return name, data type and row shape of the tensor of codes."""
        return "weight_packed", Part(torch.int32, (-(-self.embed_dim * self.bits // 32),))

    @property
    def levels(self) -> tuple[int, Tensor]:
        """Return the bits of a code, and the number of each code."""
        return self.bits, shifted(self.bits)

    def encode(self, numbers: Float[Tensor, "N D"]) -> Tensor:
        codes = (numbers.round().to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)
        return pack(codes, self.bits, torch.int32)

    def settings_with(self, settings: JsonObject, module: str) -> JsonObject:
        """Return settings of a configuration with a group for a module; see the base class."""
        # A group names the module by the end of its name: a loaded model may have other names before it. All groups
        # must be of this format, because transformers reads all modules by one of them.
        if settings and settings.get("quant_method") != METHOD:
            raise self.other_settings(settings)
        by_row = self.group_size == self.embed_dim
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
            "dynamic": False,
            **({"strategy": "channel"} if by_row else {"strategy": "group", "group_size": self.group_size}),
        }
        groups = {name: each for name, each in (settings.get("config_groups") or {}).items() if name != _GROUP}
        for each in groups.values():
            scheme = each.get("weights") or {}
            stated = {key: scheme.get(key) for key in weights if key != "dynamic"}
            container = each.get("format") or settings.get("format")
            if container != _PACKED or stated | {"dynamic": False} != weights:
                raise self.other_settings(settings)
        end = re.escape(module.rpartition(".")[2])
        return {
            "quantization_status": "compressed",
            **settings,
            "quant_method": METHOD,
            "format": _PACKED,
            "ignore": [name for name in settings.get("ignore") or [] if name != module],
            "config_groups": {
                **groups,
                _GROUP: {"targets": [rf"re:(.*\.)?{end}$"], "weights": weights, "format": _PACKED},
            },
        }


@dataclass(frozen=True)
class NaiveQuantizedRows(ScaledRows):
    """`int-quantized`, `float-quantized` and `naive-quantized`: a byte for each number, int8 or FP8 E4M3."""

    title: ClassVar[str] = "int-quantized and float-quantized: int8 and FP8 by group, row or matrix"
    code_choices: ClassVar[dict[str, Collection[int | str]]] = {"code_dtype": tuple(_CODES)}

    code_dtype: str

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight` of bytes, and the number of rows; see the base class."""
        method, code_dtype = module.settings.get("quant_method"), module.dtype("weight")
        is_here = method == METHOD or (method is None and SCALE in module.tensors)
        if code_dtype not in _CODES or module.dtype(SCALE) == "U8" or not is_here:
            return None
        vocab_size, embed_dim = module.matrix("weight", code_dtype)
        size, schemes = _group_size(module, vocab_size, embed_dim), _schemes(module)
        kind = "int" if code_dtype == "I8" else "float"
        if schemes and not any(_fits(each, 8, kind, embed_dim, size, None) for each in schemes):
            raise module.error("weight", f"is {code_dtype} in {_grouping(size)}", stated=_stated(module))
        return cls(embed_dim, size, module.dtype(SCALE), ZERO not in module.tensors, code_dtype), vocab_size

    @property
    def codes(self) -> tuple[str, Part]:
        """Return name, data type and row shape of the tensor of codes."""
        return "weight", Part(DTYPES[self.code_dtype], (self.embed_dim,))

    @property
    def levels(self) -> tuple[int, Tensor]:
        """Return 8 bits, and the number of each code."""
        return 8, _CODES[self.code_dtype]

    def encode(self, numbers: Float[Tensor, "N D"]) -> Tensor:
        dtype = DTYPES[self.code_dtype]
        return numbers.to(dtype) if dtype.is_floating_point else numbers.round().to(dtype)


@dataclass(frozen=True)
class CompressedFloatRows(StoredFormat):
    """`nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `mxfp6-pack-quantized` and `mxfp8-quantized`."""

    # `weight_packed` uint8 `(V, D bits / 8)` (MXFP8: `weight`, E4M3); `weight_scale` `(V, G)`, E4M3 with NVFP4, else
    # E8M0 as uint8. NVFP4 divides scales by `weight_global_scale`, float32 `(1,)`. The library returns bfloat16 for
    # every model. Reference: `NVFP4PackedCompressor` and the like.

    library: ClassVar[str] = METHOD
    title: ClassVar[str] = "nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp6-pack-quantized, mxfp8-quantized"
    dtype = torch.bfloat16
    scales: ClassVar[tuple[str, ...]] = (SCALE, GLOBAL)

    mode: str

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the modes, and the widths of whole groups."""
        size = BLOCK_FLOATS[self.mode].group_size if self.mode in BLOCK_FLOATS else 1
        return {"mode": tuple(BLOCK_FLOATS), "embed_dim": whole_groups(size)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with floating-point codes in groups, and the number of rows."""
        is_wide = module.dtype("weight") == "F8_E4M3" and module.dtype(SCALE) == "U8"
        if module.dtype("weight_packed") != "U8" and not is_wide:
            return None
        name = "weight" if is_wide else "weight_packed"
        vocab_size, nbytes = module.matrix(name, "F8_E4M3" if is_wide else "U8")
        groups = module.matrix(SCALE, "U8", "F8_E4M3")[1]
        modes = ("nvfp4",) if module.dtype(SCALE) == "F8_E4M3" else ("mxfp8",) if is_wide else ("mxfp4", "mxfp6")
        mode = next(
            (m for m in modes if BLOCK_FLOATS[m].bits * BLOCK_FLOATS[m].group_size * groups == 8 * nbytes), None
        )
        if mode is None:
            raise module.error(name, f"has {nbytes} bytes and {groups} scales a row, which is not {' or '.join(modes)}")
        kind, schemes = BLOCK_FLOATS[mode], _schemes(module)
        embed_dim = groups * kind.group_size
        if schemes and not any(_fits(each, kind.bits, "float", embed_dim, kind.group_size, None) for each in schemes):
            raise module.error(name, f"is {mode}", stated=_stated(module))
        if ZERO in module.tensors:
            raise module.error(ZERO, "is not read beside codes in floating point")
        if mode == "nvfp4" and GLOBAL not in module.tensors:
            raise module.error(GLOBAL, f"is missing beside {', '.join(sorted(module.tensors))}")
        return cls(embed_dim, mode), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        kind = BLOCK_FLOATS[self.mode]
        codes = {"weight": Part(torch.float8_e4m3fn, (self.embed_dim,))}
        if self.mode != "mxfp8":
            codes = {"weight_packed": Part(torch.uint8, (self.embed_dim * kind.bits // 8,))}
        scale_dtype = torch.float8_e4m3fn if self.mode == "nvfp4" else torch.uint8
        return {**codes, SCALE: Part(scale_dtype, (self.embed_dim // kind.group_size,))}

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return the global scale of NVFP4."""
        return {GLOBAL: Part(torch.float32, (1,))} if self.mode == "nvfp4" else {}

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        codes, scales = rows["weight" if self.mode == "mxfp8" else "weight_packed"], rows[SCALE]
        return BLOCK_FLOATS[self.mode].codec(codes, scales, self.embed_dim, torch.bfloat16, shared.get(GLOBAL))

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of NVFP4's global scale; `None` for other modes."""
        if self.mode != "nvfp4":
            return None
        largest = rounding_range(E2M1)[1] * 448.0 / float(shared[GLOBAL])
        return -largest, largest

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as the library quantises a matrix of the dtype of `values` with scales of `calculate_qparams`."""
        # We differ for float16 groups below `2^-14`, whose scales the library computes with numbers that underflow.
        kind = BLOCK_FLOATS[self.mode]
        groups = values.unflatten(1, (-1, kind.group_size))
        largest = groups.abs().amax(-1)
        if self.mode == "nvfp4":
            scale = (shared[GLOBAL] * (largest / 6.0)).clamp(max=448.0).to(torch.float8_e4m3fn)
            rounded = scale.to(torch.float32)
            rounded = rounded.where(rounded != 0, 0.125)
            scale, divisor = rounded.to(torch.float8_e4m3fn), rounded / shared[GLOBAL]
        else:
            half = 1 << (22 - (3 if self.mode == "mxfp6" else 1))  # of the last bit of a code's fraction
            exponent = largest.to(torch.float32).view(torch.int32) + half >> 23
            scale = (exponent - (8 if self.mode == "mxfp8" else 2)).clamp(min=0).to(torch.uint8)
            divisor = kind.scale_levels.to(scale.device)[scale.int()]
        numbers = (groups.to(torch.float32) / divisor.unsqueeze(-1)).flatten(1)
        packed = kind.encode(numbers if self.mode == "mxfp6" else numbers + 0)  # FP6 alone keeps the sign of -0
        if self.mode == "mxfp8":
            return {"weight": packed.view(torch.float8_e4m3fn), SCALE: scale}
        return {"weight_packed": packed, SCALE: scale}


def _group_size(module: StoredModule, vocab_size: int, embed_dim: int) -> int:
    """Return the number of columns that share a scale; 0 for one scale of the whole matrix."""
    info = module.tensors.get(SCALE)
    if info is not None and info.shape in ((), (1,)) and info.dtype in _FLOATS:
        return 0
    rows, groups = module.matrix(SCALE, *_FLOATS)
    if rows != vocab_size and 2 * rows <= vocab_size + 1:
        raise module.error(
            SCALE,
            f"has {rows} rows for {vocab_size} rows of codes: a scale is that of a block of several rows, which is not "
            f"read, because no row has scales of its own",
            DEQUANTISE,
        )
    if rows != vocab_size:
        raise module.error(SCALE, f"has {rows} rows for {vocab_size} rows of codes")
    if embed_dim % groups:
        raise module.error(SCALE, f"has {groups} scales a row, into which {embed_dim} columns cannot be divided")
    return embed_dim // groups


def _grouping(group_size: int) -> str:
    """Return in words which numbers share a scale."""
    return f"groups of {group_size} columns" if group_size else "one group"


def _schemes(module: StoredModule) -> list[JsonObject]:
    """Return what the configuration states about weights, for each of its groups of modules."""
    groups = module.settings.get("config_groups")
    schemes = (
        [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    )
    return [scheme for scheme in schemes if isinstance(scheme, dict)]


def _fits(scheme: JsonObject, bits: int, kind: str, embed_dim: int, group_size: int, is_symmetric: bool | None) -> bool:
    """Return whether a scheme of the configuration describes these tensors; symmetry is not compared for `None`."""
    size = scheme.get("group_size")
    has_size = group_size in (0, embed_dim) if size in (None, -1) else size == group_size
    has_symmetry = is_symmetric in (None, scheme.get("symmetric", True))
    return has_size and has_symmetry and scheme.get("num_bits") == bits and scheme.get("type", "int") == kind


def _stated(module: StoredModule) -> str:
    """Return what the configuration states, for people; `""` if it states nothing."""
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric")
    schemes = [", ".join(f"{key} {each[key]}" for key in keys if key in each) for each in _schemes(module)]
    return " or ".join(schemes)
