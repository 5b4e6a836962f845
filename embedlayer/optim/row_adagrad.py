"""Row-wise Adagrad: one number of state for each row of a table, at the cost of the rows of a batch."""

from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import ParamsT

from embedlayer.core.errors import SizeError
from embedlayer.optim.row_optimizer import RowOptimizer
from embedlayer.optim.row_state import RowwiseSquares
from embedlayer.row_sparse.history import NO_FADING, Betas
from embedlayer.row_sparse.stochastic_rounding import StochasticRounding


class RowAdagrad(RowOptimizer):
    r"""Adagrad with one sum of squares for each row of a `RowSparseEmbedding`, which it updates only where needed.

    With the gradient g of a row of D numbers, its sum s, learning rate $\eta$ and weight decay $\lambda$:

    $$ p \leftarrow p (1 - \eta \lambda) \qquad s \leftarrow s + \operatorname{mean}(g^2) \qquad
    p \leftarrow p - \eta \frac{g}{\sqrt{s} + \epsilon} $$

    Weight decay acts on all rows at every step; that of rows without gradient is pending until the rows are read.
    Dense parameters have a sum for each number: torch's Adagrad (`torch.optim.adagrad`) after decoupled weight decay.

    Args:
        params: Parameters or groups, as for any optimizer of torch. Row-sparse tables are recognised.
        lr: Learning rate; may change from step to step.
        weight_decay: Decoupled weight decay; a step multiplies by `1 - lr * weight_decay`. May change from step to
            step. `torch.optim.Adagrad` adds it to the gradient instead.
        eps: Added to the root of the sum.
        maximize: Must be False: minimise the negative loss instead.
        apply_pending_every: As in `RowAdamW`.
        rounding: As in `RowAdamW`.

    Raises:
        SizeError: An option is not supported or outside its range.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> optimizer = RowAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()

    Reference: Duchi et al., Adaptive subgradient methods, 2011; `rowwise_adagrad` of FBGEMM
    (fbgemm_gpu/codegen/genscript/optimizers.py), whose weight decay acts on rows with a gradient only.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        apply_pending_every: int | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        super().__init__(
            params, defaults, state=RowwiseSquares(), rounding=rounding, apply_pending_every=apply_pending_every
        )

    def check_options(self, group: dict[str, Any], *, has_tables: bool) -> None:
        """Check that `eps` is above 0.

        Raises:
            SizeError: It is not.
        """
        if not group["eps"] > 0:
            raise SizeError(f"eps must be positive, not {group['eps']:g}: a zero gradient would give 0 / 0.")

    def betas_of(self, group: dict[str, Any]) -> Betas:
        """Return the betas of a sum that does not decay, and `eps`."""
        return Betas(*NO_FADING, float(group["eps"]))

    def dense_state(self) -> tuple[str, ...]:
        """Return `sum`."""
        return ("sum",)

    def step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make a step of torch's Adagrad on dense parameters of a group, after decoupled weight decay."""
        states = [self.moments(parameter) for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        adagrad(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["sum"] for state in states],
            [state["step"] for state in states],
            lr=group["lr"],
            weight_decay=0.0,
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
