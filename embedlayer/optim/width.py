"""The maximal update parametrization (muP): sizes, scales and rates of a model that is a multiple of a tuned one."""

import math
from dataclasses import dataclass

from embedlayer.core.errors import SizeError


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
            raise SizeError(
                f"Pass head_dim and base_head_dim together, or neither, not {self.head_dim} and {self.base_head_dim}."
            )
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
