"""Records of stored formats: which tensors of a file store the rows of a table, and how they become numbers.

Every format, ours and those of other libraries, is one `StoredFormat`. It recognises the tensors of a module by their
names, types and shapes, and dequantises rows as its own library does, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.formats.codec import Codec, SuperBlocks
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import TensorInfo
from embedlayer.saving import Described

_ROWS_AT_ONCE, _WIDEST = 8192, 1 << 40


class StoredModule(NamedTuple):
    """The tensors of one module of a checkpoint, before it is known whether they are a quantised matrix.

    Attributes:
        name: Name of the module, such as `"model.embed_tokens"`.
        tensors: Type and shape of each of its tensors by the rest of the name, such as `"weight_scale"`.
        read: Returns one of them by this rest of the name, mapped to the file.
        settings: What the configuration says about the quantisation of the model; empty if it says nothing.
        metadata: Metadata of the file that has the tensors.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]
    settings: JsonObject
    metadata: Mapping[str, str]

    def dtype(self, part: str) -> str:
        """Return the type of a tensor as safetensors names it, such as `"BF16"`; `""` if the module has no such one."""
        return self.tensors[part].dtype if part in self.tensors else ""

    def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a tensor of two dimensions, none of them 0, and one of some types.

        Raises:
            CheckpointError: The module has no such tensor, or it has another type or shape.
        """
        info = self.tensors.get(part)
        if info is None:
            raise self.error(part, f"is missing beside {', '.join(sorted(self.tensors))}")
        if len(info.shape) != 2 or 0 in info.shape or info.dtype not in dtypes:
            wanted = f"{' or '.join(dtypes)} of two dimensions"
            raise self.error(part, f"is stored as {info.dtype} {list(info.shape)} instead of {wanted}")
        return info.shape[0], info.shape[1]

    def error(self, part: str, what: str, advice: str = "Copy the checkpoint again.") -> CheckpointError:
        """Return, without raising it, the error for the tensor `part`; `what` completes the sentence."""
        info = self.tensors.get(part) or next(iter(self.tensors.values()))
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
        return self._replace(rows={name: _selected(part, rows) for name, part in self.rows.items()})

    def dequantise(self, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return the numbers of all rows in `dtype`, as the library of the format computes them."""
        return self.format.dequantise(self.rows, self.shared, dtype)


def _selected(part: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of a stored tensor; numbers of one byte as bytes, since `vmap` does not select FP8."""
    if part.itemsize > 1:
        return part.index_select(0, ids)
    return part.view(torch.uint8).index_select(0, ids).view(part.dtype)


@dataclass(frozen=True)
class StoredFormat(Described, ABC):
    """Abstract base class of records of formats: the sizes of a stored row, and how rows become numbers.

    A format is a frozen dataclass of numbers and strings, which are its `config`. A new format is one subclass, a line
    in `embedlayer.formats.recognition.FORMATS` and one in `KINDS`, and a case of `tests/formats`.

    Attributes:
        library: Library that defines the format, such as `"MLX"`.
        title: What the library calls it, such as `"affine, 2 to 8 bits"`.
        scales: Names of the parts with scales, whose numbers must be finite; the first one is that of groups.
        embed_dim: Columns of a row, D.
    """

    library: ClassVar[str]
    title: ClassVar[str]
    scales: ClassVar[tuple[str, ...]] = ()

    embed_dim: int

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise SizeError(f"{name} of {type(self).__name__} must be in {allowed}, not {value!r}.")

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the values that arguments of the constructor may have, by name: by default any width."""
        return {"embed_dim": whole_groups(1)}

    @property
    def name(self) -> str:
        """Return library and sizes of the stored rows for people: `"MLX (bits 4, group_size 64, scale_dtype BF16)"`."""
        sizes = [f"{each.name} {getattr(self, each.name)}" for each in fields(self) if each.name != "embed_dim"]
        return f"{self.library} ({', '.join(sizes)})"

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
