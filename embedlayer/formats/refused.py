"""Layouts of quantised tables and heads that are not read, with the reason and what to do instead."""

from collections.abc import Callable
from typing import NamedTuple

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.stored import StoredModule
from embedlayer.formats.torchao import CODES, TorchAORows

FULL_PRECISION = "Load the checkpoint in full precision that was quantised."
"""Advice for layouts that no program dequantises on every machine."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")


class RefusedLayout(NamedTuple):
    """A layout that is not read.

    Attributes:
        library: Library that defines it.
        title: What the library calls it.
        reason: Why it is not read.
        part: Returns the tensor by which it is recognised; `None` for a module in another layout.
        advice: What to do instead, as a sentence.
    """

    library: str
    title: str
    reason: str
    part: Callable[[StoredModule], str | None]
    advice: str = FULL_PRECISION

    def error(self, module: StoredModule, part: str) -> CheckpointError:
        """Return, without raising it, the error for a module in this layout, which names the tensor `part`."""
        return module.error(
            part, f"belongs to {self.title} of {self.library}, which is not read: {self.reason}", self.advice
        )


def _first(*names: str) -> Callable[[StoredModule], str | None]:
    """Return a function that returns the first of some tensors that a module has."""
    return lambda module: next((name for name in names if name in module.tensors), None)


def _float8_blocks(module: StoredModule) -> str | None:
    """Return the scales of blocks of FP8 codes."""
    name = _first("weight_scale_inv", "scale")(module)
    is_matrix = name is not None and len(module.tensors[name].shape) == 2
    return name if is_matrix and module.dtype("weight") in _FLOAT8 else None


def _other_torchao(module: StoredModule) -> str | None:
    """Return the codes of a type of torchao that is not read."""
    return CODES if CODES in module.tensors and TorchAORows.recognise(module) is None else None


REFUSED = (
    RefusedLayout(
        "DeepSeek",
        "FP8 in blocks of rows and columns",
        "128 rows share a scale, so no row has scales of its own",
        _float8_blocks,
        "Dequantise it with the package compressed-tensors: from compressed_tensors.entrypoints.convert import "
        "FP8BlockDequantizer, convert_checkpoint; convert_checkpoint(folder, new_folder, "
        "FP8BlockDequantizer.from_pretrained(folder)).",
    ),
    RefusedLayout(
        "bitsandbytes",
        "nf4 and fp4 with double quantisation",
        "absmax is itself quantised, 256 of them share a scale, and all an offset",
        _first("weight.nested_absmax"),
        "Dequantise the model with the packages transformers and bitsandbytes: "
        "model = AutoModelForCausalLM.from_pretrained(folder).dequantize(); model.save_pretrained(new_folder).",
    ),
    RefusedLayout(
        "torchao",
        "int4 and the types for GPUs",
        "torchao itself dequantises them on a GPU only, or not at all",
        _other_torchao,
    ),
    RefusedLayout("ExLlamaV3", "EXL3", "a trellis code runs over blocks of 16 rows", _first("trellis")),
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
"""The layouts that are refused by name."""


def refusal(module: StoredModule) -> CheckpointError | None:
    """Return, without raising it, the error for a module in a layout that is not read; `None` for any other module."""
    return next((layout.error(module, part) for layout in REFUSED if (part := layout.part(module)) is not None), None)
