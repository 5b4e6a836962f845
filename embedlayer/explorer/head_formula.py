"""The formulas of a model's norms and logits, as the page and `embedlayer embed` print it."""

from torch import nn

from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.losses.options import LogitSettings


def head_formula(head: OutputHead | PredictionHead, norm: nn.RMSNorm | None) -> str:
    """Return the formula from the output `x` of the last block to the probabilities `p` of the next token.

    `h` is the normalised `x`, `t` the result of the head's own transform, `z` are the logits, `W` the rows of the head,
    and `b` is its bias. What the head does not do is left out.

    Args:
        head: Head of the model.
        norm: Norm between the last block and the head; `None` for a head that is applied to `x` itself.

    Example:
        >>> head_formula(OutputHead(8, 100, softcap=30.0), torch.nn.RMSNorm(8))
        'h = RMSNorm(x), z = 30 · tanh(h · Wᵀ / 30), p = softmax(z / temperature)'
    """
    steps, states = [], "x"
    if norm is not None:
        steps, states = ["h = RMSNorm(x)"], "h"
    if isinstance(head, PredictionHead):
        transform = f"dense({states})" if head.activation is None else f"{head.activation}(dense({states}))"
        steps.append(f"t = {transform}" if head.norm is None else f"t = {type(head.norm).__name__}({transform})")
        head, states = head.output, "t"
    settings = LogitSettings(**head.logit_options())
    z = f"{states} · Wᵀ"
    if settings.logit_scale != 1:
        z = f"{settings.logit_scale:.9g} · {z}"
    if settings.bias is not None:
        z = f"{z} + b"
    if settings.softcap is not None:
        z = f"({z})" if settings.bias is not None else z
        z = f"{settings.softcap:.9g} · tanh({z} / {settings.softcap:.9g})"
    steps.append(f"z = {z}")
    if settings.masked() is not None:
        steps.append(f"z[{settings.masked()}] = −∞")
    return ", ".join([*steps, "p = softmax(z)" if norm is None else "p = softmax(z / temperature)"])


def norm_formula(norm: nn.RMSNorm, x: str = "x") -> str:
    """Return the formula of a norm with its number ε; `x` is the symbol of its input.

    Example:
        >>> norm_formula(torch.nn.RMSNorm(8, eps=1e-6))
        'RMSNorm(x) = w · x / √(mean(x²) + 1e-06)'
    """
    return f"RMSNorm({x}) = w · {x} / √(mean({x}²) + {norm.eps:g})"
