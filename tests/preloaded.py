"""Imported once by the process whose forks are the ranks of `on_ranks`: numba, and the kernels of a training step.

A process loads them in about a second at its first step.
"""

import gc

import torch

from embedlayer import DecoderLM, RotaryEmbedding, RowAdamW, TokenEmbedding

model = DecoderLM(TokenEmbedding(8, 4), RotaryEmbedding(4), num_layers=1, num_heads=1)
table = TokenEmbedding(8, 4, row_sparse=True)
optimizer = RowAdamW([*model.parameters(), *table.parameters()])
ids = torch.arange(6).view(1, 6)
(model.loss(ids, ids) + table(ids).sum()).backward()
optimizer.step()

# What is imported stays: a fork's garbage collections and searches for optimizers leave it out, and copy no page of it.
del model, table, optimizer
gc.collect()
gc.freeze()
