"""Masks of padding and of documents that are packed into one row, and the targets that lie inside of a document."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.torch_state import values_are_read

AttentionMask = Int[Tensor, "*batch T"] | Bool[Tensor, "*batch T"]
"""0 for padding; 1 for text, or rising numbers such as 1, 2, 3, ... for the documents packed into a row.

`check_mask` states the contract.
"""


def check_mask(mask: object, shape: Sequence[int], name: str = "attention_mask", *, gaps: bool = True) -> None:
    """Check a mask of padding and packed documents.

    It holds integers or booleans: 0 for padding, above 0 for text. Tokens of one document have the same number, and a
    later document has a larger one. So a row of a longer batch keeps its numbers, and `[2, 2, 5]` is two documents.
    Padding may be anywhere, in general also inside of a document.

    The values are read on the CPU only, and not in compiled graphs, exports and `torch.func` transforms.

    Args:
        mask: What a caller passed.
        shape: Shape of the tokens, `(..., T)`.
        name: Name of the argument, for the message.
        gaps: Whether a document may have padding inside.

    Raises:
        ShapeError: The mask is no tensor, holds floats, as an additive mask does, has another shape, or has numbers
            that fall, as in `[2, 2, 1]` and `[1, 2, 1]`, or below 0. Without `gaps`, a document goes on behind padding:
            `[1, 0, 1]`.

    Example:
        >>> check_mask(torch.tensor([0, 1, 1, 2]), (4,))
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        found = f"{str(mask.dtype).removeprefix('torch.')} values" if isinstance(mask, Tensor) else type(mask).__name__
    elif mask.shape != torch.Size(shape):
        found = f"shape {tuple(mask.shape)}"
    elif (row := _first_wrong_row(mask, gaps)) is not None:
        found = f"row {row} {mask.reshape(-1, mask.shape[-1])[row].long().tolist()}"
    else:
        return
    raise ShapeError(
        f"{name} must be integers or booleans of shape {tuple(shape)}, one for each token: 0 for padding, 1 for text, "
        f"or from left to right rising numbers 1, 2, 3, ... for packed documents"
        f"{'' if gaps else ', without padding inside of one'}; found {found}."
    )


def _first_wrong_row(mask: Tensor, gaps: bool) -> int | None:
    """Return the number of the first row whose numbers fall or are below 0, or without `gaps` go on behind padding.

    Rows are counted over all batch dimensions. The result is `None` if there is no such row, and where values are not
    read.
    """
    if not values_are_read(mask) or mask.numel() == 0:
        return None
    mask = mask.long()
    low, high = torch.aminmax(mask)
    if gaps and low >= 0 and high <= 1:  # of most masks no more is computed
        return None
    last = F.pad(mask.cummax(-1).values, (1, 0))[..., :-1]  # number of the document before each token
    wrong = (mask < 0) | ((mask != 0) & (mask < last))
    if not gaps:
        wrong |= (mask != 0) & (mask == last) & (F.pad(mask, (1, 0))[..., :-1] == 0)
    return int(wrong.any(-1).flatten().nonzero()[0]) if bool(wrong.any()) else None


def shifted_targets(
    labels: Int[Tensor, "*batch T"], documents: AttentionMask | None = None, *, depth: int = 0, ignore_index: int = -100
) -> Int[Tensor, "*batch S"]:
    """Return what each token predicts `depth + 1` tokens later: `labels[..., depth + 1:]`.

    A target in another document than the token that predicts it is ignored, and so is one that padding predicts, or
    that is padding: its value is `ignore_index`.

    Args:
        labels: Token IDs, not shifted.
        documents: Mask of padding and packed documents, see `check_mask`; `None` for one document without padding.
        depth: 0 for the next token, 1 for the one after it, and so on.
        ignore_index: Value of ignored targets.

    Returns:
        Targets of the first `T - depth - 1` tokens; none in a shorter sequence.

    Raises:
        ShapeError: `documents` are no mask for these labels, or the labels are floats.
        SizeError: `depth` is no integer of at least 0.

    Example:
        >>> shifted_targets(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([1, 1, 2, 2, 0]))
        tensor([   6, -100,    8, -100])
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise SizeError(f"depth is 0 for the next token, 1 for the one after it, and so on, not {depth}.")
    if labels.is_floating_point() or labels.is_complex():
        raise ShapeError(f"Labels are token IDs, integers, not {str(labels.dtype).removeprefix('torch.')} values.")
    targets = labels[..., depth + 1 :]
    if documents is None:
        return targets
    check_mask(documents, labels.shape, "documents")
    here, there = documents[..., : targets.shape[-1]], documents[..., depth + 1 :]
    return targets.where((here == there) & (here != 0), ignore_index)
