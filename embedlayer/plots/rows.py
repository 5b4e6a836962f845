"""What the rows of a table are like: their lengths, their directions, their gradients."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.errors import ShapeError, SizeError
from embedlayer.plots.labels import SIDES, write_labels
from embedlayer.plots.style import BLUE, LINES, MUTED, ORANGE, PAPER, backing, new_figure, numbers, panels
from embedlayer.plots.training import DASHES
from embedlayer.plots.visible import visible_text
from embedlayer.tables.dense import as_rows
from embedlayer.tables.table import ROWS_AT_ONCE, TokenTable
from embedlayer.data.tokenizer import table_size, token_text

if TYPE_CHECKING:
    import matplotlib.figure


ROUNDING = 1e-6
"""What sums of shares may miss by."""


@torch.no_grad()
def norm_histogram(
    norms: TokenTable | nn.Embedding | Float[Tensor, " N"], *, title: str = "Length of the rows", bins: int = 60
) -> "matplotlib.figure.Figure":
    """How many rows have which length, and the median.

    Args:
        norms: A table, or `|row|` for each row; values that are not finite are left out.
        title: The figure's title.
        bins: Bars.

    Example:
        >>> figure = norm_histogram(TokenEmbedding(100, 16))
    """
    norms = as_rows(norms)
    if isinstance(norms, TokenTable):
        norms = torch.cat([_lengths(rows) for rows in _chunks(norms)])
    finite = norms.detach().double().cpu()
    finite = finite[finite.isfinite()]
    with new_figure(7.2, 3.6) as figure:
        axes = panels(figure)[0, 0]
        axes.set(xlabel="length of the row (L2 norm)", ylabel="rows")
        axes.set_title(title)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
        axes.locator_params(axis="y", integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        if finite.numel():
            axes.hist(finite.numpy(), bins=bins, color=BLUE, edgecolor=PAPER, linewidth=0.6)
            median = float(finite.median())
            axes.axvline(median, color=ORANGE, linewidth=1.6)
            axes.annotate(
                f"median {median:.3g}",
                (median, 1),
                xycoords=("data", "axes fraction"),
                xytext=(5, -4),
                textcoords="offset points",
                va="top",
                color=ORANGE,
                bbox=backing(),
            )
    return figure


@torch.no_grad()
def spectrum(
    tables: Mapping[str, TokenTable | nn.Embedding | Float[Tensor, "_ _"] | Float[Tensor, " _"]],
    *,
    share: float = 0.5,
    title: str = "Variance along the principal components",
) -> "matplotlib.figure.Figure":
    """How much of the variance the widest directions hold together, and how many of them hold `share` of it.

    Args:
        tables: Up to four by name: tables, their rows, or shares of the variance, widest first, as
            `pca(rows, D).explained_variance_ratio` gives them.
        share: The share at which directions are counted.
        title: The figure's title.

    Raises:
        SizeError: No table or more than four.

    Example:
        >>> figure = spectrum({"fresh": TokenEmbedding(100, 16)})
    """
    if not 1 <= len(tables) <= len(LINES):
        raise SizeError(f"A picture has room for 1 to {len(LINES)} tables; found {len(tables)}.")
    with new_figure(7.2, 3.9) as figure:
        axes = panels(figure)[0, 0]
        marks = []
        for (name, table), colour, dashes in zip(tables.items(), LINES, DASHES, strict=False):
            held = (variance_shares(table) if not isinstance(table, Tensor) or table.ndim == 2 else table).cumsum(0)
            axes.plot(range(1, len(held) + 1), 100 * numbers(held), color=colour, linestyle=dashes, label=name)
            count = 1 + int((held < share - ROUNDING).sum())
            if count <= len(held):
                marks.append((float(count), 100 * float(held[count - 1])))
                axes.plot(*marks[-1], "o", color=colour, markersize=5)
        axes.axhline(100 * share, color=MUTED, linewidth=0.8)
        axes.set(xlabel="principal components, widest first", ylabel="variance held together (%)", ylim=(0, 105))
        axes.set_title(title)
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="lower right")
        if marks:
            texts = {place: f"{count:.0f} hold {100 * share:.3g} %" for place, (count, _) in enumerate(marks)}
            sides = (SIDES[6], SIDES[4], SIDES[7], SIDES[5])
            write_labels(figure, axes, numbers(torch.tensor(marks)), texts, most=len(LINES), sides=sides)
    return figure


def variance_shares(table: TokenTable | nn.Embedding | Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Share of the variance along each principal component, widest first, in float64, read a chunk at a time.

    Rows that are not finite are left out. Zeros where nothing varies.
    """
    table = as_rows(table)
    width = table.embed_dim if isinstance(table, TokenTable) else table.shape[1]
    count, total = 0, torch.zeros(width, dtype=torch.float64)
    for rows in _finite_chunks(table):
        count, total = count + len(rows), total + rows.sum(0)
    mean, scatter = total / max(count, 1), torch.zeros(width, width, dtype=torch.float64)
    for rows in _finite_chunks(table):
        scatter += (rows - mean).T @ (rows - mean)
    variances = torch.linalg.eigvalsh(scatter).flip(0).clamp_min(0.0)
    shares: Tensor = variances / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return shares


def gradient_rows(
    gradient: TokenTable | nn.Embedding | Float[Tensor, "V D"],
    tokenizer: Tokenizer | None = None,
    *,
    most: int = 24,
    title: str | None = None,
) -> "matplotlib.figure.Figure":
    """Length of the gradient of each row of a table after one step, only of rows that have one.

    Args:
        gradient: A table after `backward()` (a factorised one has narrow rows), or a gradient, dense or sparse.
        tokenizer: Names the rows; without one they have their IDs.
        most: Rows to draw, those with the longest gradients.
        title: The figure's title; by default it counts the rows with a gradient.

    Raises:
        ShapeError: The table has no gradient.

    Example:
        >>> table = TokenEmbedding(100, 16)
        >>> table(torch.tensor([3, 7, 1])).sum().backward()
        >>> figure = gradient_rows(table)
    """
    size, ids, norms = used_rows(gradient)
    order = norms.argsort(descending=True, stable=True)[:most]
    drawn_ids, drawn = ids[order].tolist(), norms[order]
    names = [_named(tokenizer, index) for index in drawn_ids]
    counted = f"{len(ids):,} of {size:,} rows have a gradient"
    with new_figure(7.2, 1.3 + 0.22 * max(3, len(drawn))) as figure:
        axes = panels(figure)[0, 0]
        axes.barh(range(len(drawn)), numbers(drawn), height=0.72, color=BLUE)
        axes.set_yticks(range(len(drawn)), names)
        axes.set_ylim(max(len(drawn), 1) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("length of the row's gradient (L2; nats per unit of the row)")
        axes.set_title(counted if title is None else title)
        if len(ids) > len(drawn):
            note = f"and {len(ids) - len(drawn):,} rows with shorter ones"
            axes.text(1, 0.02, note, transform=axes.transAxes, ha="right", va="bottom", color=MUTED)
    return figure


def used_rows(
    gradient: TokenTable | nn.Embedding | Float[Tensor, "V D"],
) -> tuple[int, Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Rows of the table, the IDs of those that have a gradient, and its length for each."""
    gradient = as_rows(gradient)
    if isinstance(gradient, TokenTable):
        by_token = (part for part in gradient.parameters() if len(part) == gradient.num_rows)
        gradients = [part.grad for part in by_token if part.grad is not None]
        if not gradients:
            raise ShapeError(f"This {type(gradient).__name__} has no gradient: call backward() first, or give one.")
        gradient = gradients[0]
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        ids, norms = gradient.indices()[0], _lengths(gradient.values())
    else:
        norms = _lengths(gradient)
        ids = torch.arange(len(norms), device=norms.device)
    used = norms != 0
    return gradient.shape[0], ids[used].cpu(), norms[used].double().cpu()


def _lengths(rows: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """`|row|` for each row, in float32 or wider."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return lengths


def _named(tokenizer: Tokenizer | None, index: int) -> str:
    if tokenizer is None or index >= table_size(tokenizer):
        return f"row {index}"
    return f"{visible_text(token_text(tokenizer, index))}   {index}"


def _chunks(table: TokenTable | Float[Tensor, "N D"]) -> Iterator[Float[Tensor, "rows D"]]:
    count = table.vocab_size if isinstance(table, TokenTable) else len(table)
    for start in range(0, count, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, count)
        yield table.rows(start, stop) if isinstance(table, TokenTable) else table[start:stop]


def _finite_chunks(table: TokenTable | Float[Tensor, "N D"]) -> Iterator[Float[Tensor, "rows D"]]:
    for rows in _chunks(table):
        yield rows[rows.isfinite().all(1)].cpu().double()
