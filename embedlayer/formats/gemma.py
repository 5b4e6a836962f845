"""Tables and heads of Google's quantised Gemma files, `quant_method` `gemma`.

Weights alone are read: transformers also rounds inputs and outputs of a head by `input_activation_scale` and
`output_activation_scale`, so its logits differ.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import Codec, pack, shifted, signed
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, codec_dtype, whole_groups

METHOD = "gemma"
"""Name of the layout in the key `quant_method` of a configuration."""

_DEFAULT_BITS = 4
"""Bits of modules for which a configuration states none."""


@dataclass(frozen=True)
class GemmaRows(StoredFormat):
    """Gemma's layout: `number = code * scale`; the scale is rounded to the dtype of the result before the product.

    A table has `embedding_quantized` and `embedding_scale`, a head `weight` and `weight_scale`. Codes are int8, or
    uint8 with two codes of 4 or four of 2 bits in a byte, to which `2^(bits - 1)` was added; only the configuration
    tells which of the two. Scales are float32, `(V, 1)`, or of groups of columns.

    Args:
        embed_dim: Columns of a row, D.
        bits: Bits of a code: 2, 4 or 8.
        group_size: Columns that share a scale.
        codes: Name of the tensor of codes: `"embedding_quantized"` or `"weight"`.

    Reference: `QuantizedEmbedding` and `QuantizedLinear` of transformers' `integrations/gemma_quant.py`.
    """

    library: ClassVar[str] = "Gemma"
    title: ClassVar[str] = "2, 4 and 8 bits by row"
    dtype = torch.float32
    scales: ClassVar[tuple[str, ...]] = ("embedding_scale", "weight_scale")
    is_of_model: ClassVar[bool] = True
    rounds_factor: ClassVar[bool] = False

    bits: int
    group_size: int
    codes: str

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes, types and names that the library has."""
        return {
            "embed_dim": whole_groups(math.lcm(self.group_size, 8 // self.bits)) if self.bits in (2, 4, 8) else (),
            "bits": (2, 4, 8),
            "group_size": range(1, self.embed_dim + 1),
            "codes": ("embedding_quantized", "weight"),
        }

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a table or head of a quantised Gemma file, and the number of rows."""
        codes = "embedding_quantized" if "embedding_quantized" in module.tensors else "weight"
        is_here = codes != "weight" or module.settings.get("quant_method") == METHOD
        if not is_here or module.dtype(codes) not in ("U8", "I8"):
            return None
        vocab_size, nbytes = module.matrix(codes, "U8", "I8")
        groups = module.matrix(_scale_name(codes), "F32")[1]
        bits = stated_bits(module)
        if module.dtype(codes) == "I8":
            bits = 8
        elif bits not in (2, 4):
            stated = "nothing" if bits is None else f"{bits} bits"
            raise module.error(codes, "is uint8, which is 2 or 4 bits", stated=stated)
        embed_dim = nbytes * 8 // bits
        if embed_dim % groups:
            raise module.error(
                _scale_name(codes), f"has {groups} scales a row, into which {embed_dim} columns cannot be divided"
            )
        return cls(embed_dim, bits, embed_dim // groups, codes), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        codes = Part(dtype, (self.embed_dim * self.bits // 8,))
        return {self.codes: codes, _scale_name(self.codes): Part(torch.float32, (self.embed_dim // self.group_size,))}

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        rounding, levels = codec_dtype(dtype), signed(8) if self.bits == 8 else shifted(self.bits)
        codes, scale = rows[self.codes].view(torch.uint8), rows[_scale_name(self.codes)]
        return Codec(codes, self.bits, levels, scale, self.group_size, self.embed_dim, rounding)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes and scales of rows, by a rule of our own: no public code writes these files.

        The scale of a group is its largest absolute value, divided by `2^(bits - 1) - 1`; numbers are rounded to the
        nearest code. The code `-2^(bits - 1)` is not used.
        """
        highest = 2 ** (self.bits - 1) - 1
        groups = values.to(torch.float32).unflatten(1, (self.embed_dim // self.group_size, self.group_size))
        scale = groups.abs().amax(2, keepdim=True) / highest
        divisor = scale.where(scale > 0, torch.inf)  # a group of zeros has a scale of 0, and codes of 0
        codes = (groups / divisor).round().clamp(-highest, highest).flatten(1)
        packed = codes.to(torch.int8) if self.bits == 8 else pack((codes + highest + 1).to(torch.uint8), self.bits)
        return {self.codes: packed, _scale_name(self.codes): scale.squeeze(2)}


def _scale_name(codes: str) -> str:
    """Return the name of the scales beside the tensor of codes."""
    return "weight_scale" if codes == "weight" else "embedding_scale"


def stated_bits(module: StoredModule) -> object:
    """Return the bits that the configuration states for a module: of the first pattern in its name, else of all.

    The result is `None` if it states none and its `quant_method` is another one.
    """
    settings = module.settings
    patterns = settings.get("module_quant_configs")
    for pattern, options in patterns.items() if isinstance(patterns, dict) else ():
        if isinstance(options, dict) and _is_in(pattern, module.name):
            return options.get("num_bits", settings.get("num_bits", _DEFAULT_BITS))
    return settings.get("num_bits", _DEFAULT_BITS if settings.get("quant_method") == METHOD else None)


def _is_in(pattern: str, name: str) -> bool:
    """Return whether a pattern of a configuration occurs in a name; a pattern that is none does not."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False
