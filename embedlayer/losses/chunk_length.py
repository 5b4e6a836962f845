"""How many tokens of a chunked loss are in the buffer at once. Without torch, since the planner asks too."""

import math

BUFFER_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 8192}


def chunk_length(tokens: int, vocab_size: int, width: int, device: str, itemsize: int) -> int:
    """Tokens for each chunk: as many as a buffer takes, or a quarter of the width where the table dwarfs the buffer.

    Args:
        tokens: All there are.
        vocab_size: Rows that each is compared with.
        width: Numbers in a row.
        device: `"cuda"`, or any other, which is treated like a CPU.
        itemsize: Bytes of a logit.

    Example:
        >>> chunk_length(2048, 50257, 768, "cpu", 4)
        293
    """
    kind = "cuda" if device == "cuda" else "cpu"
    most = max(BUFFER_BYTES[kind] // (vocab_size * itemsize), width // 4, 16)
    chunks = math.ceil(tokens / min(most, TOKENS_AT_ONCE[kind]))
    return math.ceil(tokens / max(chunks, 1))
