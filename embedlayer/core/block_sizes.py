"""How much of a table an operation processes at once, as data by device type.

On a CPU a block fits the cache. On a GPU every block costs launches of kernels, so blocks are larger where their size
does not change last bits of the result.
"""

from collections.abc import Mapping

TABLE_ROWS = {"cpu": 8192, "cuda": 8192}
"""Rows that are read, or multiplied by hidden states, at once. Sums over a vocabulary are added block by block."""

CONVERTED_ROWS = {"cpu": 2048, "cuda": 8192}
"""Rows that are converted to another dtype before a product, at once."""

PENDING_ROWS = {"cpu": 4096, "cuda": 1 << 16}
"""Rows whose pending updates are applied at once by torch operators."""

FEW_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Up to this number of logits a loss computes all of them at once, by the plain definition. It is at least as fast
there, and differentiable any number of times; on a GPU the launches of chunks take longer than the few logits. On a CPU
it is 2 to 3 times as fast for 1,000 rows of width 64, and as fast for rows of width 768.
"""

FEW_VECTORS = {"cpu": 1 << 20}
"""Up to this number of numbers an input embedding without dropout runs separate operations. A fused function costs more
there: it reads the vectors once, but checks, allocates and starts at each call.
"""

NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers of rows in arithmetic that has several temporary tensors, such as an optimizer's step."""

DECODED_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Numbers of looked-up rows in another library's format that torch operators dequantise at once."""

ATTENTION_SCORES = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Numbers of an attention's bias and mask that are computed at once, for a block of queries and all rows of a batch."""

FEW_SCORES = {"cuda": 1 << 23}
"""Up to this number of rows x queries x keys, a mask of documents is computed in place of the documents' lengths."""


def block_size(sizes: Mapping[str, int], device_type: str) -> int:
    """Return the size for a type of device; that of CUDA for an accelerator without an entry."""
    return sizes.get(device_type, sizes["cuda"])
