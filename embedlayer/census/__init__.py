"""Census of a model or a folder, for edits of its vocabulary: what names a token ID or has an entry for each token.

`configurations` finds the token IDs in configurations and modules, and computes their values after an edit. `tensors`
finds the parameters and buffers whose size follows the vocabulary.
"""
