"""Find the format of a module's stored tensors."""

from embedlayer.formats.bitsandbytes import FourBitRows, Int8Rows
from embedlayer.formats.compressed_tensors import CompressedFloatRows, NaiveQuantizedRows, PackQuantizedRows
from embedlayer.formats.gemma import GemmaRows
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.gptq import AWQRows, GPTQRows
from embedlayer.formats.mlx import MLXAffineRows, MLXFloatRows
from embedlayer.formats.modelopt import FP8Rows, NVFP4Rows
from embedlayer.formats.refused import refusal
from embedlayer.formats.stored import StoredFormat, StoredModule
from embedlayer.formats.torchao import TorchAORows

FORMATS: tuple[type[StoredFormat], ...] = (
    GGUFRows,
    MLXAffineRows,
    MLXFloatRows,
    PackQuantizedRows,
    NaiveQuantizedRows,
    CompressedFloatRows,
    NVFP4Rows,
    FP8Rows,
    GemmaRows,
    TorchAORows,
    GPTQRows,
    AWQRows,
    Int8Rows,
    FourBitRows,
)
"""The formats that are recognised by the tensors of a module. At most one recognises the same tensors."""


def recognise(module: StoredModule) -> tuple[StoredFormat, int] | None:
    """Return the format of a module's tensors and the number of their rows; `None` if no format recognises them."""
    record = next((record for kind in FORMATS if (record := kind.recognise(module)) is not None), None)
    if record is None and (error := refusal(module)) is not None:
        raise error
    return record
