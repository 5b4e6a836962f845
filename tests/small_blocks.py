"""Blocks of few rows and chunks of few tokens, so that small tests have several of both."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from embedlayer.core import block_sizes
from embedlayer.losses import chunk_size

NAMES = {"tokens": "MAX_CHUNK_TOKENS", "rows": "ROWS_OF_A_BLOCK"}


@contextmanager
def small_blocks(*, device: str = "cpu", **sizes: int | str | None) -> Iterator[None]:
    """Change sizes of blocks on a device, such as `table_rows`, by the names of `core.block_sizes` and `chunk_size`.

    `tokens` are the most of a chunk of a loss, and `rows` those whose logits are computed at once. A size may be the
    name of the device that has it.
    """
    with ExitStack() as stack:
        for key, size in sizes.items():
            name = NAMES.get(key, key.upper())
            if size is not None:
                module = block_sizes if hasattr(block_sizes, name) else chunk_size
                own = getattr(module, name)
                stack.enter_context(patch.dict(own, {device: own[size] if isinstance(size, str) else size}))
        yield
