"""The cross entropy of tokens as a function of totals, and the request for these totals."""

from dataclasses import dataclass

from torch import Tensor

from embedlayer.losses.definition import checked_targets
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.objective import TokenLoss, Totals, log_probs, logsumexp
from embedlayer.losses.options import LossOptions
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits
from embedlayer.losses.vocabulary_pass import Request


@dataclass(frozen=True)
class CrossEntropy(TokenLoss):
    """Cross entropy `lse - (1 - label_smoothing) z[target] - label_smoothing * mean of z + z_loss * lse²`.

    Args:
        vocab_size: Number of tokens, V.
        label_smoothing: See `LossOptions`.
        z_loss: See `LossOptions`.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def of(self, totals: Totals) -> Tensor:
        """Return the loss of each token, from the totals of its logits z."""
        losses = -log_probs(totals, totals["selected"])[0]
        if self.label_smoothing:
            mean = totals["sum"] / self.vocab_size
            losses = losses + self.label_smoothing * (totals["selected"][0] - mean)
        return losses + self.z_loss * logsumexp(totals).square() if self.z_loss else losses

    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradients by `log_sum`, `selected` and `sum`."""
        by_log_sum = factors * (1 + 2 * self.z_loss * logsumexp(totals)) if self.z_loss else factors
        found = {"log_sum": by_log_sum, "selected": -(1 - self.label_smoothing) * factors.unsqueeze(0)}
        if self.label_smoothing:
            found["sum"] = -self.label_smoothing / self.vocab_size * factors
        return found


def target_request(logits: UncomputedLogits, targets: Tensor, options: LossOptions, min_chunks: int = 1) -> Request:
    """Check the targets, and return the request for the totals that their losses need.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
    """
    ignore_index = options.get("ignore_index", -100)
    kept = targets != ignore_index
    targets = checked_targets(targets, logits.vocab_size, ignore_index, everywhere=isinstance(logits, LinearLogits))
    objective = LogitStatistics(sum=bool(options.get("label_smoothing")))
    ids = targets.long().masked_fill(~kept, 0).flatten().unsqueeze(1)
    return Request(objective, ids=ids, kept=kept.flatten(), min_chunks=min_chunks)
