"""What FSDP must know of tables and heads: they are entered by more doors than `forward`."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from embedlayer.layers.output import OutputHead
from embedlayer.tables.table import TokenTable

DOORS = ("logits", "loss", "token_log_probs", "rows", "look_up")


def register_fsdp_methods(model: nn.Module) -> nn.Module:
    """Let `logits`, `loss` and the like of every table and head under `fully_shard` gather their rows first.

    Args:
        model: After `fully_shard` was called on its parts.

    Returns:
        The same model.

    A tied head reads its table: shard the table with the head in one module, or call the table's own `loss`.

    Reference: torch/distributed/fsdp/_fully_shard, `register_fsdp_forward_method`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and isinstance(module, TokenTable | OutputHead):
            for door in DOORS:
                if hasattr(module, door):
                    register_fsdp_forward_method(module, door)
    return model
