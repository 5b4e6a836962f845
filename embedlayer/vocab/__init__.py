"""Vocabulary surgery: what a tokenizer's entries are, how they are edited, and what their rows start from."""
