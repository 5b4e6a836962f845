"""Data of the Health view: faulty rows, and how the table uses its dimensions."""

from typing import Any

from embedlayer.analysis.geometry import table_geometry
from embedlayer.analysis.health import TableHealth, table_health
from embedlayer.explorer.tokens import Params
from embedlayer.sources import OpenedModel

LISTED = 2000
DIRECTIONS = 1024


def found(source: OpenedModel, params: Params) -> Any:
    """Return the report of `table_health` as JSON: zero, NaN, duplicate, unchanged and under-trained rows.

    Each list has at most `LISTED` entries.
    """
    report = _health(source).to_json(LISTED)
    for finding in report["under_trained"]["tokens"]:
        finding["text"] = source.token_texts[finding["id"]]
    return report


def scores(source: OpenedModel, params: Params) -> bytes:
    """Return the under-training score of each row as bytes, float32 `(V,)`: above 0 is under-trained."""
    return _health(source).under_trained.scores.float().numpy().tobytes()


def shares(source: OpenedModel, params: Params) -> Any:
    """Return `explained`, `effective_rank`, `isotropy` and `mean_cosine` of the table, as a JSON object.

    `explained` has the share of the variance along each principal direction, largest first, at most `DIRECTIONS`.
    """
    found = source.once("geometry", lambda: table_geometry(source.table))
    return {
        "explained": [float(f"{share:.6g}") for share in found.explained_variance_ratio[:DIRECTIONS].tolist()],
        "effective_rank": found.effective_rank,
        "isotropy": found.isotropy,
        "mean_cosine": found.mean_cosine,
    }


def _health(source: OpenedModel) -> TableHealth:
    """Return `table_health` of a source, computed once; for a run it also compares with the untrained table."""
    before = source.before()
    earlier = None if before is None else before.table
    return source.once("health", lambda: table_health(source.table, source.tokenizer, before=earlier))
