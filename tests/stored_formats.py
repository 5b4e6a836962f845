"""Matrices that other libraries quantised, for the tests of stored formats: their tensors, and what they stand for.

Each case is built by the library itself, and so are the numbers that its rows must equal.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from embedlayer import QuantizedEmbedding
from embedlayer.formats import GGUFBlocks
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.stored import StoredModule, StoredRows
from embedlayer.io.safetensors_files import DTYPE_NAMES, TensorInfo

VOCAB_SIZE = 77
NAME = "model.embed_tokens"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class StoredCase(NamedTuple):
    """A quantised matrix.

    Attributes:
        tensors: Stored tensors by the rest of their names.
        settings: Quantisation settings of the configuration.
        rows: What the library dequantises them to, in its own data type.
        metadata: Metadata of the file.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    rows: Tensor
    metadata: Mapping[str, str] = {}

    @property
    def module(self) -> StoredModule:
        """Return the module that has these tensors."""
        infos = {
            name: TensorInfo(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), Path("model.safetensors"), 0, 0)
            for name, tensor in self.tensors.items()
        }
        return StoredModule(NAME, infos, self.tensors.__getitem__, dict(self.settings), self.metadata)

    def changed(self, **tensors: Tensor | None) -> "StoredCase":
        """Return the case with some tensors replaced, or for `None` removed."""
        every = {**self.tensors, **tensors}
        return self._replace(tensors={name: tensor for name, tensor in every.items() if tensor is not None})


def weights(embed_dim: int, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Return rows of a table, some of them zero, constant or large."""
    rows = 0.05 * torch.randn(vocab_size, embed_dim, generator=torch.Generator().manual_seed(embed_dim))
    rows[3:4], rows[5:6], rows[7:8] = 0.0, 0.25, 40 * rows[7:8]
    return rows.to(dtype)


def mlx_case(rows: Tensor, dtype: str = "float32", mode: str = "affine", **sizes: int) -> StoredCase:
    """Quantise with `mlx.core.quantize` in groups of `group_size` and to `bits`; dequantise with MLX too."""
    mx = pytest.importorskip("mlx.core")

    def from_mlx(array: Any) -> Tensor:
        if array.dtype == mx.bfloat16:
            return torch.from_dlpack(array.view(mx.uint16)).clone().view(torch.bfloat16)
        return torch.from_dlpack(array).clone()

    parts = mx.quantize(mx.array(rows.numpy()).astype(getattr(mx, dtype)), mode=mode, **sizes)
    numbers = mx.dequantize(*parts, mode=mode, **sizes)
    tensors = dict(zip(("weight", "scales", "biases"), map(from_mlx, parts), strict=False))
    return StoredCase(tensors, {"mode": mode, **sizes}, from_mlx(numbers))


def compressed_case(rows: Tensor, container: str, **weight_options: Any) -> StoredCase:
    """Compress an embedding as compressed-tensors does, with scales by its own rule, and decompress it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    options = QuantizationArgs(**weight_options)
    scheme = QuantizationScheme(targets=["Embedding"], weights=options, format=container)
    groups = {"tensor": rows.reshape(1, -1), "channel": rows.unsqueeze(1)}.get(str(options.strategy))
    groups = rows.unflatten(-1, (-1, options.group_size or 1)) if groups is None else groups
    state, factor = {"weight": rows}, None
    if options.strategy == "tensor_group":
        factor = state["weight_global_scale"] = generate_gparam(rows.min(), rows.max())
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), options, factor)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor: Any = BaseCompressor.get_value_from_registry(container)
    tensors = compressor.compress(state, scheme)
    settings = {
        "quant_method": "compressed-tensors",
        "format": container,
        "config_groups": {"group_0": {"targets": ["Embedding"], "weights": options.model_dump(mode="json")}},
        "ignore": [NAME, "lm_head"],  # the tensors decide
    }
    return StoredCase(tensors, settings, compressor.decompress(tensors, scheme)["weight"])


def _mlx_cases() -> dict[str, Callable[[], StoredCase]]:
    """Return all layouts of MLX."""
    cases: dict[str, Callable[[], StoredCase]] = {
        f"MLX {bits} bits, groups of {size}, {dtype}": partial(
            lambda **options: mlx_case(weights(384), **options), dtype=dtype, bits=bits, group_size=size
        )
        for bits, size, dtype in product((2, 3, 4, 5, 6, 8), (32, 64, 128), DTYPES)
    }
    for mode, bits, size in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)):
        cases[f"MLX {mode}"] = partial(mlx_case, weights(384), mode=mode, bits=bits, group_size=size)
    return cases


def _compressed_cases() -> dict[str, Callable[[], StoredCase]]:
    """Return all layouts of compressed-tensors: those of integers in each dtype, width and way to share scales."""
    cases: dict[str, Callable[[], StoredCase]] = {}

    def add(name: str, rows: Tensor, container: str, **options: Any) -> None:
        if options.get("strategy") == "group":
            options.setdefault("group_size", 32)
        cases[f"{container} {name}".strip()] = partial(compressed_case, rows, container, **options)

    for strategy, symmetric, (dtype_name, dtype) in product(("group", "channel"), (True, False), DTYPES.items()):
        how = {"strategy": strategy, "symmetric": symmetric}
        name = f"{strategy}, {'' if symmetric else 'a'}symmetric, {dtype_name}"
        for bits in range(1, 9):
            add(f"{bits} bits, {name}", weights(192, dtype), "pack-quantized", num_bits=bits, **how)
        add(name, weights(192, dtype), "int-quantized", num_bits=8, **how)
        if symmetric:
            add(name, weights(192, dtype), "float-quantized", num_bits=8, type="float", **how)
    for bits, width in product((2, 3, 4, 5, 7), (33, 50)):  # the last word of a row is not full
        options = {"num_bits": bits, "strategy": "channel", "symmetric": False}
        add(f"{bits} bits, width {width}", weights(width, torch.bfloat16), "pack-quantized", **options)
    for dtype_name, dtype in DTYPES.items():
        whole = {"num_bits": 8, "strategy": "tensor"}
        add(f"tensor, {dtype_name}", weights(192, dtype), "float-quantized", type="float", **whole)
        add(f"tensor, {dtype_name}", weights(192, dtype), "int-quantized", symmetric=False, **whole)
        add(f"tensor, {dtype_name}", weights(192, dtype), "pack-quantized", **whole)
    for container, bits in (("mxfp4-pack-quantized", 4), ("mxfp6-pack-quantized", 6), ("mxfp8-quantized", 8)):
        floats = {"num_bits": bits, "type": "float", "strategy": "group", "scale_dtype": torch.uint8}
        add("", weights(192, torch.bfloat16), container, **floats)
    floats = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
    add("", weights(192, torch.bfloat16), "nvfp4-pack-quantized", group_size=16, **floats)
    return cases


CASES: dict[str, Callable[[], StoredCase]] = {**_mlx_cases(), **_compressed_cases()}
"""A function that builds each case, by name. A library that is not installed skips the test by its name."""


def _own(bits: int, **options: Any) -> StoredRows:
    """Return the rows of a `QuantizedEmbedding`."""
    return QuantizedEmbedding.from_table(weights(96), bits, **options).stored_rows


def _in_blocks(block_type: str) -> StoredRows:
    """Return rows in a type of blocks of GGUF files."""
    gguf_models = pytest.importorskip("gguf_models")
    packed = torch.from_numpy(gguf_models.blocks(block_type, VOCAB_SIZE))
    return StoredRows(GGUFRows(gguf_models.WIDTH, block_type), {"packed": packed}, {})


OTHER_ROWS: dict[str, Callable[[], StoredRows]] = {
    "int8": partial(_own, 8),
    "int4": partial(_own, 4),
    "int4, groups of 36": partial(_own, 4, group_size=36),
    **{f"q{bits}_0": partial(_own, bits, layout=GGUFBlocks()) for bits in (4, 8)},
    **{f"GGUF {name}": partial(_in_blocks, name) for name in ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")},
}
"""Stored rows of our own formats and of GGUF's, which no module of a folder has."""
