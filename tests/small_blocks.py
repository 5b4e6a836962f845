"""Blocks of few rows and chunks of few tokens, so that small tests have several of both."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from embedlayer.core.block_sizes import FEW_LOGITS, TABLE_ROWS
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS, ROWS_OF_A_BLOCK


@contextmanager
def small_blocks(
    *,
    tokens: int | None = None,
    rows: int | None = None,
    table_rows: int | None = None,
    few_logits: int | None = None,
    device: str = "cpu",
) -> Iterator[None]:
    """Change sizes of blocks on a device.

    Args:
        tokens: Most tokens of a chunk of a loss.
        rows: Rows whose logits are computed at once.
        table_rows: Rows that are read at once.
        few_logits: Number of logits up to which a loss computes all of them at once; 0 for always in chunks.
        device: Type of the device.
    """
    sizes = {"tokens": tokens, "rows": rows, "table_rows": table_rows, "few_logits": few_logits}
    tables = {"tokens": MAX_CHUNK_TOKENS, "rows": ROWS_OF_A_BLOCK, "table_rows": TABLE_ROWS, "few_logits": FEW_LOGITS}
    with ExitStack() as stack:
        for name, size in sizes.items():
            if size is not None:
                stack.enter_context(patch.dict(tables[name], {device: size}))
        yield
