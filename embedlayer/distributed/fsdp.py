"""FSDP2 for modules with methods other than `forward` that read parameters, such as `loss` and `logits`."""

import inspect

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from embedlayer.pretrained import Pretrained

METHODS = (
    *("look_up", "rows", "raw_logits", "logits", "uncomputed_logits"),  # of tables and heads
    *("loss", "token_log_probs", "token_statistics", "multi_token_loss"),  # of tables and heads
    *("vectors", "bias"),  # of positions
    *("input", "hidden", "transform"),  # of layers, decoders and heads with a transform before the product
)
"""Methods that use parameters and that programs call directly."""


def register_fsdp_methods(model: nn.Module) -> nn.Module:
    """Make FSDP2 gather parameters for `loss`, `logits`, `rows` and the other `METHODS`, as it does for `forward`.

    These methods call each other. So a module keeps its gathered parameters from its first call until its backward pass
    (`set_reshard_after_forward(False)`). After a call without a backward pass, `module.reshard()` frees them.

    Args:
        model: The model, after `fully_shard` was called on it, on some of its submodules, or on both.

    Returns:
        The same model, changed in place.

    Reference: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule) or not (isinstance(module, Pretrained) or hasattr(module, "transform")):
            continue
        module.set_reshard_after_forward(False, recurse=False)
        for name in METHODS:
            method = getattr(module, name, None)
            # A head's `bias` is a parameter; a registered method is an attribute of the instance.
            if inspect.ismethod(method) and name not in vars(module):
                register_fsdp_forward_method(module, name)
    return model
