"""The rules of state by rows, and the training of a table of 40 rows with one of them."""

import torch
from torch import nn

from embedlayer.optim import RowAdagrad, RowAdamW, RowwiseSecondMoment

RULES = {
    "two moments": lambda weights: RowAdamW(weights, lr=0.1),
    "fp32 first moment": lambda weights: RowAdamW(weights, lr=0.1, state=RowwiseSecondMoment()),
    "bf16 first moment": lambda weights: RowAdamW(weights, lr=0.1, state=RowwiseSecondMoment(torch.bfloat16)),
    "no first moment": lambda weights: RowAdamW(weights, lr=0.1, state=RowwiseSecondMoment(None)),
    "Adagrad": lambda weights: RowAdagrad(weights, lr=0.1),
}


def train(table: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Make the steps of these numbers, which determine their IDs."""
    for step in steps:
        optimizer.zero_grad()
        ids = torch.randint(40, (2, 4), generator=torch.Generator().manual_seed(step))
        table(ids).square().sum().backward()
        optimizer.step()
