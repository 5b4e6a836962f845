"""Parameters that DeepSpeed's ZeRO-3 has partitioned, which is refused where rows are needed.

Such a parameter has the shape `(0,)` except while DeepSpeed gathers it; each process has a part of its numbers in
`ds_tensor`, and its shape is `ds_shape`.

Reference: deepspeed/runtime/zero/partition_parameters.py, DeepSpeed 0.19.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from embedlayer.core.errors import SizeError


def refuse_partitioned(parameters: Iterable[tuple[str, Tensor | None]], action: str, *, gathered: bool = True) -> None:
    """Raise a `SizeError` if DeepSpeed's ZeRO-3 has partitioned one of the named parameters."""
    for name, parameter in parameters:
        if not hasattr(parameter, "ds_id"):
            continue
        each: Any = parameter
        if gathered and each.shape == each.ds_shape:
            continue
        remedy = "in deepspeed.zero.GatheredParameters([parameter])" if gathered else "before deepspeed.initialize"
        raise SizeError(
            f"DeepSpeed's ZeRO-3 has partitioned {name or 'this parameter'} {tuple(each.ds_shape)}, which {action} "
            f"here only whole: do it {remedy}, or shard the model with FSDP2 (fully_shard) instead."
        )
