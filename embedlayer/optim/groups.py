"""Parameter groups by role: tables, heads, positions, norms and matrices, each with its weight decay and its rate."""

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from torch import nn

from embedlayer.core.errors import SizeError
from embedlayer.heads.output import OutputHead
from embedlayer.heads.peft import without_adapters
from embedlayer.heads.streams import StackedRows
from embedlayer.losses.head_outputs import HeadOutputs
from embedlayer.positions.position import Position
from embedlayer.tables.lookup import LookupTable

ROLES = ("tables", "heads", "positions", "norms", "matrices")
"""Names of the parameter groups, in their order."""

DECAYED = ("heads", "matrices")
HEADS = (OutputHead, StackedRows)
TABLES = (LookupTable, nn.Embedding, nn.EmbeddingBag)


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.1, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer by role: tables, heads, positions, norms and matrices.

    - `tables`: every parameter of a token table, also one that a head is tied to, and of a plain `nn.Embedding`.
    - `heads`: the weights of untied heads: of `OutputHead`, `StreamHead` and `model.get_output_embeddings()`.
    - `positions`: every parameter of a `Position`.
    - `norms`: of all others, those with fewer than two dimensions, biases of heads included.
    - `matrices`: the rest, the transform of a `PredictionHead` included.

    PEFT's adapters have the role of the module that they adapt. Muon is for `matrices` alone.

    Heads and matrices get the weight decay, as an untied head does in Megatron-LM, torchtitan and OLMo. nanochat has no
    decay there: set `weight_decay` of the group for that. Decay shrinks a row of a table at every step, also at steps
    without its token, so the rows of rare tokens would vanish; a row of a head has a gradient at every step. Norms and
    biases are scales and shifts.

    Args:
        model: Any module.
        weight_decay: Weight decay of heads and matrices.
        rates: Learning rate of each role that has one of its own, as an absolute number; see `WidthScaling.rates` for
            rates by width. The other groups have the optimizer's `lr`.

    Returns:
        Up to five groups in the order above, each a dict with `name`, `params`, `weight_decay` and, where `rates` has
        one, `lr`; none is empty. Each trained parameter is in exactly one group. The order depends on the modules
        alone, so an optimizer's state can be loaded by a later run.

    Raises:
        SizeError: `rates` names another role, one of which the model trains no parameter, or a rate that is negative or
            not finite.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32), RotaryEmbedding(8), OutputHead(32, 100), num_layers=1)
        >>> [(group["name"], group.get("lr")) for group in param_groups(model, rates={"heads": 0.004})]
        [('tables', None), ('heads', 0.004), ('norms', None), ('matrices', None)]

    Reference: Megatron-LM, megatron/core/optimizer/__init__.py (`decoupled_lr`, the rate of embedding and output
    layer, is absolute; only biases and vectors are without decay); nanochat, nanochat/gpt.py (`setup_optimizers`:
    `embedding_lr`, `unembedding_lr`, `matrix_lr`; Muon for the matrices of the blocks).
    """
    roles = _roles_of_parameters(model)
    rates = {} if rates is None else rates
    check_role_rates(rates)
    groups: list[dict[str, Any]] = [
        {
            "name": role,
            "params": [parameter for parameter, its in roles.items() if its == role and parameter.requires_grad],
            "weight_decay": weight_decay if role in DECAYED else 0.0,
            **({"lr": rates[role]} if role in rates else {}),
        }
        for role in ROLES
    ]
    groups = [group for group in groups if group["params"]]
    trained = [group["name"] for group in groups]
    if absent := [role for role in rates if role not in trained]:
        raise SizeError(
            f"rates has {', '.join(absent)}, of which this model trains no parameter; it trains {', '.join(trained)}. "
            f"A tied head is trained with its table."
        )
    return groups


def check_role_rates(rates: Mapping[str, float]) -> None:
    """Raise a `SizeError` if `rates` names an unknown role, or a rate is no finite number of at least 0."""
    if unknown := [str(role) for role in rates if role not in ROLES]:
        raise SizeError(f"rates has {', '.join(unknown)}, and the roles of parameters are {', '.join(ROLES)}.")
    if wrong := {role: rate for role, rate in rates.items() if not isinstance(rate, Real) or not 0 <= rate < math.inf}:
        raise SizeError(f"A learning rate must be a finite number of at least 0, not {wrong}.")


def _roles_of_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    heads = list(_heads(model))
    in_heads = {part for head in heads for part in head.modules()}  # a sharded untied head contains a table
    roles: dict[nn.Parameter, str] = {}
    for module in model.modules():
        adapted = without_adapters(module)
        if module not in in_heads and isinstance(adapted, (Position, *TABLES)):
            role = "positions" if isinstance(adapted, Position) else "tables"
            for parameter in module.parameters():
                roles.setdefault(parameter, role)
    for parameter in (each for head in heads for each in head.parameters() if each.dim() >= 2):
        roles.setdefault(parameter, "heads")
    for parameter in model.parameters():
        roles.setdefault(parameter, "norms" if parameter.dim() < 2 else "matrices")
    return roles


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the heads of a model, with the modules that PEFT has put around them. Tied ones may be among them."""
    for module in model.modules():
        if isinstance(without_adapters(module), HEADS):
            yield module
        output_of: Any = getattr(module, "get_output_embeddings", None)
        output = None if output_of is None else output_of()
        if isinstance(output, nn.Module) and not isinstance(output, (HeadOutputs, *TABLES)):
            yield output
