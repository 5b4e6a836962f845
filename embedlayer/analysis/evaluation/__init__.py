"""Evaluate tables on human judgements, and language models on a text."""
