"""Embedding tables: dense, factorised, quantised, row-sparse, and a frozen table with trained delta rows."""
