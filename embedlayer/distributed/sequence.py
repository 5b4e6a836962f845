"""Shares of a sequence for context parallelism: which tokens a rank has, and the tokens before them that layers read.

Context parallelism splits a sequence over ranks. Compute IDs, positions, the mask of documents and targets of the whole
sequence, and take the share of each; everything that is computed token by token is then that of the whole. Attention
across ranks is the caller's; `examples/context_parallel.py` trains a decoder.

| order | share of rank r of R | who uses it |
|---|---|---|
| `"contiguous"` | chunk r of R | ring attention of bidirectional models, Ulysses |
| `"zigzag"` | chunks r and 2R - 1 - r of 2R | `context_parallel` of torch (`_HeadTailLoadBalancer`), Megatron |

With a causal mask, the ranks of the zigzag order have equal work in attention.

N-grams and convolutions also read tokens before the share. `halo_rows` and `exchange_halo` return the chunks of a share
as rows of a batch, each behind the tokens before it, and `without_halo` is the way back to the share::

    halo = ngrams.hash.max_order - 1
    rows = [halo_rows(x, rank, ranks, order=order, halo=halo) for x in (ids, documents)]
    vectors = without_halo(ngrams(*rows), halo=halo, order=order)
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from embedlayer.core.collectives import Collectives
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.data.windows import check_rank

ShareOrder = Literal["contiguous", "zigzag"]
"""Which chunks of a sequence a rank has."""


def token_ranges(length: int, rank: int, ranks: int, *, order: ShareOrder = "contiguous") -> tuple[range, ...]:
    """Return which of the tokens `0..length - 1` a rank has: one range, or two in zigzag order.

    The start of a range is the offset of that part of the share.

    Raises:
        SizeError: There is no such rank or order, or the tokens do not divide into equal chunks.

    Example:
        >>> [token_ranges(8, rank, 2, order="zigzag") for rank in range(2)]
        [(range(0, 2), range(6, 8)), (range(2, 4), range(4, 6))]
    """
    check_rank(rank, ranks)
    chunks = _chunks_of(rank, ranks, order)
    total = len(chunks) * ranks
    if length % total:
        spare = -length % total
        raise SizeError(
            f"{length} tokens do not divide into {total} equal chunks, which {ranks} ranks need in {order} order: pad "
            f"by F.pad(x, (0, {spare}), value=value), hidden states by F.pad(x, (0, 0, 0, {spare})); see "
            f"docs/errors.md, Shares."
        )
    size = length // total
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)


def share_of(x: Tensor, rank: int, ranks: int, *, order: ShareOrder = "contiguous", dim: int = -1) -> Tensor:
    """Return the tokens of a rank; `join_shares` joins the shares of all ranks.

    Args:
        x: A number or a vector for each token: IDs, positions, documents or targets `(..., T)`, vectors with another
            `dim`. Compute positions and targets of the whole sequence, not of a share.
        rank: Rank of this process in its context-parallel group.
        ranks: Number of ranks in the group, R.
        order: Which tokens a rank has; see the table of this module.
        dim: Dimension of the tokens.

    Returns:
        T / R tokens along `dim`. The contiguous share is a view.

    Raises:
        SizeError: There is no such rank or order, or the tokens do not divide into equal chunks.

    Example:
        >>> [share_of(torch.arange(8), rank, 2, order="zigzag").tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]

    Reference: torch.distributed.tensor.experimental.context_parallel; Megatron-LM, `get_batch_on_this_cp_rank`.
    """
    parts = [x.narrow(dim, each.start, len(each)) for each in token_ranges(x.shape[dim], rank, ranks, order=order)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join_shares(shares: Sequence[Tensor], *, order: ShareOrder = "contiguous", dim: int = -1) -> Tensor:
    """Return the whole sequence from the shares of all ranks, in the order of the ranks: the inverse of `share_of`.

    Raises:
        SizeError: There is no such order.
        ShapeError: There is no share, they have different shapes, or in zigzag order an odd number of tokens.

    Example:
        >>> join_shares([torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])], order="zigzag")
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    each = [_chunks_of(rank, len(shares), order) for rank in range(len(shares))]
    shapes = {tuple(share.shape) for share in shares}
    if len(shapes) != 1 or shares[0].shape[dim] % len(each[0]):
        raise ShapeError(
            f"Shares of one sequence have one shape, in zigzag order with an even number of tokens; found "
            f"{sorted(shapes)}."
        )
    chunks = {
        number: chunk
        for numbers, share in zip(each, shares, strict=True)
        for number, chunk in zip(numbers, share.chunk(len(numbers), dim), strict=True)
    }
    return torch.cat([chunks[number] for number in range(len(chunks))], dim)


def gather_shares(
    share: Tensor, group: dist.ProcessGroup | None = None, *, order: ShareOrder = "contiguous", dim: int = -1
) -> Tensor:
    """Return the whole sequence on every rank: `join_shares` of the shares of all ranks.

    Differentiable: the gradient of a token is the sum of its gradients on all ranks. All ranks must call it, and
    `backward`, in the same order.

    Args:
        share: This rank's tokens, with the same shape on every rank.
        group: The context-parallel group; `None` for the default group.
        order: Which tokens a rank has.
        dim: Dimension of the tokens.

    Raises:
        SizeError: There is no such order.
        ShapeError: In zigzag order, the share has an odd number of tokens.
        PeerError: Another rank ended, or did not call it.
    """
    ranks = Collectives(group)
    shares = ranks.all_gather(share.unsqueeze(0), [1] * ranks.size)
    return join_shares(shares.unbind(), order=order, dim=dim)


def halo_rows(
    x: Shaped[Tensor, "B T *rest"],
    rank: int,
    ranks: int,
    *,
    halo: int,
    order: ShareOrder = "contiguous",
    fill: float = 0,
) -> Shaped[Tensor, "rows S *rest"]:
    """Return each chunk of a rank's share behind the `halo` tokens before it, as rows of a batch.

    Args:
        x: A number or a vector for each token of the whole sequences.
        rank: Rank of this process in its context-parallel group.
        ranks: Number of ranks in the group.
        halo: Number of earlier tokens that a result depends on: `max_order - 1` of an n-gram hash,
            `(kernel_size - 1) * dilation` of a convolution, and their sum for a convolution over n-grams.
        order: Which tokens a rank has.
        fill: Value of tokens before the start. Pass the mask of documents too, all 1 for one document without padding:
            these tokens are then padding, for `fill` 0.

    Returns:
        `(C * B, halo + T / (C * ranks), ...)`, with the rows of the first chunk first, and those of the second behind
        them; C is 1, or 2 in zigzag order.

    Raises:
        SizeError: `halo` is below 0, or the errors of `token_ranges`.

    Example:
        >>> halo_rows(torch.arange(1, 9)[None], 1, 2, halo=3, order="zigzag")
        tensor([[0, 1, 2, 3, 4],
                [2, 3, 4, 5, 6]])
    """
    _check_halo(halo)
    before = torch.cat([x.new_full((len(x), halo, *x.shape[2:]), fill), x], 1)
    ranges = token_ranges(x.shape[1], rank, ranks, order=order)
    return torch.cat([before[:, each.start : each.stop + halo] for each in ranges])


def exchange_halo(
    share: Shaped[Tensor, "B S *rest"],
    group: dist.ProcessGroup | None = None,
    *,
    halo: int,
    order: ShareOrder = "contiguous",
    fill: float = 0,
) -> Shaped[Tensor, "rows S_halo *rest"]:
    """Return what `halo_rows` does, from the shares of all ranks: for hidden states, which no rank has of all tokens.

    Each rank sends the last `halo` tokens of a chunk to the rank with the next one. Differentiable: the gradient of a
    token is sent back. All ranks must call it, and `backward`, in the same order.

    Args:
        share: This rank's tokens.
        group: The context-parallel group; `None` for the default group.
        halo: Number of earlier tokens, at most those of a chunk.
        order: Which tokens a rank has.
        fill: Value of tokens before the start.

    Raises:
        SizeError: `halo` is below 0 or exceeds a chunk, or there is no such order.
        ShapeError: In zigzag order, the share has an odd number of tokens.
        PeerError: Another rank ended, or did not call it.
    """
    ranks = Collectives(group)
    numbers = _chunks_of(ranks.rank, ranks.size, order)
    chunks = _equal_parts(share, len(numbers), 1)
    size = chunks[0].shape[1]
    _check_halo(halo, size)
    if halo == 0:
        return torch.cat(chunks)
    last = len(numbers) * ranks.size - 1
    owners = [min(chunk, 2 * ranks.size - 1 - chunk) for chunk in range(last + 1)]  # in either order
    ends = {  # by the rank with the next chunk
        owners[number + 1]: chunk[:, size - halo :].transpose(0, 1)
        for number, chunk in zip(numbers, chunks, strict=True)
        if number < last
    }
    senders = {owners[number - 1] for number in numbers if number > 0}
    send_counts, receive_counts = ([halo * (rank in peers) for rank in range(ranks.size)] for peers in (ends, senders))
    sent = torch.cat([ends[rank] for rank in sorted(ends)] or [share.transpose(0, 1)[:0]])
    halos = ranks.all_to_all(sent, send_counts, receive_counts)  # of chunk r from rank r - 1, of the second from r + 1
    if ranks.rank == 0:
        halos = torch.cat([halos.new_full((halo, *halos.shape[1:]), fill), halos])
    rows = zip(halos.transpose(0, 1).split(halo, 1), chunks, strict=True)
    return torch.cat([torch.cat(pair, 1) for pair in rows])


def without_halo(
    rows: Shaped[Tensor, "rows S_halo *rest"], *, halo: int, order: ShareOrder = "contiguous"
) -> Shaped[Tensor, "B S *rest"]:
    """Return a rank's share from the rows of `halo_rows` or `exchange_halo`, or from results for these rows.

    Raises:
        SizeError: `halo` is below 0 or exceeds a row, or there is no such order.
        ShapeError: In zigzag order, there is an odd number of rows.

    Example:
        >>> without_halo(torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]), halo=3, order="zigzag")
        tensor([[3, 4, 5, 6]])
    """
    _check_halo(halo, rows.shape[1])
    return torch.cat(_equal_parts(rows[:, halo:], len(_chunks_of(0, 1, order)), 0), 1)


def _chunks_of(rank: int, ranks: int, order: ShareOrder) -> tuple[int, ...]:
    """Return the numbers of the chunks of a sequence that a rank has, in rising order."""
    if order == "contiguous":
        return (rank,)
    if order == "zigzag":
        return rank, 2 * ranks - 1 - rank
    raise SizeError(f"order is one of {', '.join(get_args(ShareOrder))}, not {order!r}.")


def _equal_parts(x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """Return equal parts of a tensor, one for each chunk of a share; raise a `ShapeError` if they cannot be equal."""
    if x.shape[dim] % parts:
        raise ShapeError(f"In zigzag order a share has two equal chunks: {tuple(x.shape)} is odd in dimension {dim}.")
    return x.chunk(parts, dim)


def _check_halo(halo: int, size: int | None = None) -> None:
    """Raise a `SizeError` unless `halo` is at least 0, and at most `size`."""
    if halo < 0 or (size is not None and halo > size):
        most = "" if size is None else f" and at most the {size} of a chunk"
        raise SizeError(f"halo is a number of earlier tokens, at least 0{most}, not {halo}.")
