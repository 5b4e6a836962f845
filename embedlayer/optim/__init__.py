"""Optimizers, parameter groups and gradient clipping for models with large embedding tables."""
