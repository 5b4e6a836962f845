"""What a training run looks like, as one HTML file that opens offline.

The page holds its styles, its pictures (SVG, points as pixels inside) and nothing that is fetched or executed. It is
made from plain numbers and texts, so it needs neither the model nor the code that trained it.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from embedlayer import __version__, plots
from embedlayer.analysis.geometry import PositionPicture
from embedlayer.errors import EmbedLayerWarning, MissingExtraError
from embedlayer.files import write_text

if TYPE_CHECKING:
    import matplotlib.figure

NUMBER_ROWS = 100
"""Lines of the metrics that the page lists beside the curve."""


@dataclass(frozen=True)
class NeighborRow:
    """A token and what was nearest to it before and after training.

    Attributes:
        token: The token's text, as it is (` first`); the page makes its spaces visible.
        before: `(text, cosine)`, nearest first, as `TokenVectors.most_similar` gives them; empty where not known.
        after: The same after training.
    """

    token: str
    before: Sequence[tuple[str, float]]
    after: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class TableMap:
    """Where the table's rows lie along two directions: what `plots.table_map` draws.

    Attributes:
        coordinates: Two numbers per row, `(N, 2)`: `pca(rows).coordinates`.
        labels: Row index to the token's text, the most wanted first; as many are shown as have room.
        explained_variance_ratio: Share of the variance along each direction, or `None`.
        values: A number per row, shown as colour, `(N,)`, or `None`.
        value_label: What `values` are.
    """

    coordinates: Float[Tensor, "N 2"]
    labels: Mapping[int, str] = field(default_factory=dict)
    explained_variance_ratio: Float[Tensor, " C"] | None = None
    values: Float[Tensor, " N"] | None = None
    value_label: str = ""


@dataclass(frozen=True)
class RunReport:
    r"""What a page about a run is made from. A part that is empty or `None` leaves its section out.

    Attributes:
        title: The page's title.
        lead: A sentence under it.
        summary: The tiles: label to value. What follows a newline in the value is shown small: `"8.34\nln V = 8.32"`.
        metrics: Lines of `metrics.jsonl`: `step`, `loss` and what else was measured.
        baseline: `ln V` in nats per token, drawn beside the losses.
        neighbors: Tokens with their neighbours before and after.
        table: The table's map.
        position: What the position scheme looks like: `position_values(...)`.
        options: How the run was made: name to value.
    """

    title: str
    lead: str = "What this embedding layer learned, and how."
    summary: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    baseline: float | None = None
    neighbors: Sequence[NeighborRow] = ()
    table: TableMap | None = None
    position: PositionPicture | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path | str, report: RunReport) -> None:
    """Write a run's page, wholly or not at all.

    Without the extra `plots` the page is written all the same; where a picture would be it says how to get it.

    Args:
        path: The HTML file.
        report: What it shows.

    Warns:
        EmbedLayerWarning: The extra `plots` is missing.

    Raises:
        FileError: The file cannot be written; what was there before is unchanged.
    """
    write_text(path, report_html(report))


def report_html(report: RunReport) -> str:
    """The page that `write_report` writes, as text."""
    parts = [_summary(report), _loss(report), _neighbors(report), _table(report), _position(report), _options(report)]
    template = Template(files("embedlayer").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=_text(report.title), lead=_text(report.lead), version=__version__, sections="\n".join(filter(None, parts))
    )
    if any(MISSING in part for part in parts):
        warnings.warn(
            "The report has no pictures: matplotlib is not installed.\n"
            "Install it with: pip install 'embedlayer[plots]', and write the report again.",
            EmbedLayerWarning,
            stacklevel=3,
        )
    return page


MISSING = '<p class="missing">'


def _summary(report: RunReport) -> str:
    if not report.summary:
        return ""
    tiles = []
    for label, value in report.summary.items():
        large, _, small = value.partition("\n")
        note = f"<small>{_text(small)}</small>" if small else ""
        tiles.append(f"<div><dt>{_text(label)}</dt><dd>{_text(large)}{note}</dd></div>")
    return f'<dl class="tiles" id="summary" aria-label="Summary">{"".join(tiles)}</dl>'


def _loss(report: RunReport) -> str:
    if not report.metrics:
        return ""
    picture = _picture(
        "loss",
        lambda: plots.loss_curve(report.metrics, baseline=report.baseline, title=""),
        alt="Training and validation loss over steps.",
        caption="Loss is the mean surprise at the next token, in nats. The dashed line is ln V, the loss of a model "
        "that gives every token the same chance: a sound start lies on it.",
    )
    return _section("loss", "Loss", "", picture + _numbers(report.metrics))


def _neighbors(report: RunReport) -> str:
    if not report.neighbors:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{_token(row.token)}</th>'
        f'<td data-label="before training">{_near(row.before)}</td>'
        f'<td data-label="after training">{_near(row.after)}</td></tr>'
        for row in report.neighbors
    )
    table = (
        '<table class="neighbors"><thead><tr><th scope="col">token</th><th scope="col">before training</th>'
        f'<th scope="col">after training</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    return _section(
        "neighbors",
        "Nearest tokens, before and after",
        "The rows nearest by cosine. Before training they are nearest by chance. A dot is a space.",
        table,
    )


def _table(report: RunReport) -> str:
    if (table := report.table) is None:
        return ""
    picture = _picture(
        "map",
        lambda: plots.table_map(
            table.coordinates,
            table.labels,
            explained_variance_ratio=table.explained_variance_ratio,
            values=table.values,
            value_label=table.value_label,
            title="",
        ),
        alt="Scatter of all rows of the table along their two principal components, some of them named.",
        caption=f"All {len(table.coordinates):,} rows, along the two directions in which they differ most (exact PCA). "
        "Rows that are close here may be far apart in the other directions.",
    )
    return _section("map", "The table as a map", "", picture)


def _position(report: RunReport) -> str:
    if (position := report.position) is None:
        return ""
    picture = _picture(
        "positions",
        lambda: plots.position_heatmap(
            position.values,
            title="",
            value_label=position.value_label,
            row_label=position.row_label,
            column_label=position.column_label,
        ),
        alt=f"Heat map: {position.value_label}, by {position.row_label} and {position.column_label}.",
        caption=f"{position.value_label.capitalize()}: one row per {position.row_label}, one column per "
        f"{position.column_label}. White is 0, red is above, blue below.",
    )
    return _section("positions", position.title, "", picture)


def _options(report: RunReport) -> str:
    if not report.options:
        return ""
    items = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in report.options.items()
    )
    return _section("options", "How it was made", "", f'<dl class="made">{items}</dl>')


def _section(name: str, heading: str, lead: str, body: str) -> str:
    intro = f'<p class="lead">{_text(lead)}</p>' if lead else ""
    title = f'<h2 id="{name}-heading">{_text(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-heading">{title}{intro}{body}</section>'


def _picture(name: str, draw: "Callable[[], matplotlib.figure.Figure]", *, alt: str, caption: str) -> str:
    try:
        drawn = plots.svg(draw(), prefix=name).replace("<svg", f'<svg role="img" aria-label="{_text(alt)}"', 1)
    except MissingExtraError as error:
        return f"{MISSING}{_text(str(error))}</p>"
    return f'<figure><div class="picture">{drawn}</div><figcaption>{_text(caption)}</figcaption></figure>'


def _numbers(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The numbers behind the curve: at most `NUMBER_ROWS` lines, evenly chosen, the last among them."""
    step = math.ceil(len(metrics) / NUMBER_ROWS)
    lines = list(metrics[::-step])[::-1]
    columns = list(dict.fromkeys(key for line in metrics for key in line))
    head = "".join(f'<th scope="col">{_text(column.replace("_", " "))}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_number(line.get(key))}</td>" for key in columns) + "</tr>" for line in lines
    )
    which = "All" if step == 1 else f"{len(lines)} of"
    return (
        f"<details><summary>{which} {len(metrics)} measurements as numbers</summary>"
        f'<div class="scroll" tabindex="0"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return _text(f"{value:,}" if isinstance(value, int) else str(value))


def _near(neighbors: Sequence[tuple[str, float]]) -> str:
    if not neighbors:
        return '<span class="none">not recorded</span>'
    items = "".join(
        f'<li style="--s:{max(0.0, min(1.0, score)):.3f}">{_token(text)}<span>{score:.2f}</span></li>'
        for text, score in neighbors
    )
    return f'<ol class="near">{items}</ol>'


def _token(text: str) -> str:
    """A token's text with its unseen characters shown, and set apart from dots that are dots."""
    shown = (
        escape(character) if mark is None else f"<i>{mark}</i>" for character, mark in plots.visible_characters(text)
    )
    return f'<span class="token">{"".join(shown)}</span>'


def _text(text: str) -> str:
    """A text for the page: escaped, and without characters that HTML or UTF-8 cannot hold."""
    return escape(re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text))
