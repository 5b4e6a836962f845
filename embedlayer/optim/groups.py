"""Parameter groups by role, each with its weight decay and its rate; and muP, which scales the rates with the width."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from embedlayer.core.errors import SizeError
from embedlayer.core.own_attributes import unwrapped
from embedlayer.heads.output import OutputHead
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
        adapted = unwrapped(module)
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
        if isinstance(unwrapped(module), HEADS):
            yield module
        output_of: Any = getattr(module, "get_output_embeddings", None)
        output = None if output_of is None else output_of()
        if isinstance(output, nn.Module) and not isinstance(output, (HeadOutputs, *TABLES)):
            yield output


@dataclass(frozen=True)
class WidthScaling:
    """muP: what a model of another width needs so that the learning rate that was best for `base_width` stays best.

    With `k = width / base_width`, for AdamW:

    | parameters | standard deviation at the start | factor in the forward pass | learning rate |
    |---|---|---|---|
    | tables, additive positions | that of the base | scale of the base, `table_scale` | that of the base |
    | rows of a head, tied or untied | that of the base | `logit_scale`, 1 / k | that of the base |
    | matrices | that of the base / sqrt(k), `matrix_std` | 1; of queries `query_scale` | that of the base / k |
    | norms and biases | that of the base | 1 | that of the base |

    Rows of a table and of a head have equal rules, so one table can be both. A scale of `"sqrt_dim"` would grow with
    the width: pass `table_scale`. Matrices of `DecoderLM`, `nn.Linear` and `NormalLinear` with `init_std=D**-0.5`
    start by 1 / sqrt(D) and need no `matrix_std`. The rule of matrices is that of an input width that grows by `k`. A
    matrix whose input width stays, such as the projection of a narrow table, has start and rate of the base.

    Args:
        width: Width of the model, D; it may be below `base_width`.
        base_width: Width of the model whose rates were tuned.
        head_dim: Width of an attention head, K; `None` if it is that of the base, and the number of heads grows.
        base_head_dim: Width of an attention head of the base; only with `head_dim`.

    Raises:
        SizeError: A width is below 1, or one of the two widths of heads is passed without the other.

    Example:
        >>> scaling = WidthScaling(256, base_width=64)
        >>> table = TokenEmbedding(100, 256, scale=scaling.table_scale)
        >>> head = OutputHead(table, logit_scale=scaling.logit_scale)
        >>> model = DecoderLM(table, "rotary", head, num_heads=16, query_scale=scaling.query_scale)
        >>> optimizer = RowAdamW(param_groups(model, rates=scaling.rates(4e-3)), lr=4e-3)
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('tables', 0.004), ('norms', 0.004), ('matrices', 0.001)]

    Reference: Yang et al., Tensor Programs V, arXiv 2203.03466 (2022), table 8 and section 4.1 (queries). We differ:
    its factor 1 / K of queries is `query_scale / sqrt(K)`, which is 1 / sqrt(K) in the base. On tied tables see
    github.com/microsoft/mup, issue 55.
    """

    width: int
    base_width: int
    head_dim: int | None = None
    base_head_dim: int | None = None

    def __post_init__(self) -> None:
        if (self.head_dim is None) != (self.base_head_dim is None):
            raise SizeError(f"Pass head_dim {self.head_dim} and base_head_dim {self.base_head_dim} only together.")
        sizes = self.width, self.base_width, self.head_dim, self.base_head_dim
        if any(size is not None and size < 1 for size in sizes):
            raise SizeError(f"Widths must be at least 1, not {sizes}.")

    @property
    def ratio(self) -> float:
        """Return `k = width / base_width`."""
        return self.width / self.base_width

    @property
    def table_scale(self) -> float:
        """Return `sqrt(base_width)`: the `scale` of the table of the base, if that is `"sqrt_dim"`."""
        return math.sqrt(self.base_width)

    @property
    def logit_scale(self) -> float:
        """Return `1 / k`, the `logit_scale` of the head relative to the base."""
        return self.base_width / self.width

    @property
    def query_scale(self) -> float:
        """Return `sqrt(base_head_dim / head_dim)`, the `query_scale` of a `DecoderLM`; 1 if the two are not passed."""
        if self.head_dim is None or self.base_head_dim is None:
            return 1.0
        return math.sqrt(self.base_head_dim / self.head_dim)

    def matrix_std(self, base_std: float) -> float:
        """Return the standard deviation of matrices that start with `base_std` in the base: `base_std / sqrt(k)`."""
        return base_std / math.sqrt(self.ratio)

    def rates(self, learning_rate: float) -> dict[str, float]:
        """Return the learning rates of the roles that differ from `learning_rate`, for `param_groups` and `Trainer`.

        `learning_rate` is that of the base, and of the optimizer: all other roles have it.
        """
        return {"matrices": learning_rate / self.ratio}
