"""Data of the Health view: faulty rows, and how the table uses its dimensions."""

from dataclasses import asdict
from typing import cast

from embedlayer.analysis.geometry import chance_geometry, table_geometry
from embedlayer.analysis.health import model_health
from embedlayer.analysis.health_report import TableHealth
from embedlayer.analysis.near_duplicates import NEAR
from embedlayer.analysis.norm_outliers import FACTOR
from embedlayer.analysis.shared_variance import LEAST_RANK, LEAST_SCALE, MOST_OFFSET, MOST_SCALE, MOST_VARIANCE
from embedlayer.explorer.answers import ChanceMeasures, Health, Spectrum
from embedlayer.explorer.tokens import Params
from embedlayer.opening.opened_model import OpenedModel

LISTED = 2000
DIRECTIONS = 1024
LISTED_TEXTS = 100


def report(source: OpenedModel, params: Params) -> Health:
    """Return the report of `table_health`: verdicts about rows, and zero, NaN, duplicate and unchanged rows."""
    health = table_report(source)
    report = health.to_json(LISTED)
    report["shared"]["is_measured"] = health.shared.is_measured
    report["at_fault"] = _at_fault(health)
    report |= {"reasons": health.reasons(), "notes": [*health.notes()]}
    report["nearest"] |= {
        "ids": health.nearest.ids,
        "cosines": [round(each, 6) for each in health.nearest.cosines],
    }
    report["limits"] = {
        "nearest": 1 - NEAR**2 / 2,
        "gap": FACTOR,
        "variance": MOST_VARIANCE,
        "offset": MOST_OFFSET,
        "rank": LEAST_RANK,
        "scale": [LEAST_SCALE, MOST_SCALE],
    }
    for finding in report["under_trained"]["tokens"]:
        finding["text"] = source.token_texts[finding["id"]]
    broken = [report[name]["ids"] for name in ("zero_rows", "nonfinite_rows", "at_mean")]
    broken += [report["spelling"]["odd_rows"]["ids"]] if report["spelling"] else []
    groups = [*report["duplicates"]["ids"], *report["near_duplicates"]["ids"]]
    groups += [group["ids"] for group in report["norm_outliers"]]
    named = sorted({row for ids in (*broken, *groups) for row in ids[:LISTED_TEXTS]})
    report["texts"] = {str(row): source.token_texts[row] for row in named}
    return cast(Health, report)


def verdicts(source: OpenedModel, params: Params) -> bytes:
    """Return the verdict about each row as an index in `VERDICTS`, uint8 bytes, `(V,)`."""
    return table_report(source).verdicts.verdicts.numpy().tobytes()


def noise_shares(source: OpenedModel, params: Params) -> bytes:
    """Return the noise share of each row as float32 bytes, `(V,)`; NaN for rows that were not judged."""
    return table_report(source).verdicts.random.noise_shares.float().numpy().tobytes()


def shares(source: OpenedModel, params: Params) -> Spectrum:
    """Return measures of the table's geometry, with the shares of at most `DIRECTIONS` principal directions."""
    geometry = source.once("geometry", lambda: table_geometry(source.table))
    chance = source.once("chance", lambda: chance_geometry(geometry))
    return {
        "explained": [float(f"{share:.6g}") for share in geometry.explained_variance_ratio[:DIRECTIONS].tolist()],
        "effective_rank": geometry.effective_rank,
        "isotropy": geometry.isotropy,
        "mean_cosine": geometry.mean_cosine,
        "chance": cast(ChanceMeasures, asdict(chance)),
    }


def _at_fault(health: TableHealth) -> list[str]:
    """Return the names of the measures of a table as a whole because of which it is not sound."""
    shared = health.shared
    is_dominant = shared.component_share > MOST_VARIANCE
    faults = {
        "scale": shared.is_out_of_range,
        "offset_share": shared.has_dominant_offset,
        "dimension_share": shared.has_dominant_dimension,
        "component_share": shared.is_measured and is_dominant and not shared.has_dominant_dimension,
        "constant": shared.is_measured and bool(shared.constant),
        "rank": shared.has_few_directions and not health.is_factorized,
        "loss": health.loss is not None and health.loss.is_little,
        "rows": health.has_unlearned_fault,
    }
    return [name for name, is_fault in faults.items() if is_fault]


def table_report(source: OpenedModel) -> TableHealth:
    """Return `model_health` of a source; the first call computes it and stores it in the source."""
    return source.once("health", lambda: model_health(source))
