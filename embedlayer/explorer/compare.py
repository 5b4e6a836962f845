"""Data of the Compare view: two tables in the same coordinates, and how far each token moved."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.geometry import CHUNK_ROWS
from embedlayer.analysis.movement import (
    MovedRow,
    RowMovement,
    TableAlignment,
    align_tables,
    row_movement,
    shared_tokens,
)
from embedlayer.analysis.relation import TableRelation, common_rows, rows_left_out, table_relation
from embedlayer.core.errors import SizeError
from embedlayer.explorer import tokens
from embedlayer.explorer.answers import Comparison, Relation
from embedlayer.explorer.answers import MovedRow as MovedCells
from embedlayer.explorer.tokens import Params
from embedlayer.opening.opened_model import OpenedModel

LISTED = 200

NAMED_ONLY = 8  # tokens that are named of those that only one of the tables has


@dataclass(frozen=True)
class TableComparison:
    """The rows of two tables for each of the N tokens that both have."""

    moved: RowMovement
    places: Float[Tensor, "N 2"]
    other_places: Float[Tensor, "N 2"]
    residual: float | None
    relation: TableRelation
    only: list[int]
    only_other: list[int]


def summary(source: OpenedModel, other: OpenedModel, params: Params) -> Comparison:
    """Return how far the tokens that two tables share moved."""
    comparison = _compared(source, other)
    moved, scale, counts = comparison.moved, comparison.moved.scale, source.counts
    occurs = torch.ones(len(moved.pairs), dtype=torch.bool) if counts is None else counts[moved.pairs[:, 1]] > 0
    related = comparison.relation
    words = {"headline": related.headline(), "details": " ".join(related.details(other.title, source.title))}
    relation = {**related.to_json(LISTED), **words}
    listed = 0 if related.verdict == "unrelated" else LISTED

    def cells(rows: list[MovedRow]) -> list[MovedCells]:
        return [
            (row.after, row.before, round(row.cosine, 9), round(row.norm_after / row.norm_before / scale, 4))
            for row in rows
        ]

    return {
        "title": other.title,
        "shared": len(moved.pairs),
        "mean_cosine": float(moved.cosines.mean()),
        "residual": comparison.residual,
        "scale": scale,
        "relation": cast(Relation, relation),
        "only": [
            {"title": each.title, "rows": len(rows), "tokens": [each.token_texts[row] for row in rows[:NAMED_ONLY]]}
            for each, rows in ((source, comparison.only), (other, comparison.only_other))
        ],
        "moved_most": cells(moved.among(occurs & moved.has_moved).most(listed)),
        "moved_least": cells(moved.among(occurs).least(listed)),
        "moved_never": None if counts is None else cells(moved.among(~occurs & moved.has_moved).most(listed)),
    }


def places(source: OpenedModel, other: OpenedModel, params: Params) -> bytes:
    """Return the coordinates of the tokens that two tables share, for both tables, as bytes."""
    # Five columns of float32 `(N,)`: x, y of the first table, x, y of the second, cosine; then two of int32: ID in the
    # first table, ID in the second.
    comparison = _compared(source, other)
    columns = torch.stack([*comparison.places.T, *comparison.other_places.T, comparison.moved.cosines]).float()
    ids = comparison.moved.pairs.flip(1).T.contiguous().to(torch.int32)
    return columns.numpy().tobytes() + ids.numpy().tobytes()


def other_neighbors(source: OpenedModel, other: OpenedModel, params: Params) -> list[tuple[str, float]]:
    """Return text and cosine of the tokens of the other table nearest to a query in that table, nearest first."""
    return [(other.token_texts[row], score) for row, score in tokens.neighbors(other, params)]


def _compared(source: OpenedModel, other: OpenedModel) -> TableComparison:
    """Return the comparison of two sources; the first call computes it and stores it in `source`."""
    return source.once(f"compare {id(other)}", lambda: _compare(source, other))


@torch.no_grad()
def _compare(source: OpenedModel, other: OpenedModel) -> TableComparison:
    """Align the table of `other` with that of `source`, and compare the rows of the tokens that both have."""
    pairs = common_rows(source, other)
    if pairs is None:  # a table without a tokenizer names its rows "#7"
        pairs = shared_tokens(source.token_texts, other.token_texts)
    if len(pairs) < 2:
        raise SizeError(
            f"{source.title} and {other.title} have {len(pairs)} tokens in common; at least 2 are needed to align them."
        )
    relation = table_relation(other.table, source.table, pairs=pairs.flip(1))
    only, only_other = rows_left_out(pairs, (source.table.vocab_size, other.table.vocab_size))
    alignment: TableAlignment | None = None
    if other is not source.before() and not relation.is_as_stored:
        alignment = align_tables(other.table, source.table, pairs=pairs.flip(1))
    moved = row_movement(other.table, source.table, alignment=alignment, pairs=pairs.flip(1))
    components = tokens.principal(source)
    if alignment is None:
        turn = moved.scale * torch.eye(source.table.embed_dim, dtype=torch.float64)
    else:
        turn = alignment.scale * alignment.rotation
    onto = turn @ components.components[:2].T
    centre = components.mean @ components.components[:2].T
    places = [other.rows[rows].double() @ onto - centre for rows in pairs[:, 1].split(CHUNK_ROWS)]
    known = ~moved.cosines.isnan()
    return TableComparison(
        moved=moved.among(known),
        places=components.coordinates[pairs[known, 0], :2],
        other_places=torch.cat(places)[known],
        residual=None if alignment is None else alignment.residual,
        relation=relation,
        only=only,
        only_other=only_other,
    )
