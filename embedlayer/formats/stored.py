"""Records of stored formats: which tensors of a file store the rows of a table, and how they become numbers.

Every format, ours and those of other libraries, is one `StoredFormat`. It recognises the tensors of a module by their
names, types and shapes, and dequantises rows as its own library does, bit for bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.formats.codec import Codec, SuperBlocks
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import TensorInfo
from embedlayer.saving import Described

CORRECT = "Copy the configuration and the tensors from the same model, or correct the configuration."
"""Advice where a configuration does not fit the tensors."""

_ROWS_AT_ONCE, _WIDEST = 8192, 1 << 40


class StoredModule(NamedTuple):
    """The tensors of one module of a checkpoint, before it is known whether they are a quantised matrix."""

    name: str
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]
    settings: JsonObject
    metadata: Mapping[str, str]

    def dtype(self, part: str) -> str:
        """Return the type of a tensor as safetensors names it, such as `"BF16"`; `""` if the module has no such one."""
        return self.tensors[part].dtype if part in self.tensors else ""

    def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a tensor of two dimensions, none of them 0, and one of some types."""
        info = self.tensors.get(part)
        if info is None:
            raise self.error(part, f"is missing beside {', '.join(sorted(self.tensors))}")
        if len(info.shape) != 2 or 0 in info.shape or info.dtype not in dtypes:
            wanted = f"{' or '.join(dtypes)} of two dimensions"
            raise self.error(part, f"is stored as {info.dtype} {list(info.shape)} instead of {wanted}")
        return info.shape[0], info.shape[1]

    def error(
        self, part: str, what: str, advice: str = "Copy the checkpoint again.", *, stated: str = ""
    ) -> CheckpointError:
        """Return, without raising it, the error for the tensor `part`; `what` completes the sentence."""
        info = self.tensors.get(part) or next(iter(self.tensors.values()))
        if stated:
            what, advice = f"{what}, and the configuration states {stated}", CORRECT
        return CheckpointError(f"{info.file}: {self.name}.{part} {what}. {advice}")


class Part(NamedTuple):
    """Data type and shape of a stored tensor; of one that has a row per token, the shape of a row.

    Attributes:
        dtype: Its data type.
        shape: Its shape, for tensors with rows without the first dimension.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredRows(NamedTuple):
    """The stored tensors of one matrix of V rows.

    Attributes:
        format: Their format.
        rows: Tensors with a row per token, `(V, ...)`, by the names in `format.row_parts`.
        shared: Tensors that all rows share, by the names in `format.shared_parts`.
    """

    format: "StoredFormat"
    rows: dict[str, Tensor]
    shared: dict[str, Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        """Return `(V, D)`."""
        return len(next(iter(self.rows.values()))), self.format.embed_dim

    @property
    def device(self) -> torch.device:
        """Return the device of the stored tensors."""
        return next(iter(self.rows.values())).device

    def codec(self, dtype: torch.dtype) -> Codec | SuperBlocks | None:
        """Return the rows as a compiled kernel reads them, for numbers in `dtype`; `None` if no codec can."""
        return self.format.codec(self.rows, self.shared, dtype)

    def take(self, rows: slice | Tensor) -> "StoredRows":
        """Return the stored tensors of some rows: of a slice, as views, or of IDs, copied."""
        if isinstance(rows, slice):
            return self._replace(rows={name: part[rows] for name, part in self.rows.items()})
        # numbers of one byte are selected as bytes, since `vmap` does not select FP8
        parts = {name: part if part.itemsize > 1 else part.view(torch.uint8) for name, part in self.rows.items()}
        selected = {name: part.index_select(0, rows) for name, part in parts.items()}
        return self._replace(rows={name: part.view(self.rows[name].dtype) for name, part in selected.items()})

    def dequantise(self, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return the numbers of all rows in `dtype`, as the library of the format computes them."""
        return self.format.dequantise(self.rows, self.shared, dtype)

    def quantised(self, values: Float[Tensor, "N D"]) -> "StoredRows":
        """Return the stored tensors of other rows, quantised with the numbers that all rows of this matrix share.

        Raises:
            CheckpointError: No function quantises to the format, or a number is not finite, outside the range of the
                shared scale, or so large that the stored row would not be finite.
        """
        values, span = values.detach(), self.format.value_range(self.shared)
        if not values.isfinite().all():
            raise CheckpointError("New rows have NaN or infinity: rows are quantised from finite numbers.")
        if span is not None and len(values):
            low, high = (float(bound) for bound in values.aminmax())
            ends = [(-low, -span[0]), (high, span[1])]
            if beyond := [number / end if end else math.inf for number, end in ends if number > end]:
                raise CheckpointError(
                    f"A number of new rows is {max(beyond):.3g} times the largest one that {self.format.name} stores "
                    f"{'with the scale that all rows share' if self.shared else 'with its scales of 8 bits'}, "
                    f"[{span[0]:.4g}, {span[1]:.4g}]: it would be clipped. Make the new rows smaller: "
                    f"embedlayer.vocab.MeanInit() gives each the mean of the old ones."
                )
        rows = self._replace(rows=self.format.quantise(values, self.shared))
        if not rows.dequantise(self.format.dtype).isfinite().all():
            raise CheckpointError(
                f"New rows have numbers that are too large for {self.format.name}. Make them smaller."
            )
        return rows

    @property
    def row_bytes(self) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of each row: those of its parts, one after the other. Those of a single part are a view."""
        return join_row_bytes(self.rows.values())

    def of_bytes(self, row_bytes: UInt8[Tensor, "N bytes"]) -> "StoredRows":
        """Return the rows of which these are the `row_bytes`, with the shared tensors of this matrix."""
        parts = self.format.row_parts
        return self._replace(rows=dict(zip(parts, split_row_bytes(row_bytes, parts.values()), strict=True)))


def join_row_bytes(parts: Iterable[Tensor]) -> UInt8[Tensor, "N bytes"]:
    """Return the bytes of each row of several tensors, one tensor after the other. Those of a single one are a view."""
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    bytes_of = [part.contiguous().view(torch.uint8) for part in rows]
    return bytes_of[0] if len(bytes_of) == 1 else torch.cat(bytes_of, dim=1)


def split_row_bytes(row_bytes: UInt8[Tensor, "N bytes"], parts: Collection[Part]) -> list[Tensor]:
    pieces = row_bytes.split([part.dtype.itemsize * math.prod(part.shape) for part in parts], dim=1)
    if len(parts) > 1:  # copied, since a part of a single row may start where its type cannot
        pieces = tuple(piece.clone(memory_format=torch.contiguous_format) for piece in pieces)
    return [piece.view(part.dtype).view(len(piece), *part.shape) for part, piece in zip(parts, pieces, strict=True)]


@dataclass(frozen=True)
class StoredFormat(Described, ABC):
    """Abstract base class of records of formats: the sizes of a stored row, and how rows become numbers.

    A format is a frozen dataclass of numbers and strings, which are its `config`. A new format is one subclass, a line
    in `embedlayer.formats.recognition.FORMATS` and one in `KINDS`, and a case of `tests/formats`.

    Attributes:
        library: Library that defines the format, such as `"MLX"`.
        title: What the library calls it, such as `"affine, 2 to 8 bits"`.
        scales: Names of the parts with scales, whose numbers must be finite; the first one is that of groups.
        is_of_model: Whether the library dequantises to the data type of the model, which the tensors do not tell.
        rounds_factor: Whether a factor that the model rounds to the data type of its rows (Gemma's) is rounded here.
        embed_dim: Columns of a row, D.
    """

    library: ClassVar[str]
    title: ClassVar[str]
    scales: ClassVar[tuple[str, ...]] = ()
    is_of_model: ClassVar[bool] = False
    rounds_factor: ClassVar[bool] = True

    embed_dim: int

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if (value := getattr(self, name)) not in allowed:
                step = allowed.step if isinstance(allowed, range) else 1
                wanted = f"a multiple of {step}" if step > 1 else f"in {allowed}"
                raise SizeError(f"{name} of {type(self).__name__} must be {wanted}, not {value!r}.")

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the values that arguments of the constructor may have, by name: by default any width."""
        return {"embed_dim": whole_groups(1)}

    @property
    def name(self) -> str:
        """Return library and sizes of the stored rows for people: `"MLX (bits 4, group_size 64, scale_dtype BF16)"`."""
        sizes = [f"{each.name} {getattr(self, each.name)}" for each in fields(self) if each.name != "embed_dim"]
        return f"{self.library} ({', '.join(sizes)})" if sizes else self.library

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    @abstractmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module's tensors and the number of rows V; `None` if they are of another format.

        Types and shapes of the tensors decide. Settings of the configuration only tell what the tensors cannot.

        Raises:
            CheckpointError: Tensors contradict each other or the settings, or one is missing.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the data type in which the library returns dequantised rows, unless it is asked for another one."""

    @property
    @abstractmethod
    def row_parts(self) -> dict[str, Part]:
        """Return the stored tensors that have a row per token, by their names; the codes come first."""

    @property
    def shared_parts(self) -> dict[str, Part]:
        """Return the stored tensors that all rows share, by their names: by default there are none."""
        return {}

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of a row: codes, scales and what else the format has for each row."""
        return sum(part.dtype.itemsize * prod(part.shape) for part in self.row_parts.values())

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part; a format whose file has no row per token in it repacks it here."""
        return module.read(part)

    @abstractmethod
    def codec(
        self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Codec | SuperBlocks | None:
        """Return the rows as a compiled kernel reads them, for numbers in `dtype`; `None` if none can.

        It costs the same for any number of rows: no part is copied.

        Args:
            rows: The parts with a row per token, of some or all rows.
            shared: The parts that all rows share.
            dtype: Data type in which the numbers are needed. Most libraries compute in that of the scales and round
                the result to it; the codec of others depends on it.
        """

    def dequantise(
        self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "N D"]:
        """Return the numbers of rows in `dtype`, bit for bit those of the library; by default those of the codec.

        The arguments are those of `codec`. This is the definition in plain PyTorch that kernels are compared with.
        """
        codec = self.codec(rows, shared, dtype)
        assert isinstance(codec, Codec)
        return codec.decode().to(dtype)

    @property
    def row_multiple(self) -> int:
        """Return the number of which V must be a multiple in a file: by default 1."""
        return 1

    @property
    def can_quantise(self) -> bool:
        """Return whether `quantise` can: by default, whether the format has one."""
        return type(self).quantise is not StoredFormat.quantise

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of numbers that rows can have with shared scales, with half a rounding step at both ends.

        `None`, the default, means any: each row has scales of its own.
        """
        return None

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of rows with these numbers, byte for byte as the library quantises them.

        Args:
            values: Numbers of the rows, in any floating-point dtype.
            shared: The parts that all rows share, which do not change.

        Raises:
            CheckpointError: No function quantises to this format, and `can_quantise` is false.
        """
        raise CheckpointError(f"Rows are not quantised to {self.name}: no function of its library writes it.")

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return the tensors of a file that store rows, by the rest of their names: the inverse of `read`.

        By default these are the parts, with shared ones in the shape that `module` has. A format that repacks on
        reading packs here, and sets tensors that state the size.

        Args:
            stored: The rows.
            module: The module with the tensors before. One that has none stands for a new file.

        Raises:
            CheckpointError: The number of rows is no multiple of `row_multiple`.
        """
        shapes = {name: info.shape for name, info in module.tensors.items()}
        shared = {name: part.reshape(shapes.get(name, part.shape)) for name, part in stored.shared.items()}
        return stored.rows | shared

    def metadata(self, stored: StoredRows, module: StoredModule) -> dict[str, str]:
        """Return the metadata of the file that change with the tensors of `write`: by default none. See there."""
        return {}

    def settings_with(self, settings: JsonObject, module: str) -> JsonObject:
        """Return quantisation settings of a configuration that also state that a module is stored in this format.

        Args:
            settings: What the configuration states about the quantisation of other modules; empty if nothing.
            module: Name of the module, such as `"model.embed_tokens"`.

        Raises:
            CheckpointError: The settings are those of another library; or files of this format are read and edited,
                and none is created.
        """
        raise CheckpointError(f"A checkpoint is not converted to {self.name}: such files are read and edited.")

    def other_settings(self, settings: JsonObject) -> CheckpointError:
        """Return, without raising it, the error for settings of another library."""
        return CheckpointError(
            f"The configuration states another quantisation ({settings.get('quant_method', 'MLX')}), beside which no "
            f"program reads a table as {self.name}. Begin with the model before it was quantised."
        )

    def read(self, module: StoredModule, vocab_size: int) -> StoredRows:
        """Return the stored tensors of the module for which `recognise` returned this record, mapped to the file.

        Raises:
            CheckpointError: A tensor has another type or shape than the others require, or a scale is not finite.
        """

        def part_of(name: str, part: Part, shape: tuple[int, ...]) -> Tensor:
            tensor = self.read_part(module, name, vocab_size)
            if tensor.dtype != part.dtype or tensor.shape != shape:
                found, wanted = (
                    f"{str(dtype).removeprefix('torch.')} {list(size)}"
                    for dtype, size in ((tensor.dtype, tensor.shape), (part.dtype, shape))
                )
                raise module.error(name, f"is stored as {found}, and by the other tensors of the module {wanted}")
            return tensor

        rows = StoredRows(
            self,
            {name: part_of(name, part, (vocab_size, *part.shape)) for name, part in self.row_parts.items()},
            {name: part_of(name, part, part.shape) for name, part in self.shared_parts.items()},
        )
        for name in self.scales:
            tensor: Any = rows.rows.get(name, rows.shared.get(name))
            if tensor is not None and tensor.is_floating_point() and not tensor.to(torch.float32).isfinite().all():
                raise module.error(name, "holds NaN or infinity")
        for start in range(0, vocab_size, _ROWS_AT_ONCE) if self.scales else ():
            some = rows.take(slice(start, start + _ROWS_AT_ONCE))
            codec = self.codec(some.rows, some.shared, self.dtype)
            if isinstance(codec, Codec) and not codec.scales().isfinite().all():
                raise module.error(self.scales[0], "holds scales that are NaN or infinite")
        return rows


def codec_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the data type to which a codec rounds products for a library that computes in `dtype`."""
    return torch.float32 if dtype == torch.float64 else dtype


def whole_groups(group_size: int) -> range:
    """Return the widths of rows of whole groups of columns; a size below 1 is taken for 1."""
    return range(max(1, group_size), _WIDEST, max(1, group_size))
