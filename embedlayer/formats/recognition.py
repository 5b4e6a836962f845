"""Find the format of a module's stored tensors."""

from embedlayer.formats.compressed_tensors import CompressedFloatRows, NaiveQuantizedRows, PackQuantizedRows
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.mlx import MLXAffineRows, MLXFloatRows
from embedlayer.formats.stored import StoredFormat, StoredModule

FORMATS: tuple[type[StoredFormat], ...] = (
    GGUFRows,
    MLXAffineRows,
    MLXFloatRows,
    PackQuantizedRows,
    NaiveQuantizedRows,
    CompressedFloatRows,
)
"""The formats that are recognised by the tensors of a module. At most one recognises the same tensors."""


def recognise(module: StoredModule) -> tuple[StoredFormat, int] | None:
    """Return the format of a module's tensors and the number of their rows; `None` if no format recognises them.

    Raises:
        CheckpointError: The tensors contradict each other, or the settings of the configuration.
    """
    return next((record for kind in FORMATS if (record := kind.recognise(module)) is not None), None)
