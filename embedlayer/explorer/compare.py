"""Data of the Compare view: two tables in the same coordinates, and how far each token moved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.analysis.geometry import align_tables, row_movement
from embedlayer.errors import SizeError
from embedlayer.explorer import tokens
from embedlayer.sources import OpenedModel

Params = Mapping[str, str]

LISTED = 200
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class TableComparison:
    """Two tables, compared for each token that both have.

    Attributes:
        ids: Row of each shared token in the first table, `(N,)`.
        other_ids: Row of each shared token in the second table, `(N,)`.
        cosines: Cosine of the two rows after the second table was aligned with the first, `(N,)`.
        places: Coordinates along the first two principal components of the first table, `(N, 2)`.
        other_places: Coordinates of the aligned rows of the second table, `(N, 2)`.
        residual: Share of the first table that the aligned second one does not explain; `None` without an alignment.
    """

    ids: Int[Tensor, " N"]
    other_ids: Int[Tensor, " N"]
    cosines: Float[Tensor, " N"]
    places: Float[Tensor, "N 2"]
    other_places: Float[Tensor, "N 2"]
    residual: float | None


def summary(source: OpenedModel, other: OpenedModel, params: Params) -> Any:
    """Return the number of shared tokens, their mean cosine, and those that moved most and least.

    Each entry of the lists is `[ID, other ID, cosine]`.
    """
    found = _compared(source, other)
    order = found.cosines.argsort()

    def listed(places: Tensor) -> list[tuple[int, int, float]]:
        columns = (found.ids[places].tolist(), found.other_ids[places].tolist(), found.cosines[places].tolist())
        return [(a, b, round(c, 5)) for a, b, c in zip(*columns, strict=True)]

    return {
        "title": other.title,
        "shared": len(found.ids),
        "mean_cosine": float(found.cosines.mean()),
        "residual": found.residual,
        "moved_most": listed(order[:LISTED]),
        "moved_least": listed(order.flip(0)[:LISTED]),
        "texts": [other.token_texts[row] for row in found.other_ids[order[:LISTED]].tolist()],
    }


def places(source: OpenedModel, other: OpenedModel, params: Params) -> bytes:
    """Return the coordinates of both tables as bytes.

    Five columns of float32 `(N,)`: x and y in the first table, x and y in the second, cosine. Then both IDs as int32
    `(N,)`.
    """
    found = _compared(source, other)
    columns = torch.stack([*found.places.T, *found.other_places.T, found.cosines]).float()
    ids = torch.stack([found.ids, found.other_ids]).to(torch.int32)
    return columns.numpy().tobytes() + ids.numpy().tobytes()


def other_neighbors(source: OpenedModel, other: OpenedModel, params: Params) -> Any:
    """Return the nearest neighbours in the other table, with their text: `[[text, cosine], ...]`."""
    return [[other.token_texts[row], score] for row, score in tokens.neighbors(other, params)]


def _compared(source: OpenedModel, other: OpenedModel) -> TableComparison:
    return source.once(f"compare {id(other)}", lambda: _compare(source, other))


@torch.no_grad()
def _compare(source: OpenedModel, other: OpenedModel) -> TableComparison:
    pairs = _same_tokens(source, other)
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
    places = [other.rows[rows].double() @ onto - centre for rows in pairs[:, 1].split(ROWS_AT_ONCE)]
    known = ~moved.cosines.isnan()
    return TableComparison(
        ids=pairs[known, 0],
        other_ids=pairs[known, 1],
        cosines=moved.cosines[known],
        places=found.coordinates[pairs[known, 0], :2],
        other_places=torch.cat(places)[known],
        residual=None if alignment is None else alignment.residual,
    )


def _same_tokens(source: OpenedModel, other: OpenedModel) -> Int[Tensor, "N 2"]:
    """Return pairs of rows with the same text `(N, 2)`; a leading space may be in one table only."""
    if source.token_texts == other.token_texts:
        return torch.arange(source.table.vocab_size)[:, None].repeat(1, 2)
    there = {text: row for row, text in reversed(list(enumerate(other.token_texts))) if text.strip()}
    spaced = {text.strip(): row for text, row in there.items() if text.startswith(" ")}
    partners = [there.get(text, there.get(text.strip(), spaced.get(text))) for text in source.token_texts]
    pairs = [(row, partner) for row, partner in enumerate(partners) if partner is not None]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
