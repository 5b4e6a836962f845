"""Data of the Training view: the lines of a run's `metrics.jsonl`, and the options of the run."""

import math
from typing import cast

from embedlayer.explorer.answers import Metrics, MetricsLine
from embedlayer.explorer.tokens import Params
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import finite_json
from embedlayer.opening.opened_model import OpenedModel

LINES = 2000


def metrics(source: OpenedModel, params: Params) -> Metrics:
    """Return the training progress of a run, at most `LINES` lines of it, and its options; the source must be a run."""
    assert source.run is not None
    lines = source.run.read_metrics()
    listed = lines[:: -math.ceil(len(lines) / LINES)][::-1] if lines else []
    described = source.run.read() if source.run.contains_run else {}
    model = described.get("model", {})
    options = {**described.get("options", {}), "validation_fraction": described.get("validation_fraction")}
    return {
        "lines": cast(list[MetricsLine], [_present(finite_json(line)) for line in listed]),
        "uniform_loss": math.log(source.table.vocab_size),
        "options": _present(options),
        "made_of": {
            "table": source.table.extra_repr(),
            "position": model.get("position", {}).get("kind", ""),
            "head": "tied to the table" if model.get("head", {}).get("tied") else "untied",
            "layers": model.get("num_layers", ""),
            "heads": model.get("num_heads", ""),
            "parameters": sum(tensor.numel() for tensor in source.model.parameters()) if source.model else "",
        },
        "neighbors_before": finite_json(described.get("notes", {}).get("neighbors_before", [])),
    }


def _present(values: JsonObject) -> JsonObject:
    return {key: value for key, value in values.items() if value is not None}
