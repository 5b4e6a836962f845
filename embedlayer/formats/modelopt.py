"""Tables and heads that NVIDIA's ModelOpt stores: NVFP4 and FP8.

Weights alone are read: a runtime that also quantises the input of a head, by `input_scale`, computes other logits.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import BLOCK_FLOATS, E2M1, E4M3, Codec, pack
from embedlayer.formats.refused import FULL_PRECISION, INPUT_FACTOR
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows, codec_dtype, whole_groups

METHOD = "modelopt"
"""Name of the library in the key `quant_method` of a configuration."""

SCALE, SECOND_SCALE, FACTOR = "weight_scale", "weight_scale_2", "pre_quant_scale"
_NVFP4 = BLOCK_FLOATS["nvfp4"]
_LEVELS = E2M1 + 0.0
"""ModelOpt's numbers of FP4 codes: they have no negative zero."""

_LARGEST_FP4, _LARGEST_FP8 = 6.0, 448.0
_BEYOND_FP4, _BEYOND_FP8 = 7.0, 464.0  # half a step above the largest number
_SMALLEST_FP8 = 2.0**-9


@dataclass(frozen=True)
class NVFP4Rows(StoredFormat):
    """ModelOpt's NVFP4: `number = level * (scale * weight_scale_2)`, in float32 and rounded once."""

    library: ClassVar[str] = "ModelOpt"
    title: ClassVar[str] = "NVFP4"
    dtype = torch.float32
    scales: ClassVar[tuple[str, ...]] = (SCALE, SECOND_SCALE)
    is_of_model: ClassVar[bool] = True

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes, types and names that the library has."""
        return {"embed_dim": whole_groups(_NVFP4.group_size)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight` of uint8 and scales of E4M3, and the number of rows."""
        if module.dtype("weight") != "U8" or (module.dtype(SCALE) != "F8_E4M3" and SECOND_SCALE not in module.tensors):
            return None
        vocab_size, nbytes = module.matrix("weight", "U8")
        groups = module.matrix(SCALE, "F8_E4M3")[1]
        if 2 * nbytes != _NVFP4.group_size * groups:
            raise module.error(
                "weight", f"has {2 * nbytes} columns and {groups} scales a row, which are not groups of 16"
            )
        if SECOND_SCALE not in module.tensors:
            raise module.error(SECOND_SCALE, f"is missing beside {', '.join(sorted(module.tensors))}")
        if FACTOR in module.tensors:
            raise INPUT_FACTOR.error(module, FACTOR)
        stated = stated_algorithms(module)
        if stated and not any("NVFP4" in each for each in stated):
            raise module.error("weight", "is NVFP4", stated=" or ".join(sorted(stated)))
        return cls(2 * nbytes), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return codes and scales of groups."""
        return {
            "weight": Part(torch.uint8, (self.embed_dim // 2,)),
            SCALE: Part(torch.float8_e4m3fn, (self.embed_dim // _NVFP4.group_size,)),
        }

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return the scale of the whole matrix."""
        return {SECOND_SCALE: Part(torch.float32, (1,))}

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part; the scale of the whole matrix may be a scalar."""
        tensor = module.read(part)
        return tensor.reshape(1) if part == SECOND_SCALE and tensor.numel() == 1 else tensor

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        second = shared[SECOND_SCALE]
        codec = _NVFP4.codec(rows["weight"], rows[SCALE], self.embed_dim, torch.float32)
        return codec._replace(levels=_LEVELS, scale_levels=E4M3.to(second.device) * second)

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return the range of numbers that the scale of the whole matrix allows: `7 * 448 * weight_scale_2`."""
        largest = _BEYOND_FP4 * _LARGEST_FP8 * float(shared[SECOND_SCALE])
        return -largest, largest

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes and scales of groups, as `NVFP4QTensor.quantize` with the stored `weight_scale_2` does."""
        # The matrix's stored `weight_scale_2` is used. Ties take the even code; small negative numbers are codes of -0.
        second = shared[SECOND_SCALE]
        groups = values.to(torch.float32).unflatten(1, (self.embed_dim // _NVFP4.group_size, _NVFP4.group_size))
        scale = groups.abs().amax(2, keepdim=True) / (_LARGEST_FP4 * second)
        scale = scale.where(scale != 0, 1.0).clamp(_SMALLEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
        scaled = (groups / (scale.to(torch.float32) * second)).flatten(1)
        levels = E2M1[:8].to(scaled.device)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(scaled.abs(), middles)
        codes += codes % 2 * (scaled.abs().unsqueeze(-1) == middles).any(-1) + 8 * (scaled < 0)
        return {"weight": pack(codes.to(torch.uint8), 4), SCALE: scale.squeeze(2)}


@dataclass(frozen=True)
class FP8Rows(StoredFormat):
    """ModelOpt's FP8: `number = code * scale`, both of them in the dtype of the result."""

    library: ClassVar[str] = "ModelOpt"
    title: ClassVar[str] = "FP8 by row or matrix"
    dtype = torch.float32
    scales: ClassVar[tuple[str, ...]] = (SCALE,)
    is_of_model: ClassVar[bool] = True

    group_size: int

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        return {"embed_dim": whole_groups(1), "group_size": (0, self.embed_dim)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight` of E4M3 in a file of ModelOpt, and the number of rows."""
        if module.dtype("weight") != "F8_E4M3" or module.settings.get("quant_method") != METHOD:
            return None
        if module.dtype(SCALE) == "U8":
            return None
        vocab_size, embed_dim = module.matrix("weight", "F8_E4M3")
        info = module.tensors.get(SCALE)
        if info is None:
            raise module.error(SCALE, f"is missing beside {', '.join(sorted(module.tensors))}")
        if info.shape not in ((), (1,), (vocab_size,), (vocab_size, 1)):
            raise module.error(
                SCALE,
                f"has shape {list(info.shape)} for {vocab_size} rows of {embed_dim} columns: only scales of the whole "
                f"matrix and of rows are read",
                FULL_PRECISION,
            )
        if FACTOR in module.tensors:
            raise INPUT_FACTOR.error(module, FACTOR)
        stated = stated_algorithms(module)
        if stated and not any("FP8" in each for each in stated):
            raise module.error("weight", "is FP8", stated=" or ".join(sorted(stated)))
        return cls(embed_dim, 0 if info.shape in ((), (1,)) else embed_dim), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        codes = {"weight": Part(torch.float8_e4m3fn, (self.embed_dim,))}
        return codes | ({SCALE: Part(torch.float32, (1,))} if self.group_size else {})

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return the scale of the whole matrix, if rows have none."""
        return {} if self.group_size else {SCALE: Part(torch.float32, (1,))}

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part; scales become `(V, 1)` or `(1,)`."""
        tensor = module.read(part)
        return tensor.reshape((-1, 1) if self.group_size else (-1,)) if part == SCALE else tensor

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        codes, rounding = rows["weight"].view(torch.uint8), codec_dtype(dtype)
        scale = rows[SCALE] if self.group_size else shared[SCALE].expand(codes.shape[0], 1)
        return Codec(codes, 8, E4M3, scale, self.embed_dim, self.embed_dim, rounding)

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of numbers that a scale of the whole matrix allows: `464 * weight_scale`."""
        largest = 0.0 if self.group_size else _BEYOND_FP8 * float(shared[SCALE])
        return None if self.group_size else (-largest, largest)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes, and scales if rows have them, as ModelOpt exports them: `code = number / scale`, rounded."""
        values, scale = values.to(torch.float32), shared.get(SCALE)
        if scale is None:
            largest = values.abs().amax(1, keepdim=True)
            largest = largest.where(largest != 0, _LARGEST_FP8).clamp(min=torch.finfo(torch.float32).tiny)
            scale = largest / _LARGEST_FP8
        codes = (values / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
        return {"weight": codes} | ({SCALE: scale} if self.group_size else {})

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return the parts, with scales of rows in the number of dimensions that the module has, by default one."""
        # The scale of a single row has two dimensions: `(1,)` would be the scale of a whole matrix.
        parts = super().write(stored, module)
        has_columns = stored.shape[0] == 1 or (SCALE in module.tensors and len(module.tensors[SCALE].shape) == 2)
        return parts if has_columns or not self.group_size else parts | {SCALE: stored.rows[SCALE].squeeze(1)}


def stated_algorithms(module: StoredModule) -> set[str]:
    """Return the names of the algorithms that the configuration states, such as `"NVFP4"`; `set()` for none."""
    layers = module.settings.get("quantized_layers")
    own = layers.get(module.name) if isinstance(layers, dict) else None
    stated = own.get("quant_algo") if isinstance(own, dict) else module.settings.get("quant_algo")
    return {stated} - {"MIXED_PRECISION"} if isinstance(stated, str) else set()
