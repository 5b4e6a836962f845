"""Layouts of quantised tables and heads that are not read, with the reason and what to do instead."""

from collections.abc import Callable
from typing import NamedTuple

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.stored import StoredModule

FULL_PRECISION = "Load the checkpoint in full precision that was quantised."
"""Advice for layouts that no program dequantises on every machine."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")


class RefusedLayout(NamedTuple):
    """A layout that is not read."""

    library: str
    title: str
    reason: str
    part: Callable[[StoredModule], str | None]
    advice: str = FULL_PRECISION

    def error(self, module: StoredModule, part: str) -> CheckpointError:
        """Return, without raising it, the error for a module in this layout, which names the tensor `part`."""
        what = f"belongs to {self.title} of {self.library}, which are not read: {self.reason}"
        return module.error(part, what, self.advice)


def _first(*names: str) -> Callable[[StoredModule], str | None]:
    """Return a function that returns the first of some tensors that a module has."""
    return lambda module: next((name for name in names if name in module.tensors), None)


def _beside_float8(name: str, *, block_size: int = 0) -> Callable[[StoredModule], str | None]:
    """Return a function that returns the name of a matrix of scales, if a module has it beside codes of FP8."""

    def part(module: StoredModule) -> str | None:
        shape = module.tensors[name].shape if name in module.tensors else ()
        if len(shape) != 2 or module.dtype("weight") not in _FLOAT8:
            return None
        columns = module.tensors["weight"].shape[-1]
        return name if not block_size or columns == block_size * shape[1] else None

    return part


def _not_here(module: StoredModule) -> None:
    """Return `None`: the record of a similar format recognises the layout, and raises its error."""


GPTQ_EMBEDDING = RefusedLayout(
    "GPTQModel",
    "embeddings",
    "their groups run along the vocabulary, so no row has scales of its own, and 8 tokens share a word",
    _not_here,
)
COLUMN_ORDER = RefusedLayout(
    "GPTQ and compressed-tensors",
    "columns that are put into groups in an order of their own (act-order)",
    "columns of a group must be neighbours",
    _not_here,
)
INPUT_FACTOR = RefusedLayout(
    "ModelOpt and torchao",
    "heads with a factor of each column of the hidden states (AWQ, SmoothQuant)",
    "rows alone do not give the logits",
    _not_here,
)
_BITSANDBYTES = (
    "Dequantise the model with the packages transformers and bitsandbytes: "
    "model = AutoModelForCausalLM.from_pretrained(folder).dequantize(); model.save_pretrained(new_folder)."
)
DOUBLE_QUANTISATION = RefusedLayout(
    "bitsandbytes",
    "nf4 and fp4 blocks with double quantisation",
    "absmax is itself quantised, 256 of them share a scale, and all an offset",
    _first("weight.nested_absmax"),
    _BITSANDBYTES,
)
CROSSING_BLOCKS = RefusedLayout(
    "bitsandbytes",
    "nf4 and fp4 blocks that do not divide the width",
    "a block has columns of two rows",
    _not_here,
    _BITSANDBYTES,
)
REFUSED = (
    GPTQ_EMBEDDING,
    COLUMN_ORDER,
    INPUT_FACTOR,
    RefusedLayout(
        "DeepSeek",
        "FP8 blocks of rows and columns",
        "128 rows share a scale, so no row has scales of its own",
        _beside_float8("weight_scale_inv", block_size=128),
        "Dequantise it with the package compressed-tensors: from compressed_tensors.entrypoints.convert import "
        "FP8BlockDequantizer, convert_checkpoint; convert_checkpoint(folder, new_folder, "
        "FP8BlockDequantizer.from_pretrained(folder)).",
    ),
    RefusedLayout(
        "DeepSeek",
        "FP8 blocks of rows and columns of other sizes, or that do not divide the width",
        "the rows of a block share a scale, so no row has scales of its own",
        _beside_float8("weight_scale_inv"),
    ),
    RefusedLayout(
        "DeepSeek",
        "FP8 blocks with scales that are powers of two",
        "128 rows share a scale, so no row has scales of its own",
        _beside_float8("scale"),
    ),
    DOUBLE_QUANTISATION,
    CROSSING_BLOCKS,
    RefusedLayout(
        "torchao",
        "types of int4, MX and NVFP4",
        "torchao has no function that dequantises int4 on a CPU, and the scales of others may be permuted across rows",
        _first("_weight_qdata"),
    ),
    RefusedLayout(
        "ExLlamaV3", "EXL3 matrices", "a trellis code runs over tiles of 16 rows and 16 columns", _first("trellis")
    ),
    RefusedLayout(
        "quanto",
        "packed weights",
        "optimum-quanto itself leaves embeddings dense, and files with a quantised head are not known",
        _first("weight._data", "weight._data._data"),
    ),
    RefusedLayout(
        "HQQ",
        "packed weights",
        "hqq leaves both ends dense, and files with a quantised head are not known",
        _first("W_q"),
    ),
)
"""The layouts that are refused by name. They are looked for where no format recognises a module."""


def refusal(module: StoredModule) -> CheckpointError | None:
    """Return, without raising it, the error for a module in a layout that is not read; `None` for any other module."""
    return next((layout.error(module, part) for layout in REFUSED if (part := layout.part(module)) is not None), None)
