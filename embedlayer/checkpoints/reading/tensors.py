"""Tensors of a checkpoint that a layer needs: their names, checks of shape and dtype, and a record of what was read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.configuration import stated_dtype
from embedlayer.checkpoints.refusals import quantised_parts
from embedlayer.core.errors import CheckpointError
from embedlayer.families.field_types import Names
from embedlayer.formats.stored import StoredRows
from embedlayer.io.safetensors_files import DTYPES, TensorInfo
from embedlayer.saving import FLOATS

ROWS_AT_ONCE = 8192

ENDS = ("table.weight", "decoder.table.weight", "per_layer.table.weight", "head.weight", "head.output.weight")
"""Keys of tensors that may be stored rows: those of tables and of untied heads."""

DEQUANTISED = ("per_layer.projection.weight",)
"""Keys of tensors that may be stored rows in the checkpoint, and are numbers in the layer."""


@dataclass(frozen=True)
class LoadedTensor:
    """Name and sizes of a tensor that was read from a checkpoint.

    Attributes:
        key: Key of the tensor in the `state_dict` of the layer.
        name: Name of the tensor in the checkpoint.
        shape: Shape in the checkpoint.
        dtype: Dtype in the checkpoint, as safetensors names it, such as `"BF16"`.
        nbytes: Number of bytes in the checkpoint.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class CheckpointTensors:
    """Reads tensors of one checkpoint by the ends of their names, checks them, and records what was read.

    `dtype` is the one to which tensors are converted; `None` for that of the checkpoint. Keys are those of the
    `state_dict` of the layer, names those of tensors in the checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str, family_name: str
    ) -> None:
        self.checkpoint, self.device, self.family_name = checkpoint, device, family_name
        self.dtype, self.is_dtype_requested = dtype, dtype is not None
        self.config_file = str(checkpoint.file(CONFIG) or checkpoint.name)
        self.by_key: dict[str, Tensor] = {}  # tensors that were read; on meta for stored rows, until `use_stored`
        # the name that was read for a key, then those of equal copies; without a name it cannot be written back
        self.names: dict[str, tuple[str, ...]] = {}
        self.stored: dict[str, StoredRows] = {}  # by the key of a table or head: rows that were read instead of numbers
        # by the same keys: for each tensor that stores the rows, its key and the rest of its name after the module
        self.stored_keys: dict[str, dict[str, str]] = {}
        self.read_tensors: list[LoadedTensor] = []  # in order
        self.notes: list[str] = []  # sentences for the user about what was skipped or contradictory
        self.nonfinite_rows: dict[str, int] = {}  # "table", "decoder's table" or "head": rows with NaN or infinity

    @property
    def state_names(self) -> dict[str, Names]:
        """Return `names` by the keys of the layer's `state_dict`, in which stored rows are several tensors."""
        names: dict[str, Names] = {}
        for key, own in self.names.items():
            parts = self.stored_keys.get(key)
            if parts is None:
                names[key] = own
            else:
                starts = [name[: name.rfind(".") + 1] for name in own]
                names |= {part: tuple(start + rest for start in starts) for part, rest in parts.items()}
        return names

    @property
    def own_names(self) -> set[str]:
        """Return the names of the tensors that were read, of equal copies, and of all tensors beside stored rows."""
        stored = [name for key in self.stored for name in self.names.get(key, ())]
        beside = {each for name in stored for each in self.checkpoint.module_tensors(name).values()}
        return beside | {name for names in self.names.values() for name in names}

    @property
    def remedy(self) -> str:
        """Return what to do about a tensor that is missing or has another shape, as a sentence."""
        if "auto_map" in self.checkpoint.config:
            return f"The model has code of its own (auto_map), which is not run: it may not be a {self.family_name}."
        return "Copy the checkpoint again."

    def has(self, names: Names) -> bool:
        return bool(self.checkpoint.find(*names))

    def matrices(self, names: Names) -> list[str]:
        """Return the full names of the checkpoint's two-dimensional tensors whose names end in one of `names`.

        The order is that of `names`, so the preferred tensor is first. Tensors of a numbered block are last: blocks
        that predict several tokens (DeepSeek) may have tables and heads of their own.
        """
        candidates = sorted(dict.fromkeys(self.checkpoint.find(*names)), key=is_in_block)
        matrices = [name for name in candidates if len(self.info(name).shape) == 2]
        if candidates and not matrices and not is_in_block(candidates[0]):
            info = self.info(candidates[0])
            raise CheckpointError(f"{info.file}: {info.name} {list(info.shape)} is no matrix. {self.remedy}")
        return matrices

    def info(self, name: str) -> TensorInfo:
        """Return what `Checkpoint.matrix_info` returns: for stored rows the shape of the matrix."""
        return self.checkpoint.matrix_info(name)

    def sizes(self, name: str) -> str:
        """Return the shape of a tensor of the checkpoint as text, such as `"50,257 x 768"`."""
        return " x ".join(f"{size:,}" for size in self.info(name).shape)

    def read(self, key: str, name: str, *, aliases: Names = ()) -> Tensor:
        """Read a tensor by its full name into `by_key`, its name and `aliases`, its equal copies, into `names`.

        For stored rows of a table or head, the result has no numbers and is on the meta device; `stored[key]` has them.
        """
        self.refuse_quantised(key, (name,), name)
        if key in (*ENDS, *DEQUANTISED) and self.checkpoint.stored(name) is not None:
            tensor = self._read_stored(key, name)
            if key in DEQUANTISED:  # it cannot be written back, so it has no names
                with torch.device("cpu"):  # layers are built on the meta device
                    self.by_key[key] = self.stored.pop(key).dequantise(tensor.dtype).to(self.device)
                return self.by_key[key]
        else:
            info = self.checkpoint.info(name)
            tensor = self.checkpoint.read(name, dtype=self.dtype, device=self.device)
            self.read_tensors.append(LoadedTensor(key, name, info.shape, info.dtype, info.nbytes))
        self.by_key[key] = tensor
        self.names[key] = (name, *aliases)
        return tensor

    def _read_stored(self, key: str, name: str) -> Tensor:
        """Read the stored rows of a weight into `stored[key]`, and return a tensor of their size on the meta device."""
        rows = self.stored[key] = self.checkpoint.read_stored(name)
        for rest, full_name in self.checkpoint.module_tensors(name).items():
            info, own_key = self.checkpoint.info(full_name), f"{key.removesuffix('.weight')}.{rest}"
            self.read_tensors.append(LoadedTensor(own_key, full_name, info.shape, info.dtype, info.nbytes))
        own = rows.format.dtype
        if rows.format.is_of_model:
            stated = f"torch.{stated_dtype(self.checkpoint.config)}"
            own = next((each for each in FLOATS if str(each) == stated), own)
        return torch.empty(rows.shape, dtype=self.dtype or own, device="meta")

    def use_stored(self, key: str, module: str, parts: Mapping[str, str]) -> None:
        """Assign the stored rows `stored[key]` to a table: its tensors become entries of `by_key`."""
        rows, self.stored_keys[key] = self.stored[key], {}
        rests = {tensor.key.removeprefix(f"{key.removesuffix('.weight')}.") for tensor in self.read_tensors}
        for name, tensor in (rows.rows | rows.shared).items():
            self.by_key[f"{module}.{parts[name]}"] = tensor.to(self.device)
            self.stored_keys[key][f"{module}.{parts[name]}"] = name if name in rests else "weight"

    def require(self, key: str, names: Names, what: str, shape: tuple[int | None, ...]) -> Tensor:
        """Read the first tensor whose name has one of these ends into `by_key[key]`, and check its shape."""
        name = next(iter(self.checkpoint.find(*names)), None)
        self.refuse_quantised(key, names if name is None else (name,), name or "")
        if name is None:
            called = f"{what} {' or '.join(names)}"
            raise CheckpointError(
                f"{self.checkpoint.name} is of family {self.family_name} but has no {called}. {self.remedy}"
            )
        info = self.info(name)
        if len(info.shape) != len(shape) or any(
            expected not in (None, size) for expected, size in zip(shape, info.shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"{info.file}: the {what}, {name}, has shape {list(info.shape)}, not [{wanted}] as in "
                f"{self.config_file}. {self.remedy}"
            )
        return self.read(key, name)

    def refuse_quantised(self, key: str, names: Names, stored_name: str = "") -> None:
        """Raise a `CheckpointError` if weights are stored in quantised form: numbers without scales are no weights.

        `stored_name` is the full name of the tensor that would be read; empty if no tensor has one of `names`. Integers
        without scales are accepted if the caller requested a dtype and the configuration states no quantisation.
        """
        if key in (*ENDS, *DEQUANTISED) and stored_name and self.checkpoint.stored(stored_name) is not None:
            return
        what = key.partition(".")[0]
        parts = quantised_parts(self.checkpoint, names)
        is_in_file = stored_name in self.checkpoint.names
        dtype = self.checkpoint.info(stored_name).dtype if is_in_file else ""
        is_read = DTYPES.get(dtype) in FLOATS or self.checkpoint.gguf is not None  # a GGUF tensor is dequantised
        is_float = not stored_name or is_read
        has_no_scheme = self.checkpoint.quantisation is None
        if not parts and (is_float or (self.is_dtype_requested and has_no_scheme)):
            return
        if not parts and has_no_scheme:
            raise CheckpointError(
                f"{self.checkpoint.info(stored_name).file}: the {what}, {stored_name}, is stored as {dtype}: without "
                f"scales those are no vectors. If its numbers need none, load(..., dtype=torch.float32)."
            )
        name = stored_name if is_in_file else parts[0]
        info = self.checkpoint.info(name)
        scales = ", ".join(part for part in parts if part != name)
        method = (self.checkpoint.quantisation or {}).get("quant_method", "by a method that is not stated")
        raise CheckpointError(
            f"{info.file}: the {what} is quantised ({method}): {name} is {info.dtype} {list(info.shape)} with "
            f"{scales or 'no scales'}. Load the model from which it was quantised; see docs/checkpoints.md."
        )

    def count_nonfinite(self, what: str, key: str, rows: Tensor) -> None:
        """Count the rows of `by_key[key]` that contain NaN or infinity.

        The scales of stored rows are finite; their codes are read if these are numbers in floating point (FP8).
        """
        if key in self.stored:
            rows = next(iter(self.stored[key].rows.values()))
        if rows.is_meta or not rows.is_floating_point():
            return
        count = sum(int((~chunk.float().isfinite().all(-1)).sum()) for chunk in rows.split(ROWS_AT_ONCE))
        if count:
            self.nonfinite_rows[what] = count
            self.notes.append(f"{count:,} of {rows.shape[0]:,} rows of the {what} hold NaN or infinity.")


def is_in_block(name: str) -> bool:
    """Return whether a tensor belongs to a numbered module, such as `model.layers.61.embed_tokens.weight`."""
    return any(part.isdecimal() for part in name.split("."))
