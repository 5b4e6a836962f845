"""Text to token IDs to batches: tokenizers, memory-mapped corpora, sliding windows and samplers."""
