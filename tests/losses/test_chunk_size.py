"""The number of tokens in a chunk."""

import subprocess
import sys

from embedlayer.losses.chunk_size import tokens_per_chunk


def test_chunks_are_small_where_the_vocabulary_is_large_and_even() -> None:
    assert tokens_per_chunk(2048, 50257, 768, "cpu", 4) == 304
    assert tokens_per_chunk(2048, 512_000, 64, "cpu", 4) == 32
    assert tokens_per_chunk(513, 100, 64, "cpu", 4) == 272
    assert tokens_per_chunk(0, 100, 64, "cpu", 4) == 0
    assert tokens_per_chunk(10_000, 50257, 768, "cuda", 4) > tokens_per_chunk(10_000, 50257, 768, "mps", 4)


def test_torch_is_not_needed() -> None:
    code = "import embedlayer.losses.chunk_size, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
