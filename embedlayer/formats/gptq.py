"""Heads that GPTQ and AWQ quantised. Their files have tokens as columns; they are repacked into rows on reading."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.families import is_table_name
from embedlayer.formats.codec import Codec, pack, unpack, unsigned
from embedlayer.formats.refused import COLUMN_ORDER, FULL_PRECISION, GPTQ_EMBEDDING
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows, whole_groups
from embedlayer.io.safetensors_files import DTYPES

_FLOATS = ("F16", "BF16", "F32")
_BITS = (2, 3, 4, 8)
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of AWQ of each of 8 neighbouring tokens."""

_AWQ_TOKENS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Token at each place in a word of AWQ."""

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class ColumnRows(StoredFormat):
    """Abstract base class of `number = scale * (code - zero)`, rounded to the dtype of the scales."""

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

    @abstractmethod
    def columns_of_codes(self, rows: Tensor) -> Tensor:
        """Return the stored columns of rows of packed codes: the inverse of `rows_of_codes`."""

    @abstractmethod
    def words_of_zeros(self, zeros: Tensor) -> Tensor:
        """Return the stored words of zero points `(V, G)`: the inverse of `rows_of_zeros`."""

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

    def groups_of(self, values: Float[Tensor, "N D"]) -> Float[Tensor, "N G group_size"]:
        groups: Tensor = values.unflatten(1, (self.embed_dim // self.group_size, self.group_size))
        return groups

    def parts_of(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """Return the parts of rows with codes `(N, G, group_size)`, and scales and zero points `(N, G, 1)`."""
        packed = pack(codes.flatten(1).to(torch.uint8), self.bits)
        return {"qweight": packed, "scales": scale.squeeze(2).to(self.dtype), "qzeros": zero.squeeze(2).to(torch.int16)}

    @property
    def row_multiple(self) -> int:
        """Return the least multiple of 8 tokens whose zero points are whole words of 32 bits."""
        return math.lcm(8, 32 // math.gcd(32, self.bits))

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return codes, scales and zero points with tokens as columns."""
        multiple = self.row_multiple
        if stored.shape[0] % multiple:
            raise CheckpointError(
                f"{self.library} at {self.bits} bits has no {stored.shape[0]} rows: use pad_to_multiple_of={multiple}."
            )
        return {
            "qweight": self.columns_of_codes(stored.rows["qweight"]),
            "qzeros": self.words_of_zeros(stored.rows["qzeros"]),
            "scales": stored.rows["scales"].T.contiguous(),
        }


@dataclass(frozen=True)
class GPTQRows(ColumnRows):
    """GPTQ: `qweight` int32, `(D bits / 32, V)`; `scales` `(G, V)`; `qzeros` `(G, V bits / 32)`; `g_idx` `(D,)`."""

    # Files of `checkpoint_format` `gptq` store zero points minus 1 (`zero_offset` 1), those of `gptq_v2` as they are.
    # Zero points of symmetric files stay `2^(bits - 1)` in new rows: some kernels read none. Reference: GPTQModel's
    # `BaseQuantLinear.dequantize_weight`.

    library: ClassVar[str] = "GPTQ"
    title: ClassVar[str] = "heads of 2, 3, 4 and 8 bits by group, also asymmetric"

    zero_offset: int
    symmetric: bool

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
        offset = 0 if module.settings.get("checkpoint_format") == "gptq_v2" else 1
        record = cls(embed_dim, bits, embed_dim // groups, module.dtype("scales"), offset, symmetric=True)
        zeros = record.rows_of_zeros(module.read("qzeros")[:1], vocab_size)
        is_symmetric = bool((zeros == 2 ** (bits - 1)).all())
        return replace(record, symmetric=is_symmetric), vocab_size

    def rows_of_codes(self, columns: Tensor) -> Tensor:
        """Return the rows of codes: a transposed matrix of words."""
        return columns.T.contiguous().view(torch.uint8)

    def rows_of_zeros(self, words: Tensor, vocab_size: int) -> Tensor:
        """Return the zero points; as in GPTQModel, the addition of 1 may overflow into the next one."""
        words = words + self.word_offset  # wraps around at 32 bits
        zeros = unpack(words.contiguous().view(torch.uint8), self.bits, vocab_size).to(torch.int16)
        return ((zeros + self.zero_offset) % 8 if self.bits == 3 else zeros).T

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return the parts with tokens as columns, and for a new file `g_idx`."""
        parts = super().write(stored, module)
        if stored.shape[0] < self.embed_dim and is_table_name(module.name):
            raise CheckpointError(
                f"A GPTQ table may have no fewer rows ({stored.shape[0]}) than columns ({self.embed_dim})."
            )
        group = torch.arange(self.embed_dim, dtype=torch.int32, device=stored.device) // self.group_size
        return parts if module.tensors else parts | {"g_idx": group}

    @property
    def word_offset(self) -> int:
        """Return what is added to a stored word of zero points; 0 for 3 bits, some of which cross words."""
        return self.zero_offset * sum(1 << place for place in range(0, 32, self.bits)) if self.bits != 3 else 0

    def columns_of_codes(self, rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.int32).T.contiguous()

    def words_of_zeros(self, zeros: Tensor) -> Tensor:
        stored = (zeros.T - self.zero_offset) % 8 if self.bits == 3 else zeros.T
        return pack(stored.to(torch.uint8), self.bits, torch.int32) - self.word_offset

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of rows as GPTQModel's `RTN` and `pack` compute them: rounded to nearest in float32."""
        groups, top = self.groups_of(values.to(torch.float32)), 2**self.bits - 1
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        if self.symmetric:
            high = high.maximum(-low)
            low = low.where(low == 0, -high)
        is_zero = (low == 0) & (high == 0)
        low, high = low.masked_fill(is_zero, -1.0), high.masked_fill(is_zero, 1.0)
        scale = ((high - low) / top).clamp(min=torch.finfo(torch.float32).tiny)
        zero = torch.full_like(scale, 2 ** (self.bits - 1)) if self.symmetric else (-low / scale).round()
        return self.parts_of(((groups / scale).round() + zero).clamp(0, top), scale, zero)


@dataclass(frozen=True)
class AWQRows(ColumnRows):
    """AWQ's version `gemm`: `qweight` int32, `(D, V / 8)`, 4 bits; `scales` `(G, V)`; `qzeros` `(G, V / 8)`."""

    # A word of 32 bits has 8 neighbouring tokens in the order 0, 2, 4, 6, 1, 3, 5, 7. Reference: compressed-tensors'
    # `AutoAWQConverter`.

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

    def columns_of_codes(self, rows: Tensor) -> Tensor:
        """Return the words of codes, a few thousand tokens at a time."""
        parts = rows.split(_TOKENS_AT_ONCE)
        return torch.cat([self.words_of_zeros(unpack(part, 4, self.embed_dim)) for part in parts], dim=1)

    def words_of_zeros(self, zeros: Tensor) -> Tensor:
        """Return codes of 4 bits in words, transposed."""
        in_words = zeros.T.unflatten(1, (-1, 8))[..., _AWQ_TOKENS].flatten(1)
        return pack(in_words.to(torch.uint8), 4, torch.int32)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of rows as AutoAWQ's `pseudo_quantize_tensor` computes them, in the dtype of the scales."""
        # The range of a group includes zero: AutoAWQ clips all numbers of a group that have one sign.
        groups = self.groups_of(values.to(self.dtype))
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scale = (high - low).clamp(min=1e-5) / 15
        zero = (-(low / scale).round()).clamp(0, 15)
        return self.parts_of(((groups / scale).round() + zero).clamp(0, 15), scale, zero)


def _column_sizes(module: StoredModule) -> tuple[int, int] | None:
    """Return the numbers of groups and tokens of a module with `qweight` of int32; `None` for another module."""
    if module.dtype("qweight") != "I32":
        return None
    groups, vocab_size = module.matrix("scales", *_FLOATS)
    module.matrix("qweight", "I32")
    return groups, vocab_size
