"""Edits of a vocabulary: tokens added, removed, merged or reordered in tokenizers, live models and folders."""
