"""Data of the Compare view: two tables in the same coordinates, and how far each token moved."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.geometry import CHUNK_ROWS, RowMovement, align_tables, row_movement, shared_tokens
from embedlayer.errors import SizeError
from embedlayer.explorer import tokens
from embedlayer.explorer.tokens import Params
from embedlayer.sources import OpenedModel

LISTED = 200


@dataclass(frozen=True)
class TableComparison:
    """Compare two tables for each of the N tokens that both have.

    Attributes:
        moved: IDs of each token as pairs (second table, first table), and the cosine of its two rows after the second
            table was aligned with the first. Tokens with a zero row or a row with NaN are left out.
        places: Coordinates along the first two principal components of the first table, `(N, 2)`.
        other_places: Coordinates of the aligned rows of the second table, `(N, 2)`.
        residual: Share of the first table that the aligned second one does not explain; `None` without an alignment.
    """

    moved: RowMovement
    places: Float[Tensor, "N 2"]
    other_places: Float[Tensor, "N 2"]
    residual: float | None


def summary(source: OpenedModel, other: OpenedModel, params: Params) -> Any:
    """Return how far the shared tokens moved, as a JSON object for the page.

    Keys: `title` of the other table; `shared`, the number of tokens; `mean_cosine`; `residual` of the alignment;
    `moved_most` and `moved_least`, lists of `[ID, other ID, cosine]`; `texts` of the tokens in `moved_most`.
    """
    found = _compared(source, other)
    most, least = found.moved.most(LISTED), found.moved.least(LISTED)
    return {
        "title": other.title,
        "shared": len(found.moved.pairs),
        "mean_cosine": float(found.moved.cosines.mean()),
        "residual": found.residual,
        "moved_most": [(row.after, row.before, round(row.cosine, 5)) for row in most],
        "moved_least": [(row.after, row.before, round(row.cosine, 5)) for row in least],
        "texts": [other.token_texts[row.before] for row in most],
    }


def places(source: OpenedModel, other: OpenedModel, params: Params) -> bytes:
    """Return the coordinates of all shared tokens in both tables, as bytes.

    First five columns of float32 `(N,)`: x and y of the first table, x and y of the second, cosine. Then two columns of
    int32 `(N,)`: ID in the first table, ID in the second.
    """
    found = _compared(source, other)
    columns = torch.stack([*found.places.T, *found.other_places.T, found.moved.cosines]).float()
    ids = found.moved.pairs.flip(1).T.contiguous().to(torch.int32)
    return columns.numpy().tobytes() + ids.numpy().tobytes()


def other_neighbors(source: OpenedModel, other: OpenedModel, params: Params) -> Any:
    """Return the nearest neighbours of a query in the other table: `[[text, cosine], ...]`, nearest first.

    `params` are those of `tokens.neighbors`, with IDs of the other table.
    """
    return [[other.token_texts[row], score] for row, score in tokens.neighbors(other, params)]


def _compared(source: OpenedModel, other: OpenedModel) -> TableComparison:
    """Return the comparison of two sources; it is computed at the first call and stored in `source`."""
    return source.once(f"compare {id(other)}", lambda: _compare(source, other))


@torch.no_grad()
def _compare(source: OpenedModel, other: OpenedModel) -> TableComparison:
    """Align the table of `other` with that of `source` and compare the rows of their shared tokens.

    The table of `source` before training needs no alignment, since both have the same directions.

    Raises:
        SizeError: The sources have fewer than two tokens in common.
    """
    pairs = shared_tokens(source.token_texts, other.token_texts, ignore_space=True)
    if len(pairs) < 2:
        raise SizeError(
            f"{source.title} and {other.title} have {len(pairs)} tokens in common; at least 2 are needed to align them."
        )
    is_earlier = other is source.before()  # the same directions, so that rows that did not move are seen not to have
    alignment = None if is_earlier else align_tables(other.table, source.table, pairs=pairs.flip(1))
    moved = row_movement(other.table, source.table, alignment=alignment, pairs=pairs.flip(1))
    found = tokens.principal(source)
    turn = torch.eye(source.table.embed_dim).double() if alignment is None else alignment.scale * alignment.rotation
    onto = turn @ found.components[:2].T
    centre = found.mean @ found.components[:2].T
    places = [other.rows[rows].double() @ onto - centre for rows in pairs[:, 1].split(CHUNK_ROWS)]
    known = ~moved.cosines.isnan()
    return TableComparison(
        moved=RowMovement(*(each[known] for each in (moved.pairs, moved.cosines, moved.norms))),
        places=found.coordinates[pairs[known, 0], :2],
        other_places=torch.cat(places)[known],
        residual=None if alignment is None else alignment.residual,
    )
