"""Methods of layers that FSDP2 does not know: it gathers parameters for `forward` alone."""

import inspect

from torch import nn

from embedlayer.integrations.fsdp import gather_for
from embedlayer.saving import Pretrained

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

    Raises:
        VersionError: With torch 2.9 to 2.11 one group has several modules, as after `fully_shard([norm, head])`: its
            backward pass would crash the process.

    Reference: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    for module in model.modules():
        if isinstance(module, Pretrained) or hasattr(module, "transform"):
            # A head's `bias` is a parameter; a registered method is an attribute of the instance.
            methods = [name for name in METHODS if inspect.ismethod(getattr(module, name, None))]
            gather_for(module, [name for name in methods if name not in vars(module)])
    return model
