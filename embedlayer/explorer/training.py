"""Data of the Training view: the lines of a run's `metrics.jsonl`, and the options of the run."""

import math
from typing import Any

from embedlayer.explorer.tokens import Params
from embedlayer.io.json_fields import finite_json
from embedlayer.opening.opened_model import OpenedModel

LINES = 2000


def metrics(source: OpenedModel, params: Params) -> Any:
    """Return the training progress of a run and its options, as a JSON object; the source must be a run.

    `lines` are those of `metrics.jsonl` (steps, losses, touched rows): at most `LINES` of them, evenly spaced, with the
    last one. `uniform_loss` is `ln V`, the loss in nats per token of a uniform distribution. `options` and `made_of`
    describe the run and its model.
    """
    assert source.run is not None
    lines = source.run.read_metrics()
    kept = lines[:: -math.ceil(len(lines) / LINES)][::-1] if lines else []
    described = source.run.read() if source.run.contains_run else {}
    model = described.get("model", {})
    options = {**described.get("options", {}), "validation_fraction": described.get("validation_fraction")}
    return {
        "lines": [{key: value for key, value in finite_json(line).items() if value is not None} for line in kept],
        "uniform_loss": math.log(source.table.vocab_size),
        "options": {key: value for key, value in options.items() if value is not None},
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
