"""What the room Compare shows: two tables laid over one another, and how far each token moved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import SizeError
from embedlayer.explorer import tokens
from embedlayer.explorer.source import Source

Params = Mapping[str, str]

LISTED = 200
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Comparison:
    """Two tables, pair by pair of rows that stand for the same token.

    Attributes:
        ids: Row of each pair in the first table, `(N,)`.
        other_ids: Row of each pair in the second, `(N,)`.
        cosines: Between a row and its partner, after the second table was turned onto the first, `(N,)`.
        places: Along the first table's two widest components, `(N, 2)`.
        other_places: The same for the turned partner, `(N, 2)`.
    """

    ids: Int[Tensor, " N"]
    other_ids: Int[Tensor, " N"]
    cosines: Float[Tensor, " N"]
    places: Float[Tensor, "N 2"]
    other_places: Float[Tensor, "N 2"]


def summary(source: Source, other: Source, params: Params) -> Any:
    """How many tokens both have, how alike they are, and which moved most and least: `[ID, other ID, cosine]`."""
    found = _compared(source, other)
    order = found.cosines.argsort()

    def listed(places: Tensor) -> list[tuple[int, int, float]]:
        columns = (found.ids[places].tolist(), found.other_ids[places].tolist(), found.cosines[places].tolist())
        return [(a, b, round(c, 5)) for a, b, c in zip(*columns, strict=True)]

    return {
        "title": other.title,
        "shared": len(found.ids),
        "mean_cosine": float(found.cosines.mean()),
        "moved_most": listed(order[:LISTED]),
        "moved_least": listed(order.flip(0)[:LISTED]),
        "texts": [other.tokens[row] for row in found.other_ids[order[:LISTED]].tolist()],
    }


def places(source: Source, other: Source, params: Params) -> bytes:
    """Five columns of float32 `(N,)`: across and up in the first table, the same in the second, cosine; then both IDs.

    The IDs are int32.
    """
    found = _compared(source, other)
    columns = torch.stack([*found.places.T, *found.other_places.T, found.cosines]).float()
    ids = torch.stack([found.ids, found.other_ids]).to(torch.int32)
    return columns.numpy().tobytes() + ids.numpy().tobytes()


def other_neighbors(source: Source, other: Source, params: Params) -> Any:
    """The nearest tokens in the other table, with their text: `[[text, cosine], ...]`."""
    return [[other.tokens[row], score] for row, score in tokens.neighbors(other, params)]


def _compared(source: Source, other: Source) -> Comparison:
    return source.once(f"compare {id(other)}", lambda: _compare(source, other))


@torch.no_grad()
def _compare(source: Source, other: Source) -> Comparison:
    ids, other_ids = _same_tokens(source, other)
    if len(ids) < 2:
        raise SizeError(
            f"{source.title} and {other.title} have {len(ids)} tokens in common; there is nothing to align."
        )
    turn = _procrustes(source, other, ids, other_ids)
    found = tokens.principal(source)
    cosines, turned_places = [], []
    for a, b in zip(ids.split(ROWS_AT_ONCE), other_ids.split(ROWS_AT_ONCE), strict=True):
        mine, turned = source.rows[a].double(), other.rows[b].double() @ turn
        cosines.append(torch.cosine_similarity(mine, turned, dim=1))
        turned_places.append((turned - found.mean) @ found.components[:2].T)
    return Comparison(ids, other_ids, torch.cat(cosines), found.coordinates[ids, :2], torch.cat(turned_places))


def _procrustes(
    source: Source, other: Source, ids: Int[Tensor, " N"], other_ids: Int[Tensor, " N"]
) -> Float[Tensor, "E D"]:
    """The turn `R` with orthonormal rows or columns that brings the second table nearest to the first.

    It minimises `|B R - A|` over the pairs: `U V^T` of the singular value decomposition of `B^T A`.
    """
    products = torch.zeros(other.table.embed_dim, source.table.embed_dim, dtype=torch.float64)
    for a, b in zip(ids.split(ROWS_AT_ONCE), other_ids.split(ROWS_AT_ONCE), strict=True):
        products += other.rows[b].double().T @ source.rows[a].double()
    left, _, right = torch.linalg.svd(products, full_matrices=False)
    return left @ right


def _same_tokens(source: Source, other: Source) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Rows that stand for the same text and hold finite numbers; a space in front may be on one side only."""
    if source.tokens == other.tokens:
        pairs = [(row, row) for row in range(source.table.vocab_size)]
    else:
        there = {text: row for row, text in reversed(list(enumerate(other.tokens))) if text}
        spaced = {text.strip(): row for text, row in there.items() if text.startswith(" ") and text.strip()}
        bare = {
            row: there.get(text, there.get(text.strip(), spaced.get(text))) for row, text in enumerate(source.tokens)
        }
        pairs = [(row, partner) for row, partner in bare.items() if partner is not None and source.tokens[row].strip()]
    ids = torch.tensor([a for a, _ in pairs], dtype=torch.int64)
    other_ids = torch.tensor([b for _, b in pairs], dtype=torch.int64)
    usable = (tokens.lengths(source)[ids] > 0) & (tokens.lengths(other)[other_ids] > 0)  # false where a norm is NaN
    return ids[usable], other_ids[usable]
