"""A table as a parquet file for embedding-atlas, or for any tool that reads columns.

| column | holds |
|---|---|
| `id` | the token's ID |
| `token` | what it stands for |
| `kind` | see `token_kinds` |
| `norm` | length of its row |
| `under_trained` | see `under_trained_scores` |
| `x`, `y` | its place along the two widest principal directions, over all rows, exactly |
| `neighbors` | `{ids, distances}`: the nearest other tokens, by their row in this file, and `1 - cos` |
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.geometry import pca
from embedlayer.analysis.health import health
from embedlayer.analysis.rows import Rows
from embedlayer.errors import CheckpointError, SizeError, TokenizerError, require
from embedlayer.io.files import replace_file
from embedlayer.tables.dense import TableLike
from embedlayer.data.tokenizer import require_rows

QUERIES_AT_ONCE = 2048
COLUMNS = ("id", "token", "kind", "norm", "under_trained", "x", "y", "neighbors")


def write_atlas(path: Path | str, table: TableLike, tokenizer: Tokenizer, *, num_neighbors: int = 15) -> int:
    """Write a table as parquet, wholly or not at all.

    To look at it: `embedding-atlas FILE --text token --x x --y y --neighbors neighbors`. Rows without a token are left
    out. Neighbours are exact, so their cost grows as `V^2 D`: a vocabulary ten times as large takes a hundred times as
    long. `num_neighbors=0` writes none.

    Args:
        path: The file.
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        tokenizer: Its tokenizer.
        num_neighbors: Neighbours of each token; fewer where there are not so many.

    Returns:
        Rows that were written.

    Raises:
        MissingExtraError: pyarrow is not there: `pip install 'embedlayer[parquet]'`.
        ShapeError: A plain tensor that is not `(V, D)`.
        SizeError: The rows are narrower than 2, or `num_neighbors` is negative.
        CheckpointError: Rows hold NaN or infinity.
        TokenizerError: The tokenizer has IDs outside the table, or no tokens.
        FileError: The file cannot be written.
    """
    arrow, parquet = require("pyarrow", extra="parquet"), require("pyarrow.parquet", extra="parquet")
    rows = Rows(table)
    require_rows(tokenizer, len(rows))
    ids = torch.tensor(sorted(set(tokenizer.get_vocab(with_added_tokens=True).values())), dtype=torch.int64)
    if not len(ids):
        raise TokenizerError("The tokenizer has no tokens, so the map would be empty: give the model's.")
    if num_neighbors < 0 or rows.embed_dim < 2:
        raise SizeError(
            f"A map needs rows of width 2 or more and 0 or more neighbours; found width {rows.embed_dim} and "
            f"num_neighbors={num_neighbors}."
        )
    found = health(table, tokenizer)
    if found.nonfinite_rows:
        raise CheckpointError(
            f"{len(found.nonfinite_rows)} rows hold NaN or infinity, the first is row {found.nonfinite_rows[0]}: mend "
            f"them first."
        )
    assert found.kinds is not None
    places = pca(table).coordinates[ids].cpu()
    nearest, distances = nearest_rows(table, ids, num_neighbors)
    columns: dict[str, Any] = {
        "id": arrow.array(ids.numpy()),
        "token": arrow.array([_writable(found.text_of(row)) for row in ids.tolist()], arrow.string()),
        "kind": arrow.array([found.kinds[row] for row in ids.tolist()], arrow.string()),
        "norm": arrow.array(found.norms[ids].numpy()),
        "under_trained": arrow.array(found.under_trained.scores[ids].numpy()),
        "x": arrow.array(places[:, 0].float().numpy()),
        "y": arrow.array(places[:, 1].float().numpy()),
    }
    if nearest.shape[1]:
        offsets = arrow.array(range(0, nearest.numel() + 1, nearest.shape[1]), arrow.int32())
        lists = [
            arrow.ListArray.from_arrays(offsets, arrow.array(values.flatten().numpy()))
            for values in (nearest, distances)
        ]
        columns["neighbors"] = arrow.StructArray.from_arrays(lists, names=["ids", "distances"])
    with replace_file(path) as partial:
        parquet.write_table(arrow.table(columns), partial)
    return len(ids)


@torch.no_grad()
def nearest_rows(
    table: TableLike, ids: Int[Tensor, " N"], count: int
) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
    """For each of some rows the places within `ids` of the nearest others, and `1 - cos`, nearest first."""
    rows = Rows(table)
    count = min(count, len(ids) - 1)
    if count < 1:
        return torch.empty(len(ids), 0, dtype=torch.int64), torch.empty(len(ids), 0)
    step = max(1, (1 << 21) // rows.embed_dim)
    nearest, distances = [], []
    for first, queries in zip(range(0, len(ids), QUERIES_AT_ONCE), ids.split(QUERIES_AT_ONCE), strict=True):
        units = F.normalize(rows.take(queries).float(), dim=1)
        best = torch.full((len(queries), count), -torch.inf)
        places = torch.zeros(len(queries), count, dtype=torch.int64)
        for start, part in zip(range(0, len(ids), step), ids.split(step), strict=True):
            cosines = units @ F.normalize(rows.take(part).float(), dim=1).T
            own = torch.arange(len(queries)) + first - start
            inside = (own >= 0) & (own < len(part))
            cosines[torch.nonzero(inside)[:, 0], own[inside]] = -torch.inf
            values, found = cosines.topk(min(count, len(part)), dim=1)
            best, order = torch.cat([best, values], 1).topk(count, dim=1)
            places = torch.cat([places, found + start], 1).gather(1, order)
        nearest.append(places)
        distances.append((1 - best).clamp(0.0, 2.0))
    return torch.cat(nearest), torch.cat(distances)


def _writable(text: str) -> str:
    """Text that UTF-8 can hold; a lone surrogate becomes its escape."""
    return text.encode("utf-8", errors="backslashreplace").decode()
