"""Matrices that other libraries quantised, for the tests of stored formats: their tensors, and what they stand for.

Each case is built by the library itself, and so are the numbers that its rows must equal.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from embedlayer.formats.stored import StoredModule
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

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    rows: Tensor
    metadata: dict[str, str] = {}

    @property
    def module(self) -> StoredModule:
        """Return the module that has these tensors."""
        infos = {
            name: TensorInfo(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), Path("model.safetensors"), 0, 0)
            for name, tensor in self.tensors.items()
        }
        return StoredModule(NAME, infos, self.tensors.__getitem__, self.settings, self.metadata)


def weights(embed_dim: int, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Return rows of a table, some of them zero, constant or large."""
    rows = 0.05 * torch.randn(vocab_size, embed_dim, generator=torch.Generator().manual_seed(embed_dim))
    rows[3], rows[5], rows[7] = 0.0, 0.25, 40 * rows[7]
    return rows.to(dtype)


def mlx_case(
    dtype: str, bits: int, group_size: int, mode: str = "affine", *, embed_dim: int = 384, vocab_size: int = VOCAB_SIZE
) -> StoredCase:
    """Quantise with `mlx.core.quantize`, and dequantise with `mlx.core.dequantize`."""
    mx = pytest.importorskip("mlx.core")

    def from_mlx(array: Any) -> Tensor:
        if array.dtype == mx.bfloat16:
            return torch.from_dlpack(array.view(mx.uint16)).clone().view(torch.bfloat16)
        return torch.from_dlpack(array).clone()

    rows = mx.array(weights(embed_dim, vocab_size=vocab_size).numpy()).astype(getattr(mx, dtype))
    sizes = {"group_size": group_size, "bits": bits, "mode": mode}
    parts = mx.quantize(rows, **sizes)
    numbers = mx.dequantize(*parts, **sizes)
    tensors = dict(zip(("weight", "scales", "biases"), map(from_mlx, parts), strict=False))
    return StoredCase(tensors, sizes, from_mlx(numbers))


def compressed_case(
    container: str,
    dtype: torch.dtype,
    *,
    embed_dim: int = 192,
    vocab_size: int = VOCAB_SIZE,
    **weight_options: Any,
) -> StoredCase:
    """Compress an `nn.Embedding` as compressed-tensors does, with scales by its own rule, and decompress it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    options = QuantizationArgs(**weight_options)
    scheme = QuantizationScheme(targets=["Embedding"], weights=options, format=container)
    rows = weights(embed_dim, dtype, vocab_size)
    groups = {"tensor": rows.reshape(1, -1), "channel": rows.unsqueeze(1)}.get(options.strategy)
    if groups is None:
        groups = rows.unflatten(-1, (-1, options.group_size))
    state = {"weight": rows}
    factor = None
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
        "ignore": ["model.embed_tokens", "lm_head"],  # the tensors decide
    }
    return StoredCase(dict(tensors), settings, compressor.decompress(tensors, scheme)["weight"])


def packed(bits: int, dtype: torch.dtype, symmetric: bool, **options: Any) -> Callable[[], StoredCase]:
    """Return a function that builds a case of `pack-quantized`."""
    return lambda: compressed_case("pack-quantized", dtype, num_bits=bits, symmetric=symmetric, **options)


CASES: dict[str, Callable[[], StoredCase]] = {
    **{
        f"MLX {bits} bits, groups of {size}, {dtype}": lambda bits=bits, size=size, dtype=dtype: mlx_case(
            dtype, bits, size
        )
        for bits, size, dtype in product((2, 3, 4, 5, 6, 8), (32, 64, 128), DTYPES)
    },
    **{
        f"MLX {mode}": lambda mode=mode, bits=bits, size=size: mlx_case("bfloat16", bits, size, mode)
        for mode, bits, size in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))
    },
    **{
        f"pack-quantized {bits} bits, {strategy}, {'' if symmetric else 'a'}symmetric, {name}": packed(
            bits, dtype, symmetric, strategy=strategy, group_size=32 if strategy == "group" else None, **sizes
        )
        for bits, strategy, symmetric, (name, dtype), sizes in product(
            range(1, 9), ("group", "channel"), (True, False), DTYPES.items(), ({},)
        )
    },
    **{
        f"pack-quantized {bits} bits, width {width}": packed(
            bits, torch.bfloat16, False, strategy="channel", embed_dim=width
        )
        for bits, width in product((2, 3, 4, 5, 7), (33, 50))
    },
    "pack-quantized 4 bits, tensor": packed(4, torch.float32, True, strategy="tensor"),
    **{
        f"{container} {strategy}, {'' if symmetric else 'a'}symmetric, {name}": lambda c=container, s=strategy, y=symmetric, d=dtype: (
            compressed_case(
                c,
                d,
                num_bits=8,
                type=c.split("-")[0],
                strategy=s,
                symmetric=y,
                group_size=64 if s == "group" else None,
            )
        )
        for container, strategies, symmetries in (
            ("int-quantized", ("tensor", "channel", "group"), (True, False)),
            ("float-quantized", ("tensor", "channel", "group"), (True,)),
        )
        for strategy, symmetric, (name, dtype) in product(strategies, symmetries, DTYPES.items())
    },
    "nvfp4-pack-quantized": lambda: compressed_case(
        "nvfp4-pack-quantized",
        torch.bfloat16,
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
    **{
        f"{container}": lambda container=container, bits=bits: compressed_case(
            container,
            torch.bfloat16,
            num_bits=bits,
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype=torch.uint8,
        )
        for container, bits in (("mxfp4-pack-quantized", 4), ("mxfp6-pack-quantized", 6), ("mxfp8-quantized", 8))
    },
}
"""A function that builds each case, by name. A library that is not installed skips the test by its name."""
