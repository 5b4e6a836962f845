"""Benchmarks: ours beside the peers, in one run. `python -m benchmarks [CASE...] [--save]`."""
