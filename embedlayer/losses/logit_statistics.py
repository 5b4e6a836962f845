"""Statistics of the logits of one head, from which losses, log-probabilities and entropies follow."""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.losses.largest import ordered_top_k, top_k
from embedlayer.losses.objective import (
    LogitBlock,
    Objective,
    Totals,
    merge_lse,
    merge_softmax,
    softmax_,
    softmax_totals,
)


class LogitStatistics(Objective):
    """Compute statistics of the logits z of each token, where p is `softmax(z)`.

    | total | formula | shape |
    |---|---|---|
    | `lse` | logsumexp(z) | `(C,)` |
    | `selected` | z of each requested ID | `(K, C)` |
    | `sum` | sum of z over all tokens of the vocabulary | `(C,)` |
    | `mean` | sum of p z, so that the entropy is `lse - mean` | `(C,)` |
    | `lse_double` | logsumexp(2 z), so that the sum of p² is `exp(lse_double - 2 lse)` | `(C,)` |
    | `top_logits`, `top_ids` | the K largest z, largest first, and their IDs | `(K, C)` |

    `lse` is always computed, `selected` where IDs are requested, the others on request.

    Args:
        sum: Whether to compute `sum`.
        mean: Whether to compute `mean`.
        lse_double: Whether to compute `lse_double`.
        top_k: K of `top_logits` and `top_ids`; 0 for none.
    """

    def __init__(self, *, sum: bool = False, mean: bool = False, lse_double: bool = False, top_k: int = 0) -> None:
        self.sum = sum
        self.mean = mean
        self.lse_double = lse_double
        self.top_k = top_k

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return the statistics over the rows of the block; `selected` is 0 where the ID is another row."""
        z = block.student
        found, exponentials = softmax_totals(z)
        if block.ids is not None:
            local, is_inside = block.local_ids(block.ids)
            found["selected"] = z.gather(0, local).where(is_inside, 0.0)
        if self.sum:
            found["sum"] = z.sum(0)
        if self.mean:
            found["mean"] = exponentials.mean(z, skip_zeros=block.may_be_infinite)
        if self.lse_double:
            squares = exponentials.powers.square().sum(0) / exponentials.sums.square()
            found["lse_double"] = 2 * found["lse"] + squares.log()
        if self.top_k:
            values, ids = top_k(z.T, min(self.top_k, len(z)))
            missing = self.top_k - values.shape[1]  # a block of fewer rows is filled up with IDs that lose every tie
            found["top_logits"] = F.pad(values, (0, missing), value=-torch.inf).T
            found["top_ids"] = F.pad(ids + block.start, (0, missing), value=torch.iinfo(torch.int64).max).T
        return found

    def merge(self, parts: list[Totals]) -> Totals:
        """Combine the statistics of several blocks."""
        if len(parts) == 1:
            return parts[0]
        found, shares = merge_softmax(parts)
        for name in ("selected", "sum"):
            if name in parts[0]:
                found[name] = torch.stack([part[name] for part in parts]).sum(0)
        if self.mean:
            weighted = [part["mean"] * share for part, share in zip(parts, shares, strict=True)]
            found["mean"] = torch.stack(weighted).sum(0)
        if self.lse_double:
            found["lse_double"] = merge_lse([part["lse_double"] for part in parts])[0]
        if self.top_k:
            values, ids = (torch.cat([part[name] for part in parts]).T for name in ("top_logits", "top_ids"))
            values, ids = ordered_top_k(values, ids, self.top_k)
            found["top_logits"], found["top_ids"] = values.T, ids.T
        return found

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace the logits by `p (g_lse + g_mean (1 + z - mean)) + 2 g_double softmax(2 z) + g_sum + g_selected`."""
        z, added = block.student, []
        if "lse_double" in grads:
            added.append((2 * z - totals["lse_double"]).exp_().mul_(2 * grads["lse_double"]))
        factor: Tensor | None = grads.get("lse")
        if "mean" in grads:
            slope = grads["mean"]
            offset = slope * (1 - totals["mean"]) + (0 if factor is None else factor)
            factor = torch.addcmul(offset, _finite(block), slope)
        if factor is None:
            z.zero_()
        else:
            wide = factor if factor.dim() == 2 else None
            softmax_(z, totals, factor=None if wide is not None else factor)
            z = z if wide is None else z.mul_(wide)
        for part in added:
            z.add_(part)
        if "sum" in grads:
            z.add_(grads["sum"])
        for name, ids in (("selected", block.ids), ("top_logits", totals.get("top_ids"))):
            if name in grads and ids is not None:
                local, is_inside = block.local_ids(ids)
                z.scatter_add_(0, local, grads[name].where(is_inside, 0.0))


def _finite(block: LogitBlock) -> Tensor:
    """Return the logits with 0 in place of -inf, as 0 * -inf would be NaN where a probability 0 multiplies them."""
    z = block.student
    return z.masked_fill(z == -torch.inf, 0.0) if block.may_be_infinite else z
