"""Number of tokens per chunk of a chunked loss. Imports no torch, since the planner computes with it too."""

import math

BUFFER_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
MAX_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}


def tokens_per_chunk(tokens: int, vocab_size: int, embed_dim: int, device: str, itemsize: int) -> int:
    """Return the number of tokens in each chunk: as many as fit into the logits buffer, in chunks of equal size.

    Where the table is much larger than the buffer, a chunk has at least `embed_dim / 4` tokens.

    Args:
        tokens: Tokens in all.
        vocab_size: Rows that each token is multiplied with, V.
        embed_dim: Width of a row, D.
        device: `"cuda"`, or any other device type, which is treated like a CPU.
        itemsize: Bytes of a logit.

    Example:
        >>> tokens_per_chunk(2048, 50257, 768, "cpu", 4)
        293
    """
    kind = "cuda" if device == "cuda" else "cpu"
    most = max(BUFFER_BYTES[kind] // (vocab_size * itemsize), embed_dim // 4, 16)
    chunks = math.ceil(tokens / min(most, MAX_CHUNK_TOKENS[kind]))
    return math.ceil(tokens / max(chunks, 1))
