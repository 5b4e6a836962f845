"""Imported once by the process whose forks are the ranks of `on_ranks`: numba, and the kernels of training steps.

A process loads them in about a second at its first steps. Without a cache each rank would compile them.
"""

import gc

import torch

from embedlayer import DecoderLM, RotaryEmbedding, RowAdamW, RowSparseEmbedding, TokenEmbedding

ids = torch.arange(6).view(1, 6)
for dtype in (torch.float32, torch.float64):
    model = DecoderLM(TokenEmbedding(8, 4), RotaryEmbedding(4), num_layers=1, num_heads=1).to(dtype)
    table = RowSparseEmbedding(8, 4, dtype=dtype)
    optimizer = RowAdamW([*model.parameters(), *table.parameters()])
    for step in range(2):
        (model.loss(ids, ids) + table(ids + step).sum()).backward()
        optimizer.step()

# What is imported stays: a fork's garbage collections and searches for optimizers leave it out, and copy no page of it.
del model, table, optimizer
gc.collect()
gc.freeze()
gc.enable()
