"""Optimizers: AdamW at the cost of the rows of a batch, parameter groups, and gradient clipping."""
