"""How many tokens are in the buffer at once."""

import subprocess
import sys

from embedlayer.losses.chunk_length import chunk_length


def test_chunks_are_small_where_the_vocabulary_is_large_and_even() -> None:
    assert chunk_length(2048, 50257, 768, "cpu", 4) == 293
    assert chunk_length(2048, 512_000, 64, "cpu", 4) == 32
    assert chunk_length(513, 100, 64, "cpu", 4) == 257
    assert chunk_length(0, 100, 64, "cpu", 4) == 0
    assert chunk_length(10_000, 50257, 768, "cuda", 4) > chunk_length(10_000, 50257, 768, "mps", 4)


def test_torch_is_not_needed() -> None:
    code = "import embedlayer.losses.chunk_length, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
