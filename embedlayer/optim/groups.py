"""Parameter groups with and without weight decay."""

from typing import Any

from torch import nn

from embedlayer.heads.output import OutputHead
from embedlayer.positions.position import Position
from embedlayer.tables.lookup import LookupTable


def param_groups(model: nn.Module, *, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: matrices with weight decay; tables, positions and norms without.

    Weight decay shrinks a row at every step, also at steps without its token, so the rows of rare tokens would vanish.
    Norms and biases are scales and shifts, so they are not decayed either.

    Args:
        model: Any module. Tables are the instances of `LookupTable`, also where a head is tied to one. An untied head
            is a matrix.
        weight_decay: Weight decay of the matrices.

    Returns:
        Up to four groups, each a dict with `name`, `params` and `weight_decay`, without empty groups. Each trained
        parameter is in exactly one group. Of the parameters of neither tables nor positions, `norms` has those with
        fewer than two dimensions, and `matrices` the others.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32), RotaryEmbedding(8), num_layers=1)
        >>> [group["name"] for group in param_groups(model)]
        ['tables', 'norms', 'matrices']
    """
    kinds: dict[nn.Parameter, str] = {}
    heads = [head for head in model.modules() if isinstance(head, OutputHead)]
    matrices = {rows for head in heads for rows in head.modules()}  # a sharded untied head contains a table
    for module in model.modules():
        if module in matrices:
            continue
        kind = "tables" if isinstance(module, LookupTable) else "positions" if isinstance(module, Position) else None
        if kind is not None:
            kinds |= dict.fromkeys(module.parameters(), kind)
    for parameter in model.parameters():
        kinds.setdefault(parameter, "norms" if parameter.dim() < 2 else "matrices")
    decay = {"tables": 0.0, "positions": 0.0, "norms": 0.0, "matrices": weight_decay}
    groups = [
        {
            "name": name,
            "params": [parameter for parameter, kind in kinds.items() if kind == name and parameter.requires_grad],
            "weight_decay": value,
        }
        for name, value in decay.items()
    ]
    return [group for group in groups if group["params"]]
