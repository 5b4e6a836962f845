"""DeepSpeed, as far as the layer itself need not know of it; see `core.partitioned` for ZeRO-3."""

from torch.optim import Optimizer

from embedlayer.core.errors import SizeError


def refuse_engine(optimizer: Optimizer) -> None:
    """Raise a `SizeError` for an optimizer of DeepSpeed, whose parameters have no gradient of their own."""
    if type(optimizer).__name__.startswith("DeepSpeed"):
        raise SizeError("DeepSpeed keeps gradients in flat buffers: use DistributedDataParallel, or sharding by torch.")
