"""Heads that GPTQ and AWQ quantised. Their files have tokens as columns; they are repacked into rows on reading."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from embedlayer.families import is_table_name
from embedlayer.formats.codec import Codec, unpack, unsigned
from embedlayer.formats.refused import COLUMN_ORDER, FULL_PRECISION, GPTQ_EMBEDDING
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, whole_groups
from embedlayer.io.safetensors_files import DTYPES

_FLOATS = ("F16", "BF16", "F32")
_BITS = (2, 3, 4, 8)
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of AWQ of each of 8 neighbouring tokens."""

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class ColumnRows(StoredFormat):
    """Abstract base class of `number = scale * (code - zero)`, rounded to the dtype of the scales.

    In memory `qweight` is `(V, D bits / 8)` of uint8, `scales` and `qzeros` are `(V, G)`.

    Args:
        embed_dim: Columns of a row, D.
        bits: Bits of a code.
        group_size: Columns that share a scale.
        scale_dtype: Data type of the scales: `"F32"`, `"F16"` or `"BF16"`.
    """

    scales: ClassVar[tuple[str, ...]] = ("scales",)

    bits: int
    group_size: int
    scale_dtype: str

    @property
    def column_choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes and types of both layouts."""
        return {
            "embed_dim": whole_groups(self.group_size),
            "group_size": range(1, self.embed_dim + 1),
            "scale_dtype": _FLOATS,
        }

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the scales."""
        return DTYPES[self.scale_dtype]

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return codes, scales and zero points."""
        groups = (self.embed_dim // self.group_size,)
        return {
            "qweight": Part(torch.uint8, (self.embed_dim * self.bits // 8,)),
            "scales": Part(self.dtype, groups),
            "qzeros": Part(torch.int16, groups),
        }

    @abstractmethod
    def rows_of_codes(self, columns: Tensor) -> Tensor:
        """Return the stored columns of codes as rows of packed codes, low bits first, uint8."""

    @abstractmethod
    def rows_of_zeros(self, words: Tensor, vocab_size: int) -> Tensor:
        """Return the zero points `(V, G)` of the stored words."""

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part and repack it: the file has no row per token in it."""
        tensor = module.read(part)
        if part == "scales":
            return tensor.T.contiguous()
        if part == "qzeros":
            return self.rows_of_zeros(tensor, vocab_size).to(torch.int16).contiguous()
        return self.rows_of_codes(tensor)

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them; the libraries compute in the dtype of the scales."""
        return Codec(
            rows["qweight"],
            self.bits,
            unsigned(self.bits),
            rows["scales"],
            self.group_size,
            self.embed_dim,
            self.dtype,
            zero=rows["qzeros"],
        )


@dataclass(frozen=True)
class GPTQRows(ColumnRows):
    """GPTQ: `qweight` int32, `(D bits / 32, V)`; `scales` `(G, V)`; `qzeros` `(G, V bits / 32)`; `g_idx` `(D,)`.

    Files of `checkpoint_format` `gptq` store zero points minus 1, those of `gptq_v2` as they are. Columns of a group
    must be neighbours.

    Args:
        embed_dim: Columns of a row, D.
        bits: Bits of a code: 2, 3, 4 or 8.
        group_size: Columns that share a scale.
        scale_dtype: Data type of the scales: `"F32"`, `"F16"` or `"BF16"`.
        zero_offset: What is added to a stored zero point, 1 or 0.

    Reference: `BaseQuantLinear.dequantize_weight` of GPTQModel.
    """

    library: ClassVar[str] = "GPTQ"
    title: ClassVar[str] = "heads of 2, 3, 4 and 8 bits by group, also asymmetric"

    zero_offset: int

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes and types that the library has."""
        return {**self.column_choices, "bits": _BITS, "zero_offset": range(2)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a head with `qweight` of as many columns as `scales`, and the number of rows."""
        sizes = _column_sizes(module)
        if sizes is None or module.tensors["qweight"].shape[1] != sizes[1]:
            return None
        groups, vocab_size = sizes
        words, zero_words = module.matrix("qweight", "I32")[0], module.matrix("qzeros", "I32")[1]
        columns = module.tensors["g_idx"].shape if "g_idx" in module.tensors else None
        fitting = [
            bits
            for bits in _BITS
            if -(-vocab_size * bits // 32) == zero_words
            and 32 * words % bits == 0
            and columns in (None, (32 * words // bits,))
        ]
        bits = next((bits for bits in fitting if module.settings.get("bits") in (None, bits)), None)
        if bits is None or (len(fitting) > 1 and "bits" not in module.settings):
            stated = module.settings.get("bits")
            raise module.error(
                "qweight",
                f"has {words} words for a column, and qzeros {zero_words} for a group of {vocab_size} tokens: "
                f"{' or '.join(map(str, fitting)) or 'no number of'} bits",
                stated="nothing" if stated is None else f"{stated} bits",
            )
        embed_dim = 32 * words // bits
        if vocab_size < embed_dim and is_table_name(module.name):
            raise GPTQ_EMBEDDING.error(module, "scales")
        if embed_dim % groups:
            raise module.error("scales", f"has {groups} rows, into which {embed_dim} columns cannot be divided")
        if columns is not None:
            order = module.read("g_idx")
            if not torch.equal(order.long(), torch.arange(embed_dim) // (embed_dim // groups)):
                raise COLUMN_ORDER.error(module, "g_idx")
        is_second = module.settings.get("checkpoint_format") == "gptq_v2"
        return cls(embed_dim, bits, embed_dim // groups, module.dtype("scales"), 0 if is_second else 1), vocab_size

    def rows_of_codes(self, columns: Tensor) -> Tensor:
        """Return the rows of codes: a transposed matrix of words."""
        return columns.T.contiguous().view(torch.uint8)

    def rows_of_zeros(self, words: Tensor, vocab_size: int) -> Tensor:
        """Return the zero points; as in GPTQModel, the addition of 1 may overflow into the next one."""
        if self.bits != 3 and self.zero_offset:
            words = words + sum(1 << place for place in range(0, 32, self.bits))  # wraps around at 32 bits
        zeros = unpack(words.contiguous().view(torch.uint8), self.bits, vocab_size).to(torch.int16)
        return ((zeros + self.zero_offset) % 8 if self.bits == 3 else zeros).T


@dataclass(frozen=True)
class AWQRows(ColumnRows):
    """AWQ's version `gemm`: `qweight` int32, `(D, V / 8)`, 4 bits; `scales` `(G, V)`; `qzeros` `(G, V / 8)`.

    A word has 8 neighbouring tokens in the order 0, 2, 4, 6, 1, 3, 5, 7.

    Args:
        embed_dim: Columns of a row, D.
        bits: Bits of a code, 4.
        group_size: Columns that share a scale.
        scale_dtype: Data type of the scales: `"F32"`, `"F16"` or `"BF16"`.

    Reference: `AutoAWQConverter` of compressed-tensors.
    """

    library: ClassVar[str] = "AWQ"
    title: ClassVar[str] = "heads of version gemm, 4 bits by group"

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes and types that the library has."""
        return {**self.column_choices, "bits": (4,)}

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a head with an eighth as many columns of `qweight` as of `scales`, and its rows."""
        sizes = _column_sizes(module)
        if sizes is None or module.tensors["qweight"].shape[1] == sizes[1]:
            return None
        groups, vocab_size = sizes
        embed_dim, words = module.matrix("qweight", "I32")
        zero_shape = module.matrix("qzeros", "I32")
        if 8 * words != vocab_size or zero_shape != (groups, words) or embed_dim % groups or embed_dim % 2:
            raise module.error(
                "qweight",
                f"is [{embed_dim}, {words}] beside scales [{groups}, {vocab_size}] and qzeros {list(zero_shape)}: "
                f"neither GPTQ nor AWQ of version gemm and 4 bits",
                FULL_PRECISION,
            )
        if module.settings.get("bits", 4) != 4:
            raise module.error("qweight", "has 4 bits", stated=f"{module.settings['bits']} bits")
        return cls(embed_dim, 4, embed_dim // groups, module.dtype("scales")), vocab_size

    def rows_of_codes(self, columns: Tensor) -> Tensor:
        """Return the rows of codes, a few thousand tokens at a time."""
        step, rows = _TOKENS_AT_ONCE // 8, []
        for start in range(0, columns.shape[1], step):
            codes = self.rows_of_zeros(columns[:, start : start + step], 8 * min(step, columns.shape[1] - start))
            rows.append(codes[:, ::2] | codes[:, 1::2] << 4)
        return torch.cat(rows)

    def rows_of_zeros(self, words: Tensor, vocab_size: int) -> Tensor:
        """Return the codes of 4 bits in words, transposed."""
        codes: Tensor = unpack(words.contiguous().view(torch.uint8), 4, vocab_size)
        in_order: Tensor = codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T
        return in_order


def _column_sizes(module: StoredModule) -> tuple[int, int] | None:
    """Return the numbers of groups and tokens of a module with `qweight` of int32; `None` for another module."""
    if module.dtype("qweight") != "I32":
        return None
    groups, vocab_size = module.matrix("scales", *_FLOATS)
    module.matrix("qweight", "I32")
    return groups, vocab_size
