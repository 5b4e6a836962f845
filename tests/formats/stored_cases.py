"""Matrices that other libraries quantised, for the tests of stored formats: their tensors, and what they stand for.

Each case is built by the library itself, and so are the numbers that its rows must equal.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from covering import some
from safetensors.torch import save_file
from torch import Tensor

import embedlayer as el
from embedlayer.formats import GGUFBlocks
from embedlayer.tables import GGUFEmbedding, LookupTable

VOCAB_SIZE = 77
NAME = "model.embed_tokens"
CODES, SCALE = "_weight_qdata", "_weight_scale"  # tensors of torchao
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class StoredCase(NamedTuple):
    """A quantised matrix.

    Attributes:
        tensors: Stored tensors by the rest of their names.
        settings: Quantisation settings of the configuration.
        rows: What the library dequantises them to, in its own data type.
        metadata: Metadata of the file.
        rows_by_dtype: What it dequantises them to in each data type, if that is not `rows`, rounded.
        quantise: Returns the tensors, of those that rows have, in which the library stores other rows, with the
            numbers that all rows of this matrix share; `None` where no function quantises to the layout.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    rows: Tensor
    metadata: Mapping[str, str] = {}
    rows_by_dtype: Mapping[torch.dtype, Tensor] = {}
    quantise: Callable[[Tensor], Mapping[str, Tensor]] | None = None

    def rows_in(self, dtype: torch.dtype) -> Tensor:
        """Return what the library dequantises the matrix to in a data type."""
        return self.rows_by_dtype.get(dtype, self.rows).to(dtype)

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

    def quantised(rows: Tensor) -> Any:
        name = dtype if rows.dtype == torch.float32 else str(rows.dtype).removeprefix("torch.")
        return mx.quantize(mx.array(rows.float().numpy()).astype(getattr(mx, name)), mode=mode, **sizes)

    def quantise(rows: Tensor) -> dict[str, Tensor]:
        return dict(zip(("weight", "scales", "biases"), map(from_mlx, quantised(rows)), strict=False))

    numbers = from_mlx(mx.dequantize(*quantised(rows), mode=mode, **sizes))
    return StoredCase(quantise(rows), {"mode": mode, **sizes}, numbers, quantise=quantise)


def compressed_case(rows: Tensor, container: str, **weight_options: Any) -> StoredCase:
    """Compress an embedding as compressed-tensors does, with scales by its own rule, and decompress it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    options = QuantizationArgs(**weight_options)
    scheme = QuantizationScheme(targets=["Embedding"], weights=options, format=container)
    compressor: Any = BaseCompressor.get_value_from_registry(container)

    def scales(rows: Tensor, factor: Tensor | None = None) -> dict[str, Tensor]:
        groups = {"tensor": rows.reshape(1, -1), "channel": rows.unsqueeze(1)}.get(str(options.strategy))
        groups = rows.unflatten(-1, (-1, options.group_size or 1)) if groups is None else groups
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), options, factor)
        return {"weight_scale": scale, "weight_zero_point": zero}

    shared = scales(rows) if options.strategy == "tensor" else {}
    if options.strategy == "tensor_group":
        shared["weight_global_scale"] = generate_gparam(rows.min(), rows.max())

    def quantise(rows: Tensor) -> dict[str, Tensor]:
        state = {"weight": rows, **scales(rows, shared.get("weight_global_scale")), **shared}
        return dict(compressor.compress(state, scheme))

    tensors = quantise(rows)
    settings = {
        "quant_method": "compressed-tensors",
        "format": container,
        "config_groups": {"group_0": {"targets": ["Embedding"], "weights": options.model_dump(mode="json")}},
        "ignore": [NAME, "lm_head"],  # the tensors decide
    }
    return StoredCase(tensors, settings, compressor.decompress(tensors, scheme)["weight"], quantise=quantise)


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


def modelopt_case(rows: Tensor, *, is_nvfp4: bool, by_row: bool = False) -> StoredCase:
    """Quantise and dequantise by the formulas of ModelOpt; `test_modelopt.py` compares them with ModelOpt."""
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4" if is_nvfp4 else "FP8", "ignore": ["lm_head*", NAME]}
    if not is_nvfp4:

        def scales(rows: Tensor) -> Tensor:
            largest = rows.abs().amax(1) if by_row else rows.abs().amax()
            return largest.where(largest != 0, 448.0).float() / 448

        whole = scales(rows)

        def quantise(rows: Tensor) -> dict[str, Tensor]:
            scale = scales(rows) if by_row else whole
            codes = (rows.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
            return {"weight": codes} | ({"weight_scale": scale} if by_row else {})

        tensors = {"weight_scale": whole, "input_scale": torch.tensor(0.1), **quantise(rows)}
        factor = tensors["weight_scale"].unsqueeze(-1)
        numbers = {dtype: tensors["weight"].to(dtype) * factor.to(dtype) for dtype in DTYPES.values()}
        return StoredCase(tensors, settings, numbers[torch.float32], {}, numbers, quantise)
    second = rows.abs().amax() / (6 * 448)
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, 0 - levels])

    def quantise_fp4(rows: Tensor) -> dict[str, Tensor]:
        groups = rows.unflatten(1, (-1, 16))
        scale = groups.abs().amax(-1).float() / (6.0 * second)
        scale[scale == 0] = 1.0
        scale = scale.clamp(2**-9, 448).to(torch.float8_e4m3fn)
        scaled = (groups / (scale.float() * second).unsqueeze(-1)).flatten(1)
        codes = torch.searchsorted(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), scaled.abs())
        codes += (scaled.abs().unsqueeze(-1) == torch.tensor([0.75, 1.75, 3.5])).any(-1)
        codes += 8 * (scaled < 0)
        return {"weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scale}

    tensors = {"weight_scale_2": second, "input_scale": torch.tensor(0.1), **quantise_fp4(rows)}
    codes = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).flatten(1).int()
    assert (codes == 8).any()  # a zero with a sign, which ModelOpt writes for small negative numbers
    factor = (tensors["weight_scale"].float() * second).unsqueeze(-1)
    numbers = (levels[codes].unflatten(1, (-1, 16)) * factor).flatten(1)
    return StoredCase(tensors, settings, numbers, quantise=quantise_fp4)


def gemma_case(rows: Tensor, bits: int, *, is_head: bool = False) -> StoredCase:
    """Store rows in transformers' layers for quantised Gemma files, and dequantise with these."""
    gemma_quant = pytest.importorskip("transformers.integrations.gemma_quant")
    top = 2 ** (bits - 1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-6) / max(top - 1, 1)
    codes = (rows / scale).round().clamp(-top, top - 1).to(torch.int64)
    per_byte = 8 // bits
    packed = sum((codes[:, place::per_byte] + top) << bits * place for place in range(per_byte))
    stored = codes.to(torch.int8) if bits == 8 else torch.as_tensor(packed).to(torch.uint8)
    numbers = {}
    for dtype in DTYPES.values():
        if is_head:
            layer = gemma_quant.QuantizedLinear(rows.shape[1], len(rows), num_bits=bits)
            layer.weight.data, layer.weight_scale.data = stored, scale
            numbers[dtype] = layer._dequantize_weights(dtype).detach()
        else:
            layer = gemma_quant.QuantizedEmbedding(len(rows), rows.shape[1], dtype, num_bits=bits)
            layer.embedding_quantized.data, layer.embedding_scale.data = stored, scale
            numbers[dtype] = layer(torch.arange(len(rows))).detach()
    tensors = {"embedding_quantized": stored, "embedding_scale": scale}
    if is_head:
        tensors = {"weight": stored, "weight_scale": scale, "input_activation_scale": torch.tensor(0.0)}
    settings = {
        "quant_method": "gemma",
        "num_bits": 4,
        "quantize_embeddings": True,
        "module_quant_configs": {r"embed_tokens": {"num_bits": bits}},
    }
    return StoredCase(tensors, settings, numbers[torch.float32], rows_by_dtype=numbers)


def torchao_case(rows: Tensor, config: str, **options: Any) -> StoredCase:
    """Quantise an embedding with torchao by the name of a configuration, and flatten it as transformers does."""
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quant_primitives import _quantize_affine_float8, dequantize_affine

    chosen = getattr(torchao, config)(**options)

    def quantised(rows: Tensor) -> Any:
        module: Any = torch.nn.ModuleDict({"table": torch.nn.Embedding.from_pretrained(rows.clone())})
        torchao.quantize_(module, chosen, filter_fn=lambda each, _: isinstance(each, torch.nn.Embedding))
        return module["table"].weight.data

    def flatten(weight: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        flat, metadata = flatten_tensor_state_dict({f"{NAME}.weight": weight})
        tensors = {name.removeprefix(f"{NAME}."): tensor for name, tensor in flat.items()}
        if tensors[CODES].is_floating_point():
            codes = tensors[CODES].to(torch.float32).nan_to_num(0.0)  # torchao divides a row of zeros by zero
            tensors[CODES] = codes.to(tensors[CODES].dtype)
        return tensors, metadata

    weight = quantised(rows)
    tensors, metadata = flatten(weight)
    weight.qdata.copy_(tensors[CODES])
    is_whole = len(tensors[SCALE]) == 1

    def quantise(rows: Tensor) -> dict[str, Tensor]:
        if not is_whole:
            return flatten(quantised(rows))[0]
        if weight.qdata.is_floating_point():
            return {CODES: _quantize_affine_float8(rows, weight.scale)}
        parts = {"granularity": torchao.PerTensor(), "scale": weight.scale, "zero_point": weight.zero_point}
        return {CODES: type(weight).from_hp(rows, **parts).qdata}

    if config.startswith("Float8"):
        numbers = {dtype: weight.dequantize(dtype) for dtype in DTYPES.values()}
    else:
        zero = getattr(weight, "zero_point", None)
        parts = weight.qdata, list(weight.block_size), weight.scale, zero, torch.int8
        numbers = {dtype: dequantize_affine(*parts, output_dtype=dtype) for dtype in DTYPES.values()}
    assert torch.equal(weight.dequantize(), numbers[rows.dtype])
    return StoredCase(tensors, {"quant_method": "torchao"}, numbers[rows.dtype], metadata, numbers, quantise)


def gptq_case(
    rows: Tensor, bits: int, *, group_size: int = 32, checkpoint_format: str = "gptq", symmetric: bool = False
) -> StoredCase:
    """Quantise and pack as GPTQModel's `RTN` does, word by word, and dequantise by its formula; see `test_gptq.py`."""
    top, half, is_first = 2**bits - 1, 2 ** (bits - 1), checkpoint_format == "gptq"

    def words(lines: Tensor) -> Tensor:
        """Pack each line of codes into words of 32 bits, low bits first."""
        packed = []
        for line in lines.tolist():
            number = sum(code << bits * place for place, code in enumerate(line))
            packed.append(number.to_bytes(-(-len(line) * bits // 32) * 4, "little"))
        return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.int32).view(len(lines), -1)

    def codes_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes `(V, G, group_size)`, float32 scales and zero points `(V, G, 1)`."""
        groups = rows.float().unflatten(1, (-1, group_size))
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        if symmetric:
            high = torch.maximum(low.abs(), high)
            low = torch.where(low < 0, -high, low)
        is_zero = (low == 0) & (high == 0)
        low, high = low - is_zero.float(), high + is_zero.float()
        scale = (high - low) / top
        zero = torch.full_like(scale, half) if symmetric else torch.round(-low / scale)
        numbers = (scale * ((groups / scale).round().add(zero).clamp(0, top) - zero)).to(rows.dtype)
        codes = ((numbers + zero * scale) / scale).round().clamp(0, top)  # as `pack` does, of the rounded numbers
        return codes.long(), scale, zero.long()

    def quantise(rows: Tensor) -> dict[str, Tensor]:
        codes, scale, zero = codes_of(rows)
        zeros = words((zero.squeeze(-1).T - int(is_first)) % 8 if bits == 3 else zero.squeeze(-1).T)
        if is_first and bits != 3:
            zeros -= sum(1 << place for place in range(0, 32, bits))
        scales = scale.squeeze(-1).T.to(rows.dtype).contiguous()
        return {"qweight": words(codes.flatten(1)).T.contiguous(), "qzeros": zeros, "scales": scales}

    codes, scale, zero = codes_of(rows)
    numbers = (scale.to(rows.dtype) * (codes - zero).to(rows.dtype)).flatten(1)
    tensors = quantise(rows) | {"g_idx": (torch.arange(rows.shape[1]) // group_size).int()}
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": checkpoint_format, "lm_head": True}
    return StoredCase(tensors, settings, numbers, quantise=quantise)


def awq_case(rows: Tensor, group_size: int = 32) -> StoredCase:
    """Quantise and pack as AutoAWQ stores a head, and dequantise with compressed-tensors' converter and codec."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    def words(lines: Tensor) -> Tensor:
        """Pack codes of 4 bits of 8 neighbouring tokens into a word, in AutoAWQ's order."""
        packed = torch.zeros(len(lines), lines.shape[1] // 8, dtype=torch.int32)
        for place, token in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed |= lines[:, token::8].int() << 4 * place
        return packed

    def quantise(rows: Tensor) -> dict[str, Tensor]:
        groups = rows.unflatten(1, (-1, group_size))
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low).clamp(min=1e-5) / 15
        zero = (-torch.round(low / scale)).clamp(0, 15)
        numbers = (torch.clamp(torch.round(groups / scale) + zero, 0, 15) - zero) * scale
        codes = torch.round((numbers + scale * zero) / scale)  # as `WQLinear_GEMM.from_linear` does
        parts = words(codes.flatten(1).T), words(zero.squeeze(-1).T), scale.squeeze(-1).T.contiguous()
        return dict(zip(("qweight", "qzeros", "scales"), parts, strict=True))

    tensors = quantise(rows)
    converter = converters.AutoAWQConverter(group_size=group_size, ignore=())
    converted = converter.process({f"{NAME}.{name}": tensor for name, tensor in tensors.items()})
    converted = {name.removeprefix(f"{NAME}."): tensor for name, tensor in converted.items()}
    scheme: QuantizationScheme = converter._build_quant_config().config_groups["config_group_0"]
    numbers = PackedQuantizationCompressor.decompress(converted, scheme)["weight"]
    return StoredCase(tensors, {"quant_method": "awq", "bits": 4, "version": "gemm"}, numbers, quantise=quantise)


def bitsandbytes_case(rows: Tensor, kind: str, *, is_nested: bool = False) -> StoredCase:
    """Quantise with bitsandbytes' functions: `kind` is `"int8"`, `"nf4"` or `"fp4"`."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if kind == "int8":

        def quantise(rows: Tensor) -> dict[str, Tensor]:
            codes, scale, _ = functional.int8_vectorwise_quant(rows.half())
            return {"weight": codes.masked_fill((scale == 0).unsqueeze(1), 0), "SCB": scale}  # it divides zero by zero

        tensors = quantise(rows)
        numbers = functional.int8_vectorwise_dequant(*tensors.values())
        tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return StoredCase(tensors, {"load_in_8bit": True}, numbers, quantise=quantise)

    def quantise_blocks(rows: Tensor) -> tuple[Tensor, Any]:
        return functional.quantize_4bit(rows, quant_type=kind, blocksize=64, compress_statistics=is_nested)

    codes, state = quantise_blocks(rows)

    def tensors_of(new_rows: Tensor) -> dict[str, Tensor]:
        codes, state = quantise_blocks(new_rows)
        state.dtype = rows.dtype
        return {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}

    numbers = {}
    for dtype in DTYPES.values():
        state.dtype = dtype
        numbers[dtype] = functional.dequantize_4bit(codes, state)
    return StoredCase(tensors_of(rows), {"load_in_4bit": True}, numbers[rows.dtype], {}, numbers, tensors_of)


def _other_cases() -> dict[str, Callable[[], StoredCase]]:
    """Return the layouts of ModelOpt, Gemma, torchao, GPTQ, AWQ and bitsandbytes."""
    cases: dict[str, Callable[[], StoredCase]] = {
        "ModelOpt NVFP4": partial(modelopt_case, weights(192), is_nvfp4=True),
        "ModelOpt FP8": partial(modelopt_case, weights(192), is_nvfp4=False),
        "ModelOpt FP8 by row": partial(modelopt_case, weights(192), is_nvfp4=False, by_row=True),
        "torchao int8": partial(torchao_case, weights(192), "Int8WeightOnlyConfig", version=2),
        "torchao FP8": partial(torchao_case, weights(192, torch.bfloat16), "Float8WeightOnlyConfig"),
        "torchao int8, tensor": partial(_whole_case, weights(192, torch.bfloat16), "Int8WeightOnlyConfig"),
        "torchao FP8, tensor": partial(_whole_case, weights(192), "Float8WeightOnlyConfig"),
        "torchao 4 bits, symmetric": partial(_intx_case, weights(192, torch.bfloat16), 4, "SYMMETRIC"),
        "torchao 1 bits": partial(_intx_case, weights(192), 1),
        "AWQ": partial(awq_case, weights(64, torch.float16, 80)),
        "bitsandbytes int8": partial(bitsandbytes_case, weights(192), "int8"),
    }
    for bits, is_head in product((2, 4, 8), (False, True)):
        name = f"Gemma {bits} bits{', head' if is_head else ''}"
        cases[name] = partial(gemma_case, weights(192), bits, is_head=is_head)
    for bits, (name, dtype) in product((4, 8), DTYPES.items()):
        cases[f"torchao {bits} bits, {name}"] = partial(_intx_case, weights(192, dtype), bits)
    for bits, (name, dtype) in product((2, 3, 4, 8), DTYPES.items()):
        vocab_size = 96 if dtype == torch.float16 else VOCAB_SIZE  # of 96 rows all words are full
        cases[f"GPTQ {bits} bits, {name}"] = partial(gptq_case, weights(64, dtype, vocab_size), bits)
    full = weights(64, torch.float16, 96)
    cases["GPTQ symmetric"] = partial(gptq_case, full, 4, symmetric=True)
    cases["GPTQ v2"] = partial(gptq_case, full, 4, checkpoint_format="gptq_v2")
    for kind, (name, dtype) in product(("nf4", "fp4"), DTYPES.items()):
        cases[f"bitsandbytes {kind}, {name}"] = partial(bitsandbytes_case, weights(192, dtype), kind)
    return cases


def _whole_case(rows: Tensor, config: str) -> StoredCase:
    """Quantise with torchao with one scale of the whole matrix."""
    torchao = pytest.importorskip("torchao.quantization")
    return torchao_case(rows, config, granularity=torchao.PerTensor())


def _intx_case(rows: Tensor, bits: int, mapping: str = "ASYMMETRIC") -> StoredCase:
    """Quantise to integers of fewer bits in groups of 32 with torchao."""
    torchao = pytest.importorskip("torchao.quantization")
    granularity = torchao.PerGroup(32)
    options = {"weight_dtype": getattr(torch, f"int{bits}"), "mapping_type": torchao.MappingType[mapping]}
    return torchao_case(rows, "IntxWeightOnlyConfig", granularity=granularity, **options)


CASES: dict[str, Callable[[], StoredCase]] = {**_mlx_cases(), **_compressed_cases(), **_other_cases()}
"""A function that builds each case, by name. A library that is not installed skips the test by its name."""


def _short() -> list[str]:
    """Return names of the cases: of those that differ in their data type, groups or width, the next one each time."""
    layouts: dict[str, list[str]] = {}
    for name in CASES:
        layout, _, dtype = name.rpartition(", ")
        layout = re.sub(r"(?<=bits, )(groups of \d+|width \d+|group|channel)", "", layout if dtype in DTYPES else name)
        layouts.setdefault(layout, []).append(name)
    return [names[place % len(names)] for place, names in enumerate(layouts.values())]


CASE_NAMES = some(_short(), CASES)
"""The names of all cases; those of a layout in other data types are `long`."""


@cache
def built(name: str) -> StoredCase:
    """Return a case that is built once, for tests that do not write to its tensors."""
    return CASES[name]()


def built_head(name: str) -> StoredCase:
    """Return the case of a head beside a table of this case, where a library stores heads in another way."""
    return built(f"{name}, head" if f"{name}, head" in CASES else name)


def write(folder: Path, case: StoredCase, name: str = NAME) -> None:
    """Write a folder of a LLaMA that has only a table or head of this name; its configuration states no size of it."""
    config = {"model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 2, "head_dim": 16}
    config["quantization_config"] = dict(case.settings)
    tensors = {f"{name}.{rest}": tensor.clone().contiguous() for rest, tensor in case.tensors.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **case.metadata})
    (folder / "config.json").write_text(json.dumps(config))


def load(case: StoredCase, name: str = NAME) -> LookupTable:
    """Return the table or head of a folder that `write` wrote; it stays mapped to the file."""
    with TemporaryDirectory() as folder:
        write(Path(folder), case, name)
        return el.load(folder, table_only=True if name == NAME else f"{name}.weight").table


def read(case: StoredCase, name: str = NAME) -> Any:
    """Return the stored rows of a case."""
    table = load(case, name)
    assert hasattr(table, "stored_rows"), "the tensors are no stored rows"
    return table.stored_rows


def refused(case: StoredCase, message: str) -> str:
    """Return the error of reading a case: one line that names the file, the module and, by `message`, the tensor."""
    with pytest.raises(el.CheckpointError, match=rf"/model\.safetensors: {re.escape(NAME)}\.{message}") as error:
        load(case)
    return str(error.value)


@cache
def rows_of(name: str) -> Any:
    """Return the stored rows of a case or of `OTHER_ROWS`, for tests that do not write to them."""
    return OTHER_ROWS[name]() if name in OTHER_ROWS else read(built(name))


def _own(bits: int, **options: Any) -> Any:
    """Return the rows of a `QuantizedEmbedding`."""
    return el.QuantizedEmbedding.from_table(weights(96), bits, **options).stored_rows


def _in_blocks(block_type: str) -> Any:
    """Return rows in a type of blocks of GGUF files."""
    gguf_models = pytest.importorskip("gguf_models")
    table = GGUFEmbedding(VOCAB_SIZE, gguf_models.WIDTH, block_type)
    table.packed.copy_(torch.from_numpy(gguf_models.blocks(block_type, VOCAB_SIZE)))
    return table.stored_rows


OTHER_ROWS: dict[str, Callable[[], Any]] = {
    "int8": partial(_own, 8),
    "int4": partial(_own, 4),
    "int4, groups of 36": partial(_own, 4, group_size=36),
    **{f"q{bits}_0": partial(_own, bits, layout=GGUFBlocks()) for bits in (4, 8)},
    **{f"GGUF {name}": partial(_in_blocks, name) for name in ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")},
}
"""Stored rows of our own formats and of GGUF's, which no module of a folder has."""
