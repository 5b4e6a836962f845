"""What the room Health shows: what is wrong with rows, and how the table uses its dimensions."""

from collections.abc import Mapping
from typing import Any

import torch

from embedlayer.analysis.health import Health
from embedlayer.analysis.health import health as examine
from embedlayer.explorer.source import Source

Params = Mapping[str, str]

LISTED = 2000
DIRECTIONS = 1024


def found(source: Source, params: Params) -> Any:
    """Zero, broken, duplicate, untouched and under-trained rows, each list with at most `LISTED` entries."""
    report = _health(source).to_json(LISTED)
    for finding in report["under_trained"]["tokens"]:
        finding["text"] = source.tokens[finding["id"]]
    return report


def scores(source: Source, params: Params) -> bytes:
    """How little each row has learned, float32 `(V,)`: above 0 is under-trained."""
    return _health(source).under_trained.scores.float().numpy().tobytes()


def shares(source: Source, params: Params) -> Any:
    """How the variance is spread over directions, and what follows from it."""
    return source.once("spectrum", lambda: _spectrum(source))


def _health(source: Source) -> Health:
    def examined() -> Health:
        before = source.before()
        return examine(source.table, source.tokenizer, before=None if before is None else before.table)

    return source.once("health", examined)


@torch.no_grad()
def _spectrum(source: Source) -> Any:
    """Variances along the principal directions, the exponential of their entropy, and the mean cosine of two rows."""
    width = source.table.embed_dim
    total, scatter, units, count = torch.zeros(width), torch.zeros(width, width), torch.zeros(width), 0
    total, scatter, units = total.double(), scatter.double(), units.double()
    for chunk in source.rows.split(8192):
        kept = chunk[chunk.isfinite().all(1)].double()
        total += kept.sum(0)
        scatter += kept.T @ kept
        units += torch.nn.functional.normalize(kept, dim=1).sum(0)
        count += len(kept)
    mean = total / max(1, count)
    variances = torch.linalg.eigvalsh(scatter / max(1, count) - torch.outer(mean, mean)).flip(0).clamp_min(0)
    ratio = variances / variances.sum().clamp_min(1e-300)
    entropy = -(ratio * ratio.clamp_min(1e-300).log()).sum()
    pairs = max(1, count * (count - 1))
    return {
        "explained": [float(f"{share:.6g}") for share in ratio[:DIRECTIONS].tolist()],
        "effective_rank": float(entropy.exp()),
        "mean_cosine": float((units @ units - count) / pairs),
    }
