"""Which state an optimizer stores for each row of a row-sparse table."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.core.shapes import wide_dtype
from embedlayer.io.json_fields import MAX_STEP, printable


class StateTensor(NamedTuple):
    """Shape and dtype of a state tensor.

    Attributes:
        width: Numbers for each row.
        dtype: Data type, or `None` for that of the weight, to which loaded states are converted.
    """

    width: int
    dtype: torch.dtype | None


class RowState(ABC):
    """Which tensors an optimizer stores for the rows of a row-sparse table."""

    names: tuple[str, ...]
    """Names of the state tensors, in the order of `layout`."""

    @abstractmethod
    def layout(self, weight: Tensor) -> dict[str, StateTensor]:
        """Return width and dtype of each state tensor of a table, by name, in the order in which kernels take them.

        First moments, unless there are none, come before second moments, or the sum of squares in their place.
        """


@dataclass(frozen=True)
class ElementwiseMoments(RowState):
    """AdamW's state: a first and a second moment of each number, in the dtype of the table.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> optimizer = RowAdamW(table.parameters(), state=ElementwiseMoments())  # as without `state`
    """

    names = "exp_avg", "exp_avg_sq"

    def layout(self, weight: Tensor) -> dict[str, StateTensor]:
        """Return `exp_avg` and `exp_avg_sq`, `(V, D)` each."""
        return {name: StateTensor(weight.shape[1], None) for name in self.names}


@dataclass(frozen=True)
class RowwiseSecondMoment(RowState):
    r"""One second moment for each row, `v = b2 v + (1 - b2) mean(g^2)`, and a first moment of each number or none.

    A step with the gradient g of a row of D numbers, whose mean is over these numbers, is AdamW's with this v:

    $$ m \leftarrow b_1 m + (1 - b_1) g \qquad v \leftarrow b_2 v + (1 - b_2) \operatorname{mean}(g^2) $$

    $$ \hat m = \frac{m}{1 - b_1^t} \qquad \hat v = \frac{v}{1 - b_2^t} \qquad
    p \leftarrow p (1 - \eta \lambda) - \eta \frac{\hat m}{\sqrt{\hat v} + \epsilon} $$

    Here $\eta$ is `lr`, $\lambda$ `weight_decay`, $\epsilon$ `eps`, $(b_1, b_2)$ `betas`, and t the number of the step.
    Without first moments $b_1$ is 0, so m is g.

    The state is m as `exp_avg`, `(V, D)`, or none, and v as `exp_avg_sq`, `(V, 1)`: float32, or float64 for a float64
    table.

    Args:
        first_moment: Data type of the first moments: `torch.float32`, `torch.bfloat16`, `torch.float64`, or `None` for
            none. Then `betas[0]` is not used.

    Raises:
        SizeError: `first_moment` is another dtype.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> optimizer = RowAdamW(table.parameters(), state=RowwiseSecondMoment(first_moment=torch.bfloat16))
        >>> optimizer.moments(table.weight)["exp_avg_sq"].shape
        torch.Size([100, 1])

    Reference: `partial_rowwise_adam` of FBGEMM (fbgemm_gpu/codegen/genscript/optimizers.py). There weight decay and
    momentum act only on rows with a gradient; here on all rows at every step, as in AdamW.
    """

    first_moment: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        if self.first_moment not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise SizeError(f"first_moment {self.first_moment} is not offered: use float32, bfloat16, float64 or None.")
        names = ("exp_avg_sq",) if self.first_moment is None else ("exp_avg", "exp_avg_sq")
        object.__setattr__(self, "names", names)

    def layout(self, weight: Tensor) -> dict[str, StateTensor]:
        """Return `exp_avg`, `(V, D)`, unless there is none, and `exp_avg_sq`, `(V, 1)`."""
        second = {"exp_avg_sq": StateTensor(1, wide_dtype(weight.dtype))}
        if self.first_moment is None:
            return second
        return {"exp_avg": StateTensor(weight.shape[1], self.first_moment)} | second


@dataclass(frozen=True)
class RowwiseSquares(RowState):
    """The state of `RowAdagrad`: for each row the sum of `mean(g^2)` over all steps."""

    names = ("sum",)

    def layout(self, weight: Tensor) -> dict[str, StateTensor]:
        return {"sum": StateTensor(1, wide_dtype(weight.dtype))}


ROW_STATES = (
    ElementwiseMoments(),
    *(RowwiseSecondMoment(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, None)),
    RowwiseSquares(),
)
"""All rules, to name the one to which a loaded state belongs."""


def check_state(rule: RowState, weight: Tensor, tensors: Mapping[str, Tensor], name: object) -> None:
    """Check that loaded state tensors of a table are those of a rule; else raise a `CheckpointError`."""
    state = {key: tensor for key, tensor in tensors.items() if key != "step"}
    listed = ", ".join(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in state.items())
    if not _is_of(rule, weight, state):
        other = next((repr(each) for each in ROW_STATES if _is_of(each, weight, state)), "an unknown rule")
        raise CheckpointError(
            f"The state of parameter {name} is that of {other} ({listed}), and this optimizer's rule is {rule!r}: "
            f"build the optimizer with the rule of the state."
        )
    for key, each in rule.layout(weight).items():
        if state[key].shape != (weight.shape[0], each.width):
            raise CheckpointError(
                f"The state of parameter {name} is {tuple(state[key].shape)}, the parameter {tuple(weight.shape)}: it "
                f"belongs to another table."
            )


def check_step(step: object, name: object) -> None:
    """Check that the loaded state of a parameter has one whole number of steps from 0 to `MAX_STEP`."""
    value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_STEP or value % 1:
        raise CheckpointError(
            f"The state of parameter {name} has the step {printable(value)}, where a whole number from 0 to {MAX_STEP} "
            f"is expected."
        )


def _is_of(rule: RowState, weight: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether state tensors are those of a rule, for a table of any size."""
    layout = rule.layout(weight)
    return layout.keys() == tensors.keys() and all(
        tensors[key].dim() == 2 and (width == 1) == (tensors[key].shape[1] == 1) and dtype in (None, tensors[key].dtype)
        for key, (width, dtype) in layout.items()
    )
