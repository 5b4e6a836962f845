"""What FSDP must know of our modules: they are entered by more doors than `forward`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from embedlayer.layers.prediction_head import PredictionHead
from embedlayer.pretrained import Pretrained

DOORS = (
    *("look_up", "rows", "raw_logits", "logits", "loss", "token_log_probs"),  # of tables and heads
    *("vectors", "bias"),  # of positions
    *("input", "hidden", "transform"),  # of layers, decoders and heads with something before them
)


def register_fsdp_methods(model: nn.Module) -> nn.Module:
    """Let all that is called of our modules under `fully_shard` gather their parameters first, as `forward` does.

    That is `loss`, `logits`, `rows` and the like of tables, heads, `DecoderLM` and `EmbeddingLayer`, and the vectors
    and biases of positions. A table's `rows` are then a copy.

    Args:
        model: After `fully_shard` was called on it, on its parts or on both.

    Returns:
        The same model.

    Reference: torch/distributed/fsdp/_fully_shard, `register_fsdp_forward_method`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and isinstance(module, Pretrained | PredictionHead):
            _open_doors(module)
    return model


def _open_doors(module: nn.Module) -> None:
    """Gather at every door but `forward`, where FSDP does; who is inside goes on through the others without.

    FSDP would divide the parameters when the inner method returns, under the hands of the outer one.
    """
    inside = False

    def door(plain: Callable[..., Any], gathering: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def enter(*args: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:
                return plain(*args, **options)
            inside = True
            try:
                return gathering(*args, **options)
            finally:
                inside = False

        return enter

    for name in ("forward", *DOORS):
        plain = getattr(module, name, None)
        if not inspect.ismethod(plain):  # a head's `bias` is a parameter; what was registered before is a function
            continue
        if name == "rows":
            setattr(module, name, _copied(plain))
        if name != "forward":
            register_fsdp_forward_method(module, name)
        setattr(module, name, door(plain, getattr(module, name)))
    if hasattr(module, "stored"):
        module.__dict__["stored"] = _nowhere


def _copied(rows: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    """Rows that stay when the parameter that they were a view of is divided again."""

    @functools.wraps(rows)
    def copied(start: int, stop: int) -> Tensor:
        return rows(start, stop).clone()

    return copied


def _nowhere(_: object) -> None:
    """What is stored cannot be read where it lies: only a part is here."""
