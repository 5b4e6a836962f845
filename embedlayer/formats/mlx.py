"""Tables and heads that MLX quantised: `mlx.nn.quantize`, and the models of mlx-lm, LM Studio and Ollama."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import BLOCK_FLOATS, E2M1, Codec, pack, rounding_range, unsigned
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, whole_groups
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import DTYPES

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_FLOATS = ("F32", "F16", "BF16")
_MODES = ("mxfp4", "nvfp4", "mxfp8")


@dataclass(frozen=True)
class MLXAffineRows(StoredFormat):
    """MLX's mode `affine`: `number = scale * code + bias`, product and sum each rounded to the dtype of the scales."""

    # Shapes give only bits times group size; where several pairs fit, the configuration's key `quantization` decides.
    # Reference: `mlx.core.quantize` and `dequantize`.

    library: ClassVar[str] = "MLX"
    title: ClassVar[str] = "affine, 2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128"
    scales: ClassVar[tuple[str, ...]] = ("scales", "biases")

    bits: int
    group_size: int
    scale_dtype: str

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes and types that MLX has."""
        widths = whole_groups(self.group_size)
        return {"bits": _BITS, "group_size": _GROUPS, "scale_dtype": _FLOATS, "embed_dim": widths}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of tensors `weight`, `scales` and `biases`, and the number of rows; see the base class."""
        if module.dtype("weight") != "U32" or module.dtype("scales") == "U8" or "qbiases" in module.tensors:
            return None  # `qbiases` are those of transformers' MetalConfig, which rounds in another way
        vocab_size, words = module.matrix("weight", "U32")
        groups = module.matrix("scales", *_FLOATS)[1]
        module.matrix("biases", *_FLOATS)
        fitting = [(bits, size) for bits in _BITS for size in _GROUPS if bits * size * groups == 32 * words]
        chosen = [pair for pair in fitting if _is_stated(module, "affine", *pair)]
        if len(chosen) != 1:
            pairs = " or ".join(f"{bits} bits in groups of {size}" for bits, size in fitting)
            layout = f"has {words} words and {groups} scales a row, which is {pairs or 'no layout of MLX'}"
            raise module.error("weight", layout, stated=str(_stated(module) or "nothing"))
        ((bits, size),) = chosen
        return cls(groups * size, bits, size, module.dtype("scales")), vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the scales."""
        return DTYPES[self.scale_dtype]

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return `weight`, `scales` and `biases`."""
        groups = Part(self.dtype, (self.embed_dim // self.group_size,))
        words = Part(torch.uint32, (self.embed_dim * self.bits // 32,))
        return {"weight": words, "scales": groups, "biases": groups}

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them; MLX computes in the dtype of the scales."""
        return Codec(
            rows["weight"].view(torch.uint8),
            self.bits,
            unsigned(self.bits),
            rows["scales"],
            self.group_size,
            self.embed_dim,
            self.dtype,
            bias=rows["biases"],
        )

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as MLX quantises them on a CPU, after they are rounded to the dtype of the scales."""
        groups, highest = values.to(self.dtype).to(torch.float32).unflatten(1, (-1, self.group_size)), 2**self.bits - 1
        low, high = groups.aminmax(dim=-1, keepdim=True)
        is_low = low.abs() > high.abs()
        step = ((high - low) / highest).clamp(min=1e-7)
        step, edge = step.where(is_low, -step), low.where(is_low, high)
        code_of_zero = (edge / step).round()
        scale = (edge / code_of_zero).where(code_of_zero != 0, step)
        bias = edge.where(code_of_zero != 0, 0)
        codes = ((groups - bias) / scale).round().clamp(0, highest).to(torch.uint8).flatten(1)
        return {
            "weight": pack(codes, self.bits, torch.uint32),
            "scales": scale.squeeze(-1).to(self.dtype),
            "biases": bias.squeeze(-1).to(self.dtype),
        }

    def settings_with(self, settings: JsonObject, module: str) -> JsonObject:
        """Return settings of a configuration with those of a module, by its name if there were others before."""
        own = {"group_size": self.group_size, "bits": self.bits, "mode": "affine"}
        if "quant_method" in settings:
            raise self.other_settings(settings)
        return {**settings, module: own} if settings else own


@dataclass(frozen=True)
class MLXFloatRows(StoredFormat):
    """MLX's modes `mxfp4`, `nvfp4` and `mxfp8`: floating-point codes, and scales of 8 bits without a global scale."""

    # The ratio of words and scales tells the mode. MLX returns bfloat16, in which the numbers are exact.

    library: ClassVar[str] = "MLX"
    title: ClassVar[str] = "mxfp4, nvfp4 and mxfp8"
    dtype = torch.bfloat16
    scales: ClassVar[tuple[str, ...]] = ("scales",)

    mode: str

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the modes, and the widths of whole groups."""
        size = BLOCK_FLOATS[self.mode].group_size if self.mode in _MODES else 1
        return {"mode": _MODES, "embed_dim": whole_groups(size)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of tensors `weight` and `scales`, and the number of rows; see the base class."""
        if module.dtype("weight") != "U32" or module.dtype("scales") != "U8":
            return None
        vocab_size, words = module.matrix("weight", "U32")
        groups = module.matrix("scales", "U8")[1]
        bits_of = {mode: BLOCK_FLOATS[mode].bits * BLOCK_FLOATS[mode].group_size for mode in _MODES}  # of a group
        mode = next((mode for mode in _MODES if bits_of[mode] * groups == 32 * words), None)
        layout = f"has {words} words and {groups} scales a row"
        if mode is None:
            raise module.error("weight", f"{layout}, which is none of {', '.join(_MODES)}")
        kind = BLOCK_FLOATS[mode]
        if not _is_stated(module, mode, kind.bits, kind.group_size):
            raise module.error("weight", f"{layout}, which is {mode}", stated=str(_stated(module)))
        return cls(groups * kind.group_size, mode), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        kind = BLOCK_FLOATS[self.mode]
        return {
            "weight": Part(torch.uint32, (self.embed_dim * kind.bits // 32,)),
            "scales": Part(torch.uint8, (self.embed_dim // kind.group_size,)),
        }

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        return BLOCK_FLOATS[self.mode].codec(rows["weight"], rows["scales"], self.embed_dim, torch.bfloat16)

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of `nvfp4`, which has no global scale; `None` for other modes."""
        if self.mode != "nvfp4":
            return None
        largest = rounding_range(E2M1)[1] * 448.0
        return -largest, largest

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as MLX quantises a matrix of the dtype of `values` on a CPU."""
        # We differ for groups below `2^-126` times the largest level: the exponent of their scale wraps around in MLX.
        kind = BLOCK_FLOATS[self.mode]
        groups = values.unflatten(1, (-1, kind.group_size))
        scale = (groups.abs().amax(-1) / (448.0 if kind.bits == 8 else 6.0)).to(torch.float32)
        if self.mode == "nvfp4":
            codes = scale.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            fraction, exponent = torch.frexp(scale)  # the power of two that is not below the scale
            exponent = (exponent - (fraction == 0.5).int()).clamp(min=-127).where(scale != 0, 0)
            codes = (exponent + 127).to(torch.uint8)
        divisor = kind.scale_levels.to(codes.device)[codes.int()].unsqueeze(-1)
        numbers = groups.to(torch.float32) / divisor.where(divisor != 0, torch.inf)
        packed = kind.encode(numbers.flatten(1), ties_to_even=False)
        return {"weight": packed.view(torch.uint32), "scales": codes}


def stated_format(
    settings: JsonObject, module_ends: tuple[str, ...], embed_dim: int, scale_dtype: str
) -> StoredFormat | None:
    """Return the format in which MLX stores a table or head by the key `quantization`; `None` for a dense one."""
    # MLX quantises both ends unless a module's settings say `false` or its groups do not divide the width.
    own = next((settings[key] for key in settings for end in module_ends if f".{key}".endswith(f".{end}")), settings)
    stated = {**settings, **own} if isinstance(own, dict) else {}
    bits, group_size, mode = (stated.get(name) for name in ("bits", "group_size", "mode"))
    if "quant_method" in stated or group_size not in (16, *_GROUPS) or embed_dim % group_size:
        return None
    if mode in _MODES:
        return MLXFloatRows(embed_dim, mode)
    return MLXAffineRows(embed_dim, bits, group_size, scale_dtype) if bits in _BITS and group_size in _GROUPS else None


def _stated(module: StoredModule) -> JsonObject:
    """Return what the configuration states about a module, or else about all: some of `mode`, `bits`, `group_size`."""
    own = module.settings.get(module.name)
    stated = own if isinstance(own, dict) else module.settings
    return {name: stated[name] for name in ("mode", "bits", "group_size") if stated.get(name) is not None}


def _is_stated(module: StoredModule, mode: str, bits: int, group_size: int) -> bool:
    """Return whether the configuration states a layout, or nothing that contradicts it."""
    layout = {"mode": mode, "bits": bits, "group_size": group_size}
    return layout | _stated(module) == layout
