"""Masks of padding and of documents that are packed into one row, their other forms, and targets inside of a document.

| form | of documents of 3 and 2 tokens | who uses it |
|---|---|---|
| mask | 1 1 1 2 2 | every layer here, as `attention_mask` |
| `cu_seqlens` | 0 3 5 | flash-attn, torch's `varlen_attn`, `DataCollatorWithFlattening` of transformers |
| `position_ids` | 0 1 2 0 1 | models of transformers without padding |
| separators | 0 0 1 0 1 | token IDs in which each document ends with a token such as `<|endoftext|>` |
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.torch_state import values_are_read

IGNORED = -100
"""Target without a loss, by default: that of `F.cross_entropy`."""

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
    inside = "" if gaps else ", without padding inside of one"
    raise ShapeError(
        f"{name} must be integers or booleans of shape {tuple(shape)}, one for each token: 0 for padding, 1 for text, "
        f"or rising numbers 1, 2, 3, ... for packed documents{inside}; found {found}."
    )


def _first_wrong_row(mask: Tensor, gaps: bool) -> int | None:
    """Return the number of the first row whose numbers fall or are below 0, or without `gaps` go on behind padding."""
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
    labels: Int[Tensor, "*batch T"],
    documents: AttentionMask | None = None,
    *,
    depth: int = 0,
    ignore_index: int = IGNORED,
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


def document_mask(
    *,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    length: int | None = None,
    position_ids: Int[Tensor, "*batch T"] | None = None,
    first: int = 0,
    separators: Bool[Tensor, "*batch T"] | None = None,
) -> Int[Tensor, "*batch T"]:
    """Return the mask of packed documents, 1, 2, 3, ... and 0 for padding, from one of its other forms.

    The way back is `cu_seqlens_of`, and `positions_of` for positions. Values are checked where `check_mask` reads them:
    on the CPU, not in compiled graphs.

    Args:
        cu_seqlens: Cumulative lengths, `(N + 1,)`, from 0: document n has the tokens from `cu_seqlens[n]` up to
            `cu_seqlens[n + 1]`. Equal neighbours are no document.
        length: Number of tokens, T: those after `cu_seqlens[-1]` are padding. `None` for `cu_seqlens[-1]`, for which
            an accelerator is waited for.
        position_ids: Position of each token in its document. A document begins exactly where this is `first`, so two
            documents of one token are two. Smaller numbers are padding.
        first: Position of the first token of a document: `first_position_id` of a loaded layer, which is
            `padding_idx + 1` in RoBERTa.
        separators: Where a token ends a document, such as `ids == end_of_text`. It belongs to the document before it,
            which predicts it, and so do separators that follow it directly. One at the start of a row ends a document
            of which the row has no other token. If there is padding, multiply the mask by `ids != padding`.

    Returns:
        `(T,)` of `cu_seqlens`, else the shape of the argument; int64.

    Raises:
        SizeError: Not exactly one of `cu_seqlens`, `position_ids` and `separators` is passed.
        ShapeError: The argument has another dtype or another number of dimensions; `cu_seqlens` do not start at 0, fall
            or exceed `length`; or a position is neither `first` nor one more than that of the token before it.

    Example:
        >>> document_mask(cu_seqlens=torch.tensor([0, 3, 5]), length=6)
        tensor([1, 1, 1, 2, 2, 0])
        >>> document_mask(position_ids=torch.tensor([0, 1, 2, 0, 0, 1]))
        tensor([1, 1, 1, 2, 3, 3])
        >>> document_mask(separators=torch.tensor([5, 6, 9, 7, 9]) == 9)
        tensor([1, 1, 1, 2, 2])
    """
    forms = {"cu_seqlens": cu_seqlens, "position_ids": position_ids, "separators": separators}
    passed = [name for name, form in forms.items() if form is not None]
    if len(passed) != 1:
        raise SizeError(f"document_mask takes one of {', '.join(forms)}, not {len(passed)} of them.")
    if cu_seqlens is not None:
        return _mask_of_lengths(cu_seqlens, length)
    if position_ids is not None:
        return _mask_of_positions(position_ids, first)
    _check_form("separators", separators, "booleans of shape (..., T), ids == end_of_text", is_boolean=True)
    assert separators is not None
    is_first = F.pad(separators, (1, 0))[..., :-1] & ~separators
    return is_first.cumsum(-1) + 1


def cu_seqlens_of(documents: AttentionMask) -> Int[Tensor, " N_plus_1"]:
    """Return the cumulative lengths of the documents of a mask, as variable-length attention takes them.

    The rows of a batch follow one another, and each begins a document. An accelerator is waited for: the size of the
    result depends on the mask.

    Args:
        documents: Mask of packed documents, `(..., T)`; see `check_mask`. Padding may be at the end of the last row.

    Returns:
        0, and the number of tokens up to the end of each document, `(N + 1,)` int32.

    Raises:
        ShapeError: `documents` are no mask, or have padding elsewhere.

    Example:
        >>> cu_seqlens_of(torch.tensor([[1, 1, 1, 2], [1, 1, 0, 0]]))
        tensor([0, 3, 4, 6], dtype=torch.int32)
    """
    check_mask(documents, documents.shape, "documents")
    cu_seqlens, _, count = packed_lengths(documents)
    if not bool((documents != 0).flatten()[:count].all()):
        raise ShapeError("cu_seqlens have no padding between documents: take it out of each row first, ids[mask != 0].")
    return cu_seqlens


def packed_lengths(mask: AttentionMask) -> tuple[Int[Tensor, " N_plus_1"], int, int]:
    """Return the cumulative lengths of the documents of a mask, the length of the longest, and the number of tokens."""
    number = _is_first(mask).flatten().cumsum(0)
    lengths = F.pad(torch.zeros_like(number), (1, 0)).scatter_add_(0, number, (mask != 0).flatten().long())
    cu_seqlens = lengths.cumsum(0)
    count, longest, tokens = torch.stack([number[-1:].sum(), lengths.amax(), cu_seqlens[-1]]).tolist()
    return cu_seqlens[: count + 1].int(), longest, tokens


def index_in_document(mask: AttentionMask) -> Int[Tensor, "*batch T"]:
    """Return the index of each token in its document, from 0; padding does not count, and its result has no meaning."""
    index = (mask != 0).cumsum(-1) - 1
    return index - torch.where(_is_first(mask), index, 0).cummax(-1).values


def _is_first(mask: AttentionMask) -> Bool[Tensor, "*batch T"]:
    """Return which tokens are the first of a document of their row; padding is none."""
    document = mask.long().cummax(-1).values
    return (mask != 0) & (document != F.pad(document, (1, 0))[..., :-1])


def _mask_of_lengths(cu_seqlens: Tensor, length: int | None) -> Tensor:
    """Return the mask of documents with these cumulative lengths."""
    _check_form("cu_seqlens", cu_seqlens, "integers of shape (N + 1,)", most_dimensions=1)
    if values_are_read(cu_seqlens):
        ends = cu_seqlens.tolist()
        if not ends or ends[0] != 0 or ends != sorted(ends) or (length is not None and ends[-1] > length):
            bound = "" if length is None else f" of at most {length}"
            raise ShapeError(f"cu_seqlens are lengths{bound}, summed up from 0, such as [0, 3, 5]; found {ends}.")
    length = int(cu_seqlens[-1]) if length is None else length
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ends_before = torch.searchsorted(cu_seqlens, places, right=True)
    return torch.where(places < cu_seqlens[-1], ends_before, 0)


def _mask_of_positions(position_ids: Tensor, first: int) -> Tensor:
    """Return the mask of documents that begin where a position is `first`; smaller positions are padding."""
    _check_form("position_ids", position_ids, "integers of shape (..., T)")
    mask = torch.where(position_ids < first, 0, (position_ids == first).cumsum(-1))
    wrong = (position_ids >= first) & ((mask == 0) | (index_in_document(mask) + first != position_ids))
    if values_are_read(wrong) and bool(wrong.any()):
        *row, place = wrong.nonzero()[0].tolist()
        at = f"token {place}{f' of row {row}' if row else ''}"
        raise ShapeError(
            f"position_ids: {int(position_ids[*row, place])} at {at} is neither {first}, where a document begins, nor "
            f"one more than the position before it. Pass first= if positions count from another number."
        )
    return mask


def _check_form(
    name: str, x: object, expected: str, *, is_boolean: bool = False, most_dimensions: float = math.inf
) -> None:
    """Raise a `ShapeError` unless `x` is a tensor of integers, or of booleans, with one dimension or more."""
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} must be a tensor of {expected}; found {type(x).__name__}.")
    has_type = not x.is_floating_point() and not x.is_complex() and (x.dtype == torch.bool) == is_boolean
    if not has_type or not 1 <= x.dim() <= most_dimensions:
        dtype = str(x.dtype).removeprefix("torch.")
        raise ShapeError(f"{name} must be {expected}; found {dtype} values of shape {tuple(x.shape)}.")
