"""Tables and heads that bitsandbytes quantised: int8 by row, and blocks of 4 bits whose scales are plain numbers."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import Codec, pack, signed
from embedlayer.formats.refused import CROSSING_BLOCKS
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows, whole_groups
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import DTYPES

_STATE = "weight.quant_state.bitsandbytes__"
STATES = {f"{_STATE}{kind}": kind for kind in ("nf4", "fp4")}
"""Names of the tensor with the sizes of a matrix of 4 bits, and what each says about the codes."""

_INVERSE_127 = 7.874015718698502e-3
_ROW_DTYPES = {str(DTYPES[name]).removeprefix("torch."): DTYPES[name] for name in ("F32", "F16", "BF16")}


@dataclass(frozen=True)
class Int8Rows(StoredFormat):
    """bitsandbytes' int8: `number = code * SCB * (1 / 127)`, two products in float32, each rounded."""

    # bitsandbytes also quantises the input of a head, so its logits differ. Reference: its `int8_vectorwise_dequant`.

    library: ClassVar[str] = "bitsandbytes"
    title: ClassVar[str] = "int8 by row"
    dtype = torch.float32
    scales: ClassVar[tuple[str, ...]] = ("SCB",)
    is_of_model: ClassVar[bool] = True

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight` of int8 and `SCB`, and the number of rows."""
        if "SCB" not in module.tensors:
            return None
        vocab_size, embed_dim = module.matrix("weight", "I8")
        if (module.dtype("SCB"), module.tensors["SCB"].shape) != ("F32", (vocab_size,)):
            info = module.tensors["SCB"]
            raise module.error("SCB", f"is stored as {info.dtype} {list(info.shape)} for {vocab_size} rows of codes")
        return cls(embed_dim), vocab_size

    @property
    def row_parts(self) -> dict[str, Part]:
        return {"weight": Part(torch.int8, (self.embed_dim,)), "SCB": Part(torch.float32, ())}

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        codes, width = rows["weight"].view(torch.uint8), self.embed_dim
        codec = Codec(codes, 8, signed(8), rows["SCB"].unsqueeze(1), width, width, torch.float32)
        return codec._replace(factor=_INVERSE_127)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes and scales, as `int8_vectorwise_quant` computes them of rows in float16."""
        # A row of zeros has codes of 0 here; bitsandbytes divides zero by zero.
        halves = values.to(torch.float16)
        largest = halves.abs().amax(1).to(torch.float32)
        factor = (127.0 / largest).where(largest > 0, 0.0).unsqueeze(1)
        return {"weight": (halves * factor).round().to(torch.int8), "SCB": largest}


@dataclass(frozen=True)
class FourBitRows(StoredFormat):
    """bitsandbytes' `nf4` and `fp4`: `number = quant_map[code] * absmax[block]`, in float32."""

    # `weight` is uint8 `(V D / 2, 1)` in the file, the first of two codes in the high bits; in memory in the low bits.
    # Absmax that is itself quantised is refused: 256 blocks share a scale, all an offset. Reference: `dequantize_4bit`.

    library: ClassVar[str] = "bitsandbytes"
    title: ClassVar[str] = "nf4 and fp4 by block, absmax not quantised"
    scales: ClassVar[tuple[str, ...]] = ("absmax", "quant_map")

    block_size: int
    row_dtype: str

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the sizes, types and names that the library has."""
        return {
            "embed_dim": whole_groups(self.block_size),
            "block_size": range(2, self.embed_dim + 1, 2),
            "row_dtype": tuple(_ROW_DTYPES),
        }

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a module with `weight` of 4 bits and plain `weight.absmax`, and the number of rows."""
        state_name = next((name for name in STATES if name in module.tensors), None)
        if state_name is None:
            return None
        if "weight.nested_absmax" in module.tensors:
            return None  # `embedlayer.formats.refused` says why
        state = _state(module, state_name)
        shape, block_size = state.get("shape"), state.get("blocksize")
        if not (isinstance(shape, list) and len(shape) == 2 and isinstance(block_size, int) and block_size > 0):
            raise module.error(state_name, f"states shape {shape} and blocksize {block_size}")
        vocab_size, embed_dim = shape
        if embed_dim % block_size or block_size % 2:
            raise CROSSING_BLOCKS.error(module, state_name)
        wanted = {
            "weight": ("U8", (vocab_size * embed_dim // 2, 1)),
            "weight.absmax": ("F32", (vocab_size * embed_dim // block_size,)),
            "weight.quant_map": ("F32", (16,)),
        }
        for name, (dtype, size) in wanted.items():
            info = module.tensors.get(name)
            if info is None or (info.dtype, info.shape) != (dtype, size):
                is_stored = "is missing" if info is None else f"is stored as {info.dtype} {list(info.shape)}"
                raise module.error(name, f"{is_stored}, for {shape} in blocks of {block_size} {dtype} {list(size)}")
        row_dtype = state.get("dtype")
        return cls(embed_dim, block_size, row_dtype if row_dtype in _ROW_DTYPES else "float32"), vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the matrix that was quantised."""
        return _ROW_DTYPES[self.row_dtype]

    @property
    def row_parts(self) -> dict[str, Part]:
        return {
            "weight": Part(torch.uint8, (self.embed_dim // 2,)),
            "absmax": Part(torch.float32, (self.embed_dim // self.block_size,)),
        }

    @property
    def shared_parts(self) -> dict[str, Part]:
        return {"quant_map": Part(torch.float32, (16,))}

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read a part as rows; of codes, the low bits become the first."""
        if part == "weight":
            codes = module.read(part).reshape(vocab_size, -1)
            return codes << 4 | codes >> 4
        tensor = module.read(f"weight.{part}")
        return tensor.reshape(vocab_size, -1) if part == "absmax" else tensor

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec:
        """Return the rows as a compiled kernel reads them."""
        levels = shared["quant_map"]
        return Codec(rows["weight"], 4, levels, rows["absmax"], self.block_size, self.embed_dim, torch.float32)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes and absmax, as `quantize_4bit` computes them on a CPU: the nearest number of the map."""
        blocks = values.to(torch.float32).unflatten(1, (self.embed_dim // self.block_size, self.block_size))
        absmax = blocks.abs().amax(2)
        scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(2)).clamp(-1, 1).flatten(1)
        levels, order = shared["quant_map"].sort(stable=True)
        codes = order[torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2)]
        return {"weight": pack(codes.to(torch.uint8), 4), "absmax": absmax}

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        """Return codes with the first one in the high bits, absmax, the map, and the JSON state with the new shape."""
        codes, levels = stored.rows["weight"], stored.shared["quant_map"]
        name = next((name for name in STATES if name in module.tensors), None)
        kind = "nf4" if levels[1] < 0 else "fp4"
        sizes = {"quant_type": kind, "blocksize": self.block_size, "dtype": self.row_dtype}
        state = (sizes if name is None else _state(module, name)) | {"shape": [*stored.shape]}
        return {
            "weight": (codes << 4 | codes >> 4).reshape(-1, 1),
            "weight.absmax": stored.rows["absmax"].reshape(-1),
            "weight.quant_map": levels,
            name or f"{_STATE}{kind}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8, device="cpu"),
        }


def _state(module: StoredModule, name: str) -> JsonObject:
    """Return the sizes of a matrix, which are stored as JSON in a tensor of bytes."""
    try:
        state = json.loads(bytes(module.read(name).tolist()).decode())
    except (ValueError, UnicodeDecodeError) as error:
        raise module.error(name, f"is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise module.error(name, "is not a JSON object")
    return state
