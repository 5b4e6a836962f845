"""AdamW whose step costs the rows of a batch and not the vocabulary, with the results of dense AdamW.

All parameters that are not row-sparse tables go through torch's own fused AdamW.
"""

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from embedlayer.core.errors import SizeError
from embedlayer.optim.row_optimizer import RowOptimizer
from embedlayer.optim.row_state import ElementwiseMoments, RowState, RowwiseSecondMoment
from embedlayer.row_sparse.history import Betas, check_betas
from embedlayer.row_sparse.stochastic_rounding import StochasticRounding


class RowAdamW(RowOptimizer):
    """AdamW that updates only the rows of the batch in row-sparse tables, with the results of dense AdamW.

    The rows of a table become those of dense AdamW: at every step, for all rows,
    `p -= lr * wd * p`, then `p -= lr * (m / bc1) / (sqrt(v / bc2) + eps)` with `bc = 1 - beta^t`. Updates of rows
    without gradient are pending until the rows are read.

    Args:
        params: Parameters or groups, as for any optimizer of torch. Row-sparse tables are recognised.
        lr: Learning rate; may change from step to step.
        betas: Decay rates of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; a step multiplies by `1 - lr * weight_decay`. May change from step to step.
        amsgrad: Must be False, because its running maximum needs every row at every step.
        maximize: Must be False: minimise the negative loss instead.
        fused: Whether dense parameters use torch's fused kernel.
        apply_pending_every: Number of steps on a table after which all its pending updates are applied. With 1, every
            weight has the memory of dense AdamW after each step, at less than the time of dense AdamW with compiled
            kernels, and about twice its time without. That is for code that reads the memory without an operator.
            `None` applies updates only when rows are read.
        state: What is stored for each row of a row-sparse table: `ElementwiseMoments()` by default, or
            `RowwiseSecondMoment(...)`, whose formula differs. Dense parameters always have AdamW's two moments.
        rounding: `StochasticRounding()` for the rows of bfloat16 tables; `None` rounds to the nearest number. float32
            and float64 tables are not affected; a float16 table is a `SizeError`.

    Raises:
        SizeError: An option is not supported or outside its range, or `beta1 >= sqrt(beta2)` with row-sparse tables.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> optimizer = RowAdamW(table.parameters(), lr=1e-3)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()

    `state_dict()` is that of `torch.optim.AdamW`: each of the two optimizers can load the state of the other, except
    for the state of `RowwiseSecondMoment`.

    Reference: Loshchilov and Hutter, Decoupled weight decay regularization, 2019; torch/optim/adamw.py. We differ from
    `torch.optim.SparseAdam`, which skips the updates of rows without gradient and so gives other results.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool = True,
        apply_pending_every: int | None = None,
        state: RowState | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        state = ElementwiseMoments() if state is None else state
        if not isinstance(state, ElementwiseMoments | RowwiseSecondMoment):
            raise SizeError(f"{state!r} is no state of AdamW: use ElementwiseMoments() or RowwiseSecondMoment(...).")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults, state=state, rounding=rounding, apply_pending_every=apply_pending_every)

    def check_options(self, group: dict[str, Any], *, has_tables: bool) -> None:
        """Check that `amsgrad` and coupled decay are not set; for row-sparse tables also the betas, by `check_betas`.

        Raises:
            SizeError: An option is not supported or outside its range.
        """
        if group.get("amsgrad"):
            raise SizeError("amsgrad keeps a maximum over every step of every row: use torch.optim.AdamW for it.")
        if not group.get("decoupled_weight_decay", True):
            raise SizeError("RowAdamW has decoupled weight decay: use torch.optim.Adam for decay in the gradient.")
        if has_tables:
            check_betas(self.betas_of(group))

    def betas_of(self, group: dict[str, Any]) -> Betas:
        """Return `betas` and `eps` of a group as floats; without first moments `beta1` is 0."""
        without = isinstance(self.row_state, RowwiseSecondMoment) and self.row_state.first_moment is None
        return Betas(0.0 if without else float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]))

    def dense_state(self) -> tuple[str, ...]:
        """Return `exp_avg` and `exp_avg_sq`."""
        return "exp_avg", "exp_avg_sq"

    def step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make a step of torch's AdamW on dense parameters of a group."""
        states = [self.moments(parameter) for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
