"""AdamW at the cost of the rows that a batch uses, with the results of dense AdamW.

Dense AdamW moves every row of a table at every step, also those without gradient. For a row-sparse table `RowAdamW`
writes only to the rows that have a gradient, and the table's ledger makes up for the missed steps of a row just before
it is read (`embedlayer.tables.catch_up`). All other parameters go through torch's own fused AdamW.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from embedlayer.errors import CheckpointError, ShapeError, SizeError
from embedlayer.tables.catch_up import Betas, check_betas
from embedlayer.tables.ledger import RowLedger, parts, root, rows_at_once, scratch
from embedlayer.tables.row_gradient import row_gradient

State = dict[str, Any]


class RowAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, except that a step on a `row_sparse=True` table costs its batch and not its vocabulary.

    A table ends where dense AdamW ends: at every step `p -= lr * wd * p`, then `p -= lr * (m / bc1) / (sqrt(v / bc2) +
    eps)` with `bc = 1 - beta^t`, for all rows. Rows without gradient are caught up when they are next read.

    Args:
        params: Parameters or groups, as for any optimizer of torch. Row-sparse tables are recognised.
        lr: Learning rate; may change from step to step.
        betas: Decay of the mean and of the mean square.
        eps: Added to the root of the mean square.
        weight_decay: Decay per step is `lr * weight_decay`; may change from step to step.
        amsgrad: Must be False: its running maximum needs every row at every step.
        maximize: Must be False: turn the sign of the loss.
        fused: Whether dense parameters take torch's fused kernel.
        apply_pending_every: Apply all pending updates of a table after every so many of its steps. With 1 the memory
            of every weight is that of dense AdamW after each step, for readers that no function of torch announces,
            at about twice the time of dense AdamW. `None`: updates are applied when somebody reads the rows.

    Raises:
        SizeError: An option is outside its range, or `beta1 >= sqrt(beta2)`.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> optimizer = RowAdamW(table.parameters(), lr=1e-3)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()

    `state_dict()` is that of `torch.optim.AdamW` and is read by it, and the other way round.

    Reference: Loshchilov and Hutter, Decoupled weight decay regularization, 2019; torch/optim/adamw.py. We differ from
    `torch.optim.SparseAdam`, whose rows stand still between their gradients, so that it ends elsewhere.
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
    ) -> None:
        if apply_pending_every is not None and apply_pending_every < 1:
            raise SizeError(f"apply_pending_every must be at least 1 step, or None, not {apply_pending_every}.")
        self.apply_pending_every = apply_pending_every
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
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the group's options are checked."""
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of AdamW on every parameter that has a gradient.

        Raises:
            ShapeError: A table was resized or replaced since its last step, or a gradient is sparse where the table
                is not.
            StaleRowsError: A weight was written in place while its rows had pending updates.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            dense = [p for p in group["params"] if p.grad is not None and not is_row_sparse(p)]
            for by_fsdp in (False, True):  # torch's kernels take no list of both
                self._step_dense([p for p in dense if hasattr(p, "to_local") is by_fsdp], group)
            for parameter in group["params"]:
                if parameter.grad is not None and is_row_sparse(parameter):
                    self._step_rows(parameter, group)
        return loss

    def flush(self) -> None:
        """Bring all rows of all row-sparse tables, and their moments, to where dense AdamW has them now."""
        for parameter in self._tables():
            parameter.row_ledger.flush(parameter, moments=True)

    def state_dict(self) -> dict[str, Any]:
        """The state that dense AdamW would have, which `torch.optim.AdamW` can load; rows are brought up to date."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of `RowAdamW` or `torch.optim.AdamW`.

        Raises:
            CheckpointError: It belongs to parameters of other sizes.
            SizeError: It was made with options that are refused here, such as `amsgrad`.
        """
        self.flush()
        self._check_sizes(state_dict)
        for group in state_dict["param_groups"]:
            check_group(group)
        super().load_state_dict(state_dict)
        for parameter in self._tables():
            parameter.row_ledger.detach()

    def load_rows(self, parameter: Any, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue with rows that are behind, from what their ledger's `state()` gave beside raw rows and moments.

        Raises:
            KeyError: Something is missing.
        """
        ledger: RowLedger = parameter.row_ledger
        state = self.state[parameter]
        ledger.load_state(parameter, (state["exp_avg"], state["exp_avg_sq"]), tensors, rest)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**super().__getstate__(), "apply_pending_every": self.apply_pending_every}

    def _tables(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if is_row_sparse(p)]

    def _check_gradients(self) -> None:
        """Refuse what cannot be stepped on, before anything is written."""
        for parameter in self._tables():
            ledger: RowLedger = parameter.row_ledger
            if ledger.replaced:
                raise ShapeError(
                    f"A table's weight {tuple(parameter.shape)} was replaced behind the optimizer's back, and its "
                    f"steps would go to the old one. Build the optimizer again after resizing or assigning a weight."
                )
            if parameter.grad is not None:
                moments = self.state[parameter].get("exp_avg", parameter)
                ledger.check_size(parameter, moments)
        for group in self.param_groups:
            check_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse and not is_row_sparse(parameter):
                    raise ShapeError(
                        f"A sparse gradient {tuple(parameter.shape)} came from a table without a ledger of its rows. "
                        f"Use TokenEmbedding(..., row_sparse=True), or sparse=False."
                    )

    def moments(self, parameter: Tensor) -> State:
        """The parameter's `step`, `exp_avg` and `exp_avg_sq`, which are made at its first step, or here."""
        state: State = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._place_of_step(parameter))
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def load_moments(self, parameter: Tensor, tensors: State) -> None:
        """Continue with `step`, `exp_avg` and `exp_avg_sq` as they were, on whatever device they come."""
        places = {"step": self._place_of_step(parameter)}
        self.state[parameter] = {key: t.to(places.get(key, parameter.device)) for key, t in tensors.items()}

    def _place_of_step(self, parameter: Tensor) -> torch.device:
        """Where torch's kernel reads the number of the step: the fused one beside the numbers."""
        fused = any(group["fused"] and any(parameter is p for p in group["params"]) for group in self.param_groups)
        return parameter.device if fused and not is_row_sparse(parameter) else torch.device("cpu")

    def _step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
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

    def _step_rows(self, parameter: Any, group: dict[str, Any]) -> None:
        """The step of the rows that have a gradient; the ledger takes note for the others."""
        ledger: RowLedger = parameter.row_ledger
        grad = parameter.grad = row_gradient(parameter, parameter.grad, drop=ledger.padding_idx)
        rows, values = grad._indices()[0], grad._values()
        state = self.moments(parameter)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        ledger.attach(parameter, int(state["step"]), (exp_avg, exp_avg_sq), betas_of(group))
        numbers = ledger.numbers(parameter, rows)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        decays = ledger.begin_step(rows, lr, group["weight_decay"])
        correction = 1 - beta1**ledger.step
        root_correction = math.sqrt(1 - beta2**ledger.step)
        size = min(rows_at_once(parameter), len(rows))
        room = scratch(parameter, size)
        for part in parts(rows, size):
            p, m, v = (each[part] for each in numbers)
            g = values[part].to(p.dtype)
            m.mul_(decays[0][part]).add_(g, alpha=1 - beta1)
            v.mul_(decays[1][part]).addcmul_(g, g, value=1 - beta2)
            below = root(v, out=room[: len(p)]).add_(group["eps"] * root_correction)
            p.mul_(1 - lr * group["weight_decay"]).addcdiv_(m, below, value=-lr * root_correction / correction)
        ledger.end_step(parameter, rows, numbers)
        if self.apply_pending_every is not None and ledger.step % self.apply_pending_every == 0:
            ledger.flush(parameter)
        state["step"] += 1

    def _check_sizes(self, state_dict: dict[str, Any]) -> None:
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=False):  # torch counts them itself
            moments = state_dict["state"].get(place, {}).get("exp_avg")
            if moments is not None and moments.shape != parameter.shape:
                raise CheckpointError(
                    f"The state of parameter {place} is {tuple(moments.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: it belongs to another table. Resize state and table together."
                )


def is_row_sparse(parameter: Tensor) -> bool:
    """Whether this is the weight of a row-sparse table."""
    return hasattr(parameter, "row_ledger")


def betas_of(group: dict[str, Any]) -> Betas:
    """What fixes how the moments of this group die out."""
    return Betas(float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]))


def check_group(group: dict[str, Any]) -> None:
    """Refuse options with which a step could not be that of dense AdamW.

    Raises:
        SizeError: Naming the option.
    """
    if group.get("amsgrad"):
        raise SizeError("amsgrad keeps a maximum over every step of every row: use torch.optim.AdamW for it.")
    if group.get("maximize"):
        raise SizeError("maximize is not offered: minimise the negative loss.")
    if not group["lr"] >= 0 or not group["weight_decay"] >= 0:
        raise SizeError(f"lr and weight_decay must be at least 0, not {group['lr']} and {group['weight_decay']}.")
    if any(is_row_sparse(parameter) for parameter in group["params"] if isinstance(parameter, Tensor)):
        check_betas(betas_of(group))
