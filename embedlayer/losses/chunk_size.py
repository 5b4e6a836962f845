"""Choose the number of tokens per chunk of a chunked loss.

The module imports no torch, so that the planner can use it without loading torch.
"""

import math

BUFFER_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
MAX_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
MULTIPLE = 16  # matrix products are fastest for a multiple of this number of tokens
ROWS_OF_A_BLOCK = {"cpu": 2048, "cuda": 4096}
"""Rows whose logits are computed and reduced before the next: on a CPU a block stays in the cache."""


def tokens_per_chunk(tokens: int, vocab_size: int, embed_dim: int, device: str, itemsize: int) -> int:
    """Return the number of tokens per chunk, chosen so that the logits of one chunk fit into a buffer.

    The buffer has 64 MiB on a CPU and 512 MiB on CUDA (`BUFFER_BYTES`). A chunk never has more than `MAX_CHUNK_TOKENS`
    tokens. Up to `max(embed_dim // 4, 16)` tokens are allowed even where their logits need more than the buffer. The
    tokens are divided evenly over the chunks, up to the next multiple of 16; only the last chunk may be shorter.

    Args:
        tokens: Number of tokens in all chunks together.
        vocab_size: Number of logits per token, V.
        embed_dim: Width of a row, D.
        device: `"cuda"`, or any other device type, which is treated like a CPU.
        itemsize: Bytes per logit.

    Example:
        >>> tokens_per_chunk(2048, 50257, 768, "cpu", 4)
        304
    """
    kind = "cuda" if device == "cuda" else "cpu"
    most = max(BUFFER_BYTES[kind] // (vocab_size * itemsize), embed_dim // 4, 16)
    most = min(most, MAX_CHUNK_TOKENS[kind])
    size = math.ceil(tokens / max(math.ceil(tokens / most), 1))
    rounded = math.ceil(size / MULTIPLE) * MULTIPLE
    return rounded if rounded <= most and size < tokens else size
