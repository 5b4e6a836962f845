"""Finishing of raw logits `hidden @ weight.T`: scale, bias, soft cap, temperature and masked padding.

`finish` is the definition. `BlockFinishing` computes the same in place over blocks of logits, with its derivative.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.losses.fixed_row import one_index
from embedlayer.losses.options import LogitOptions, LogitSettings, check_options


def finish_logits(
    raw_logits: Float[Tensor, "*batch V"],
    *,
    logit_scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    padding_idx: int | None = None,
    mask_padding: bool = False,
) -> Float[Tensor, "*batch V"]:
    """Compute logits from raw logits `hidden @ weight.T`: scale, bias, soft cap, temperature and masked padding.

    Args:
        raw_logits: Products of hidden states and rows, `(..., V)`.
        logit_scale: See `LogitOptions`, as for the other arguments.
        bias: `(V,)` or `None`.
        softcap: Bound of the logits, or `None`.
        temperature: Divisor of the logits, above 0.
        padding_idx: Padding token, or `None`.
        mask_padding: Whether the logit of the padding token is -inf.

    Returns:
        Logits, `(..., V)`.

    Example:
        >>> finish_logits(torch.tensor([1.0, 2.0, 3.0]), logit_scale=0.5, padding_idx=0, mask_padding=True)
        tensor([  -inf, 1.0000, 1.5000])
    """
    settings = LogitSettings(logit_scale, bias, softcap, temperature, padding_idx, mask_padding)
    check_options(settings._asdict(), LogitOptions, "finish_logits")
    return finish(raw_logits, settings)


def finish(raw_logits: Float[Tensor, "*batch V"], options: LogitSettings) -> Float[Tensor, "*batch V"]:
    """Compute `finish_logits` with options that were checked already."""
    logits = raw_logits if options.logit_scale == 1.0 else raw_logits * options.logit_scale
    if options.bias is not None:
        logits = logits + options.bias
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.temperature != 1.0:
        logits = logits / options.temperature
    if (masked := options.masked()) is not None:
        logits = logits.index_fill(-1, one_index(masked, logits), -math.inf)
    return logits


class BlockFinishing:
    """Finish logits in place over blocks of rows, vocabulary first, `(R, C)`, and convert gradients back."""

    # `bound * tanh((scale * x + bias / divisor) / softcap)`, without a soft cap `scale * x + bias / divisor`: the
    # temperature is in `divisor` (or, with a soft cap, in `bound`), so callers pass raw logits times `scale`.

    def __init__(self, options: LogitSettings) -> None:
        self.softcap = options.softcap
        self.divisor = options.temperature if self.softcap is None else 1.0
        self.scale = options.logit_scale / self.divisor
        self.bound = None if self.softcap is None else self.softcap / options.temperature
        self.masked = options.masked()

    def finish_(self, block_RC: Tensor, start: int, bias: Tensor | None) -> None:
        """Apply bias, soft cap and mask to scaled logits."""
        if bias is not None:
            block_RC.add_(bias.unsqueeze(1))
        if self.softcap is not None and self.bound is not None:
            block_RC.div_(self.softcap).tanh_().mul_(self.bound)
        self.fill_masked_(block_RC, start, -math.inf)

    def softcap_grad(self, logits_RC: Tensor, buffer: Tensor) -> Tensor | None:
        """Return the derivative of soft cap and temperature at finished logits, or `None` without a soft cap."""
        if self.softcap is None or self.bound is None:
            return None
        out = torch.div(logits_RC, self.bound, out=buffer[: logits_RC.numel()].view(logits_RC.shape))
        return out.square_().neg_().add_(1).mul_(self.bound / self.softcap)

    def unfinish_(self, dlogits_RC: Tensor, softcap_grad_RC: Tensor | None, start: int) -> None:
        """Convert gradients of finished logits, in place, to those of the scaled logits."""
        if softcap_grad_RC is not None:
            dlogits_RC.mul_(softcap_grad_RC)
        self.fill_masked_(dlogits_RC, start, 0.0)

    def fill_masked_(self, block_RC: Tensor, start: int, value: float) -> None:
        """Set the row of the masked token to `value`, if it is in the block from row `start` on."""
        if self.masked is not None and start <= self.masked < start + len(block_RC):
            block_RC[self.masked - start] = value
