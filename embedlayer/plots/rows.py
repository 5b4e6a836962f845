"""Figures of the rows of a table: norms, variance along principal components, gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.analysis.geometry import variance_shares
from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.formatting import count_of, visible_text
from embedlayer.plots.style import (
    BACKING,
    BLUE,
    DASHES,
    LINES,
    MUTED,
    ORANGE,
    PAPER,
    Figure,
    caption,
    left_out,
    new_figure,
    numbers,
    usual_range,
)
from embedlayer.tables.conversions import as_rows
from embedlayer.tables.lookup import LookupTable
from embedlayer.tokenization.bytes import token_text
from embedlayer.tokenization.ids import table_size

ROUNDING = 1e-6  # tolerance for rounding in sums of shares
FEW_COMPONENTS = 16  # largest number of components that are drawn as points on their line


@torch.no_grad()
def norm_histogram(
    norms: LookupTable | nn.Embedding | Float[Tensor, " N"], *, title: str = "Norms of the rows", bins: int = 60
) -> Figure:
    """Draw a histogram of the L2 norms of the rows, with the median.

    The figure says how many rows are left out, because they hold NaN or infinity, and how many outliers (see
    `style.usual_range`) are counted in the first or the last bar.

    Args:
        norms: A table, or the norm of each row.
        title: Title of the figure.
        bins: Number of bars.

    Example:
        >>> figure = norm_histogram(TokenEmbedding(100, 16))
    """
    norms = as_rows(norms)
    if isinstance(norms, LookupTable):
        norms = RowReader(norms).norms()
    values = numbers(norms)
    finite = values[np.isfinite(values)]
    low, high = usual_range(finite)
    with new_figure(7.2, 3.6, title=title) as (figure, axes):
        axes.set(xlabel="L2 norm of the row", ylabel="rows")
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
        axes.locator_params(axis="y", integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        if finite.size:
            axes.hist(finite.clip(low, high), bins=bins, color=BLUE, edgecolor=PAPER, linewidth=0.6)
            median = float(np.quantile(finite, 0.5, method="lower"))
            axes.axvline(median, color=ORANGE, linewidth=1.6)
            axes.annotate(
                f"median {median:.3g}",
                (median, 1),
                xycoords=("data", "axes fraction"),
                xytext=(5, -4),
                textcoords="offset points",
                va="top",
                color=ORANGE,
                bbox=BACKING,
            )
        caption(
            figure,
            left_out(len(values) - len(finite), "row", "NaN or infinity"),
            _in_the_end_bar(finite[finite < low], "first"),
            _in_the_end_bar(finite[finite > high], "last"),
        )
    return figure


def _in_the_end_bar(outliers: Any, which: str) -> str:
    """Say that outliers are counted in the first or the last bar; `""` without outliers."""
    if not outliers.size:
        return ""
    norms = f"a norm of {outliers[0]:.3g}"
    if outliers.size > 1:
        norms = f"norms of {outliers.min():.3g} to {outliers.max():.3g}"
    return f"{count_of(outliers.size, 'row')} with {norms} counted in the {which} bar."


@torch.no_grad()
def spectrum(
    tables: Mapping[str, LookupTable | nn.Embedding | Float[Tensor, "_ _"] | Float[Tensor, " _"]],
    *,
    share: float = 0.5,
    title: str = "Variance along the principal components",
) -> Figure:
    """Draw the cumulative variance of the principal components, and mark how many components have `share` of it.

    The legend has this number for each table. Marks of several tables at one place are rings around each other. The
    figure says how many rows are left out because they hold NaN or infinity.

    Args:
        tables: One to four by name: tables, their rows, or shares of the variance in descending order, such as
            `principal_components(rows, D).explained_variance_ratio`.
        share: Share of the variance at which components are counted.
        title: Title of the figure.

    Example:
        >>> figure = spectrum({"fresh": TokenEmbedding(100, 16)})
    """
    if len(tables) > len(LINES):
        raise SizeError(f"One figure shows at most {len(LINES)} tables; found {len(tables)}.")
    with new_figure(7.2, 3.9, title=title) as (figure, axes):
        notes = []
        for number, ((name, table), colour, dashes) in enumerate(zip(tables.items(), LINES, DASHES, strict=False)):
            shares = variance_shares(table) if not isinstance(table, Tensor) or table.ndim == 2 else table
            broken = 0 if table is shares else int(RowReader(table).norms().isnan().sum())
            notes.append(left_out(broken, "row", f"NaN or infinity ({name})"))
            total = shares.cumsum(0)
            count = 1 + int((total < share - ROUNDING).sum())
            reaches = count <= len(total) and bool(total.isfinite().all())
            held = f"{100 * share:.3g} % in {count:,} {'component' if count == 1 else 'components'}"
            axes.plot(
                range(1, len(total) + 1),
                100 * numbers(total),
                color=colour,
                linestyle=dashes,
                label=f"{name}: {held if reaches else 'no variance'}",
                marker="." if len(total) <= FEW_COMPONENTS else None,
            )
            if reaches:
                size = 5 + 4 * (len(tables) - 1 - number)
                axes.plot(count, 100 * float(total[count - 1]), "o", color=colour, markersize=size)
        axes.axhline(100 * share, color=MUTED, linewidth=0.8)
        axes.set(xlabel="principal components, largest variance first", ylabel="cumulative variance (%)", ylim=(0, 105))
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="lower right")
        caption(figure, *notes)
    return figure


def gradient_rows(
    gradient: LookupTable | nn.Embedding | Float[Tensor, "V D"],
    tokenizer: Tokenizer | None = None,
    *,
    most: int = 24,
    title: str | None = None,
) -> Figure:
    """Draw the norm of each row's gradient after one backward pass, for the rows with the largest gradients.

    The figure says how many rows are left out: without a gradient, with a smaller one, or with NaN or infinity.

    Args:
        gradient: A table after `backward()` (for a factorised table, its narrow rows), or a dense or sparse gradient.
        tokenizer: Names the rows; `None` for their IDs.
        most: Largest number of rows to draw.
        title: Title of the figure; `None` for the number of rows with a gradient.

    Example:
        >>> table = TokenEmbedding(100, 16)
        >>> table(torch.tensor([3, 7, 1])).sum().backward()
        >>> figure = gradient_rows(table)
    """
    size, ids, norms = _used_rows(gradient)
    finite = norms.isfinite()
    order = norms[finite].argsort(descending=True, stable=True)[:most]
    drawn_ids, drawn = ids[finite][order].tolist(), norms[finite][order]
    names = [f"row {row}" for row in drawn_ids]
    if tokenizer is not None:
        texts = [visible_text(token_text(tokenizer, row)) if row < table_size(tokenizer) else "" for row in drawn_ids]
        names = [f"{text}   {row}" if text else f"row {row}" for text, row in zip(texts, drawn_ids, strict=True)]
    title = f"{len(ids):,} of {size:,} rows have a gradient" if title is None else title
    with new_figure(7.2, 1.3 + 0.22 * max(3, len(drawn)), title=title) as (figure, axes):
        bars = axes.barh(range(len(drawn)), numbers(drawn), height=0.72, color=BLUE)
        labels = [f"{norm:.3g}" for norm in drawn.tolist()]
        axes.bar_label(bars, labels, padding=3, fontsize=7.5, color=MUTED, in_layout=False)
        axes.set_yticks(range(len(drawn)), names)
        axes.set_ylim(max(len(drawn), 1) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.1)
        axes.set_xlabel("L2 norm of the row's gradient (nats per unit of the row)")
        caption(
            figure,
            left_out(int((~finite).sum()), "row", "a gradient with NaN or infinity"),
            left_out(int(finite.sum()) - len(drawn), "row", "a smaller gradient"),
            left_out(size - len(ids), "row", "no gradient"),
        )
    return figure


def _used_rows(
    gradient: LookupTable | nn.Embedding | Float[Tensor, "V D"],
) -> tuple[int, Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the number of rows, the IDs of the rows with a nonzero gradient, and the L2 norms of these gradients.

    The norm of a gradient with NaN or infinity is NaN.
    """
    gradient = as_rows(gradient)
    if isinstance(gradient, LookupTable):
        by_token = (part for part in gradient.parameters() if len(part) == gradient.num_rows)
        gradients = [part.grad for part in by_token if part.grad is not None]
        if not gradients:
            raise ShapeError(f"This {type(gradient).__name__} has no gradient: call backward() first.")
        gradient = gradients[0]
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        ids, rows = gradient.indices()[0].cpu(), gradient.values()
    else:
        ids, rows = torch.arange(len(gradient)), gradient
    norms = RowReader(rows).norms()
    used = norms != 0
    return len(gradient), ids[used], norms[used]
