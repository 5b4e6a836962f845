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
    report = table_report(source).to_json(LISTED)
    for finding in report["under_trained"]["tokens"]:
        finding["text"] = source.token_texts[finding["id"]]
    return report


def scores(source: OpenedModel, params: Params) -> bytes:
    """Return the under-training score of each row as float32 bytes, `(V,)`; above 0 the row is under-trained."""
    return table_report(source).under_trained.scores.float().numpy().tobytes()


def shares(source: OpenedModel, params: Params) -> Any:
    """Return measures of the table's geometry as a JSON object; see `TableGeometry`.

    Its keys are `effective_rank`, `isotropy`, `mean_cosine` and `explained`: the share of the variance along each
    principal direction, largest first, at most `DIRECTIONS` of them.
    """
    found = source.once("geometry", lambda: table_geometry(source.table))
    return {
        "explained": [float(f"{share:.6g}") for share in found.explained_variance_ratio[:DIRECTIONS].tolist()],
        "effective_rank": found.effective_rank,
        "isotropy": found.isotropy,
        "mean_cosine": found.mean_cosine,
    }


def table_report(source: OpenedModel) -> TableHealth:
    """Return `table_health` of a source; the first call computes it and stores it in the source.

    For a run, the rows are also compared with those before training.
    """
    before = source.before()
    earlier = None if before is None else before.table
    return source.once("health", lambda: table_health(source.table, source.tokenizer, before=earlier))
