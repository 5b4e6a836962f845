"""One table over several processes, on PyTorch's own engine (gloo or NCCL, DTensor, distributed checkpoints)."""
