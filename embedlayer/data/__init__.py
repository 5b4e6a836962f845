"""Text to token IDs to batches: tokenizers, the memory-mapped corpus, and the windows cut from it."""
