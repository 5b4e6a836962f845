"""Choose the number of tokens per chunk of a pass over the vocabulary.

The module imports no torch, so that the planner can use it without loading torch.
"""

import math
import sys

BUFFER_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
"""Bytes of the logits of a chunk that are kept until their gradients are computed."""

WORK_BYTES = 2**30
"""On CUDA, bytes of the logits of a chunk that are computed again, or that torch operators need intermediate results
of, with these results."""

MAX_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of a chunk whose logits are not kept, or whose hidden states ranks gather; on a CPU of every chunk."""

MULTIPLE = 16  # matrix products are fastest for a multiple of this number of tokens
ROWS_OF_A_BLOCK = {"cpu": 2048, "cuda": sys.maxsize}
"""Rows whose logits are computed and reduced before the next: on a CPU a block stays in the cache, and on CUDA, where
every block costs launches of kernels, it is the whole vocabulary."""

INVARIANT_MULTIPLES = 32, 64
"""With `batch_invariant` the tokens of a chunk are padded to a multiple of the first of these whose results are equal;
see `batch_invariance`. Rows and elements of wider vectors than 64 numbers do not exist on CPUs."""

LEAST_ROWS = 64
"""Least rows of the last of several blocks with `batch_invariant`: products with a few rows round in another way."""

LEAST_TRAINED_TOKENS, FROZEN_TOKENS = 1024, 2048
"""On CUDA, least tokens of a chunk if the gradient of the rows is summed over several; tokens if it is not needed."""


def tokens_per_chunk(
    tokens: int,
    vocab_size: int,
    embed_dim: int,
    device: str,
    itemsize: int,
    *,
    work_bytes: int = 0,
    is_frozen: bool = False,
    is_gathered: bool = False,
    max_bytes: int | None = None,
) -> int:
    """Return the number of tokens per chunk, so that the logits of a chunk fit into a buffer; 0 for no tokens."""
    # On CUDA, up to `2 * embed_dim` tokens are one chunk unless the rows are frozen: their logits need no more memory
    # than the float32 sums over several chunks, and the gradient is rounded once.
    if device == "cuda":
        many = FROZEN_TOKENS if is_frozen else max(2 * embed_dim, LEAST_TRAINED_TOKENS)
        most = tokens if tokens <= 2 * embed_dim and not is_frozen else many
        most = min(most, MAX_CHUNK_TOKENS["cuda"]) if is_gathered else most
        limit = max_bytes or (WORK_BYTES if work_bytes else BUFFER_BYTES["cuda"])
        most = min(most, tokens_within(limit, vocab_size * itemsize + work_bytes))
    else:
        buffer = BUFFER_BYTES["cpu"] if max_bytes is None else max_bytes
        least = max(embed_dim // 4, 16) if max_bytes is None else 1
        most = min(max(buffer // (vocab_size * itemsize), least), MAX_CHUNK_TOKENS["cpu"])
    size = math.ceil(tokens / max(math.ceil(tokens / max(most, 1)), 1))
    rounded = math.ceil(size / MULTIPLE) * MULTIPLE
    return rounded if rounded <= most and size < tokens else size


def tokens_within(max_bytes: int, bytes_per_token: int) -> int:
    """Return how many tokens need at most `max_bytes`: one at least, and of 16 or more a multiple of 16."""
    tokens = max(max_bytes // max(bytes_per_token, 1), 1)
    return tokens // MULTIPLE * MULTIPLE or tokens


def row_blocks(rows: int, size: int, *, least: int = 1) -> list[tuple[int, int]]:
    """Divide rows into blocks of `size`, and return the first row of each and the row behind it."""
    starts = list(range(0, rows, size))
    if len(starts) > 1 and rows - starts[-1] < least:
        starts.pop()
    return list(zip(starts, [*starts[1:], rows], strict=True))
