"""Data of the Health view: faulty rows, and how the table uses its dimensions."""

from collections.abc import Mapping
from typing import Any

from embedlayer.analysis.geometry import table_geometry
from embedlayer.analysis.health import TableHealth
from embedlayer.analysis.health import table_health as examine
from embedlayer.sources import OpenedModel

Params = Mapping[str, str]

LISTED = 2000
DIRECTIONS = 1024


def found(source: OpenedModel, params: Params) -> Any:
    """Return zero, NaN, duplicate, unchanged and under-trained rows; each list has at most `LISTED` entries."""
    report = _health(source).to_json(LISTED)
    for finding in report["under_trained"]["tokens"]:
        finding["text"] = source.token_texts[finding["id"]]
    return report


def scores(source: OpenedModel, params: Params) -> bytes:
    """Return the under-training score of each row, float32 `(V,)`: above 0 is under-trained."""
    return _health(source).under_trained.scores.float().numpy().tobytes()


def shares(source: OpenedModel, params: Params) -> Any:
    """Return the share of the variance along each principal direction, and the effective rank and isotropy."""
    return source.once("spectrum", lambda: _spectrum(source))


def _health(source: OpenedModel) -> TableHealth:
    def examined() -> TableHealth:
        before = source.before()
        return examine(source.table, source.tokenizer, before=None if before is None else before.table)

    return source.once("health", examined)


def _spectrum(source: OpenedModel) -> Any:
    found = table_geometry(source.table)
    explained = found.spectrum / found.spectrum.sum().clamp_min(1e-300)
    return {
        "explained": [float(f"{share:.6g}") for share in explained[:DIRECTIONS].tolist()],
        "effective_rank": found.effective_rank,
        "isotropy": found.isotropy,
        "mean_cosine": found.mean_cosine,
    }
