"""Weights of single tokens in a loss: which are accepted, and what they are where targets do not count."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.torch_state import plain_operators_only


def require_token_weights(weights: Tensor, targets: Tensor, name: str = "targets") -> None:
    """Check shape, dtype and device of weights of tokens; their values are not read."""
    fits = weights.shape == targets.shape and weights.is_floating_point() and weights.device == targets.device
    if fits and not weights.requires_grad:
        return
    found = f"{str(weights.dtype).removeprefix('torch.')} of shape {tuple(weights.shape)} on {weights.device}"
    found += " with gradient: pass weights.detach()" if weights.requires_grad else ""
    raise ShapeError(
        f"token_weights must be floats {tuple(targets.shape)} on {targets.device} without gradient; found {found}."
    )


def checked_weights(
    weights: Float[Tensor, "*batch"], targets: Int[Tensor, "*batch"], ignore_index: int, *, is_read: bool = False
) -> Float[Tensor, "*batch"]:
    """Check that the weights of targets that are not ignored are finite, as far as it needs no wait for a device."""
    # Where values are not read (accelerators, transforms, exports), infinite weights are returned as NaN.
    if device_kind(weights) != "cpu" or plain_operators_only():
        return weights if is_read else finite_or_nan(weights)
    kept = targets != ignore_index
    if torch.compiler.is_compiling():
        copy: Tensor = _finite_copy(weights, kept)
        return copy
    raise_if_not_finite(weights, kept)
    return weights


def finite_or_nan(weights: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return the weights with NaN for infinite ones, where nothing may read their values."""
    return weights - weights + weights


def counted_weights(weights: Float[Tensor, "*batch"], kept: Bool[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return the weights with 0 for tokens that do not count, even if they are infinite or NaN."""
    return weights.masked_fill(~kept, 0.0)


def raise_if_not_finite(weights: Float[Tensor, "*batch"], kept: Bool[Tensor, "*batch"]) -> None:
    """Raise an error for the first infinite weight or NaN of a token that counts. It waits for a device."""
    is_bad = kept & ~weights.isfinite()
    if not bool(is_bad.any()):
        return
    place, length = int(is_bad.flatten().nonzero()[0]), weights.shape[-1] if weights.dim() else 1
    raise SizeError(
        f"token_weights: {weights.flatten()[place].item()} at row {place // length}, column {place % length} is not "
        f"finite in {str(weights.dtype).removeprefix('torch.')}. Only those of ignored targets may be infinite or NaN."
    )


@torch.library.custom_op("embedlayer::finite_copy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _finite_copy(weights: Tensor, kept: Tensor) -> Tensor:
    """Call `raise_if_not_finite` as a custom operator, and return a copy of the weights."""
    raise_if_not_finite(weights, kept)
    return weights.clone()


@_finite_copy.register_fake
def _(weights: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(weights)
