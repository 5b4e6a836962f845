"""Write a table as a parquet file for embedding-atlas, or for any tool that reads columns.

| column | holds |
|---|---|
| `id` | the token's ID |
| `token` | its readable text |
| `kind` | one of `analysis.token_classes.KINDS` |
| `norm` | the Euclidean norm of its row |
| `under_trained` | its score, see `under_trained_scores` |
| `x`, `y` | its coordinates along the first two principal components |
| `neighbors` | `{ids, distances}`: the line numbers in this file of its nearest neighbours, and `1 - cos` |
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from embedlayer.analysis.geometry import principal_components
from embedlayer.analysis.health import table_health
from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import CheckpointError, require
from embedlayer.io.files import named_path, replace_file
from embedlayer.tables.conversions import TableLike
from embedlayer.tokenization.ids import require_rows


def write_atlas(path: Path | str, table: TableLike, tokenizer: Tokenizer, *, num_neighbors: int = 15) -> int:
    """Write a table as a parquet file, atomically, and return the number of rows written.

    Show it with `embedding-atlas FILE --text token --x x --y y --neighbors neighbors`. Rows without a token are left
    out. Neighbours are exact, so their cost grows with `V^2 D`: ten times as many tokens take a hundred times as long.

    Args:
        path: The file to write.
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        tokenizer: The tokenizer of the table.
        num_neighbors: Neighbours per token, fewer in a smaller table; 0 leaves the column `neighbors` out.

    Returns:
        The number of rows written.

    Raises:
        CheckpointError: Rows hold NaN or infinity.
        TokenizerError: The tokenizer has IDs outside the table.
        FileError: The file cannot be written.
        MissingExtraError: pyarrow is not installed: `pip install 'embedlayer[parquet]'`.
    """
    path = named_path(path)
    arrow, parquet = require("pyarrow", extra="parquet"), require("pyarrow.parquet", extra="parquet")
    rows = RowReader(table)
    require_rows(tokenizer, len(rows))
    ids = torch.tensor(sorted(set(tokenizer.get_vocab(with_added_tokens=True).values())), dtype=torch.int64)
    health = table_health(table, tokenizer)
    if broken := health.nonfinite_rows:
        raise CheckpointError(f"{len(broken)} rows hold NaN or infinity, the first is row {broken[0]}: repair them.")
    assert health.kinds is not None
    places = principal_components(table).coordinates[ids].cpu().float()
    has_token = torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, ids, True)
    near = nearest_rows(table, ids, min(num_neighbors, len(ids) - 1), candidates=has_token)
    nearest, distances = torch.searchsorted(ids, near.ids), (1 - near.cosines).clamp_min(0.0)
    columns: dict[str, Any] = {
        "id": ids.numpy(),
        "token": [health.text_of(row).encode(errors="backslashreplace").decode() for row in ids.tolist()],
        "kind": [health.kinds[row] for row in ids.tolist()],
        "norm": health.norms[ids].numpy(),
        "under_trained": health.under_trained.scores[ids].numpy(),
        "x": places[:, 0].numpy(),
        "y": places[:, 1].numpy(),
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
