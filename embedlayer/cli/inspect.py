"""`embedlayer inspect`: what a table looks like in numbers, and what is wrong with it; or what moved between two."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from embedlayer.cli.paths import TABLE_OR_HUB_NAME, TEXT, TOKENIZER

if TYPE_CHECKING:
    from rich.console import Console

    from embedlayer.analysis.geometry import FrequencyBand, TableGeometry
    from embedlayer.analysis.health import Health
    from embedlayer.checkpoints.tables import OpenedTable

EXAMPLES = 60
LONGEST_TOKEN = 30
BARS = 16
LONG = "least trained first"
"""The column that is cut where the screen ends."""

WIDTH_IN_FILES = 120


@click.command()
@click.argument("path", type=TABLE_OR_HUB_NAME)
@click.argument("other", required=False, type=TABLE_OR_HUB_NAME)
@click.option("--tokenizer", "tokenizer_from", type=TOKENIZER, help="Use this tokenizer for PATH.")
@click.option("-n", "--topn", type=click.IntRange(min=0), default=10, show_default=True, help="Tokens in each list.")
@click.option("--word-pairs", type=TEXT, help="Also compare with these judgements (WordSim-353).")
@click.option("--analogies", type=TEXT, help="Also ask these questions (questions-words.txt).")
@click.option("--as-they-are", is_flag=True, help="With OTHER: do not turn the one table to fit the other.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
def inspect(
    path: Path,
    other: Path | None,
    tokenizer_from: Path | None,
    topn: int,
    word_pairs: Path | None,
    analogies: Path | None,
    as_they_are: bool,
    as_json: bool,
) -> None:
    """Look at a table: its geometry, its broken rows, its under-trained tokens.

    PATH is a trained run, a checkpoint (folder, file or name on the hub), a saved layer, or a file of word vectors.
    With OTHER, list the tokens that moved most from the one to the other.

    \b
    embedlayer inspect DIR
    embedlayer inspect model.safetensors --tokenizer tokenizer.json --json
    embedlayer inspect before/ after/
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.checkpoints.tables import open_table

    opened = open_table(path, tokenizer_from)
    if other is not None:
        if word_pairs is not None or analogies is not None:
            raise click.UsageError("--word-pairs and --analogies look at one table: leave OTHER out.")
        compare(opened, open_table(other), topn=topn, as_they_are=as_they_are, as_json=as_json)
        return
    if as_they_are:
        raise click.UsageError("--as-they-are belongs to a comparison: give OTHER too.")
    content = measure(opened, word_pairs, analogies)
    if as_json:
        click.echo(json.dumps(as_json_object(opened, content, topn)))
        return
    show(opened, content, topn)


# One table


def measure(opened: "OpenedTable", word_pairs: Path | None = None, analogies: Path | None = None) -> dict[str, Any]:
    """Every measurement, by name: dataclasses, and `None` for what cannot be said of this table."""
    from embedlayer.analysis.geometry import norms_by_frequency, table_geometry
    from embedlayer.analysis.health import health
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.errors import SizeError, TokenizerError

    found = health(opened.table, opened.vocabulary, before=opened.before, head=opened.head)
    if len(found.zero_rows) + len(found.nonfinite_rows) == found.vocab_size:
        geometry = None
    else:
        geometry = table_geometry(opened.table)
    scores: dict[str, Any] = {"word_pairs": None, "analogies": None}
    if word_pairs is not None or analogies is not None:
        if opened.vocabulary is None:
            raise TokenizerError(f"{opened.source} has no tokenizer, so there are no words: give one with --tokenizer.")
        vectors = TokenVectors(opened.table, opened.vocabulary)
        scores = {
            "word_pairs": None if word_pairs is None else vectors.evaluate_word_pairs(word_pairs),
            "analogies": None if analogies is None else vectors.evaluate_word_analogies(analogies),
        }
    if opened.counts is not None and len(opened.counts) != found.vocab_size:
        raise SizeError(f"{opened.source} has counts of {len(opened.counts)} tokens for {found.vocab_size} rows.")
    bands = None if opened.counts is None else norms_by_frequency(opened.table, opened.counts)
    return {"health": found, "geometry": geometry, "norms_by_frequency": bands, **scores}


def as_json_object(opened: "OpenedTable", content: dict[str, Any], topn: int) -> dict[str, Any]:
    """What `--json` prints."""
    geometry: TableGeometry | None = content["geometry"]
    bands: list[FrequencyBand] | None = content["norms_by_frequency"]
    found: Health = content["health"]
    health = found.to_json(limit=topn)
    analogies = content["analogies"]
    return {
        "source": str(opened.source),
        "kind": opened.kind,
        "vocab_size": health.pop("vocab_size"),
        "embed_dim": health.pop("embed_dim"),
        "dtype": opened.dtype,
        "has_tokenizer": opened.vocabulary is not None,
        "under_trained_by": "table" if opened.head is None else "head",
        "geometry": None
        if geometry is None
        else {
            "rows": geometry.rows,
            "effective_rank": geometry.effective_rank,
            "isotropy": geometry.isotropy,
            "mean_cosine": geometry.mean_cosine,
            "mean_norm": geometry.mean_norm,
            "directions_for_half": geometry.directions_for(0.5),
            "directions_for_nine_tenths": geometry.directions_for(0.9),
            "explained_variance_ratio": geometry.explained_variance_ratio.tolist(),
        },
        "norms_by_frequency": None if bands is None else [asdict(band) for band in bands],
        "health": health,
        "word_pairs": None if content["word_pairs"] is None else asdict(content["word_pairs"]),
        "analogies": None
        if analogies is None
        else {
            "accuracy": analogies.accuracy,
            "correct": analogies.correct,
            "used": analogies.used,
            "total": analogies.total,
            **asdict(analogies),
        },
    }


def show(opened: "OpenedTable", content: dict[str, Any], topn: int) -> None:
    """Print what was measured, for people."""
    console = _console()
    found: Health = content["health"]
    _line(console, f"{opened.source}: {opened.kind}, {found.vocab_size:,} rows of {found.embed_dim:,} {opened.dtype}")
    _facts(console, _geometry_lines(content["geometry"], found))
    _show_bands(console, content["norms_by_frequency"])
    _line(console, "\nRows")
    _facts(console, _health_lines(opened, found))
    _show_under_trained(console, found, topn, by_head=opened.head is not None)
    _show_scores(console, content["word_pairs"], content["analogies"])


def _geometry_lines(geometry: "TableGeometry | None", found: "Health") -> Iterator[tuple[str, str, str]]:
    if geometry is None:
        yield "geometry", "none", "no row has a length"
        return
    norms = found.norms[found.norms.isfinite() & (found.norms > 0)]
    low, middle, high = norms.sort().values[[len(norms) * tenths // 10 for tenths in (1, 5, 9)]].tolist()
    half, most = geometry.directions_for(0.5), geometry.directions_for(0.9)
    shares = geometry.explained_variance_ratio
    yield "norms", f"{low:.3g}  {middle:.3g}  {high:.3g}", "a tenth of the rows are shorter, half, nine tenths"
    yield "spectrum", _bars(shares.tolist()), f"variance by direction; the widest holds {float(shares[0]):.1%}"
    yield "", f"{half:,}, {most:,} of {geometry.embed_dim:,}", "directions with half and nine tenths of it"
    yield (
        "effective rank",
        f"{geometry.effective_rank:.1f} of {geometry.embed_dim:,}",
        "directions in use, weighted by their width",
    )
    yield "mean cosine", f"{geometry.mean_cosine:.3f}", "of two rows; 0: they point everywhere alike"
    yield "common part", f"{geometry.mean_norm:.3f}", "length of the mean row over the mean length"
    yield "isotropy", f"{geometry.isotropy:.3g}", "1: no direction is preferred"


def _health_lines(opened: "OpenedTable", found: "Health") -> Iterator[tuple[str, str, str]]:
    yield "zero", f"{len(found.zero_rows):,}", _named(found, found.zero_rows)
    yield "NaN or infinity", f"{len(found.nonfinite_rows):,}", _named(found, found.nonfinite_rows)
    equal = sum(map(len, found.duplicates))
    groups = ";  ".join(_named(found, group, 4) for group in found.duplicates[:6])
    yield "equal to another", f"{equal:,}", f"in {len(found.duplicates):,} groups: {groups}" if equal else ""
    if found.never_touched is None:
        yield "never touched", "?", "only a run knows the table that it began with"
    else:
        yield "never touched", f"{len(found.never_touched):,}", _named(found, found.never_touched)
    if opened.counts is not None:
        absent = (opened.counts == 0).nonzero()[:, 0].tolist()
        both = int(found.under_trained.flagged[absent].sum())
        yield "not in the text", f"{len(absent):,}", f"{both:,} of them are among the under-trained"
    flagged = int(found.under_trained.flagged.sum())
    yield "under-trained", f"{flagged:,}", f"{flagged / found.vocab_size:.1%} of the rows" if flagged else ""


def _show_under_trained(console: "Console", found: "Health", topn: int, *, by_head: bool) -> None:
    _line(console, f"\nUnder-trained tokens{', by the rows of the free head' * by_head}")
    _line(console, found.under_trained.explain(), indent=2)
    if found.under_trained.flagged.any() and found.by_kind:
        lines = []
        for count in found.by_kind:
            tokens = [_shown(finding.text)[:LONGEST_TOKEN] for finding in found.findings(EXAMPLES, kind=count.kind)]
            share = f"{count.under_trained / count.rows:.0%}" if count.under_trained else ""
            lines.append([count.kind, f"{count.rows:,}", f"{count.under_trained:,}", share, " ".join(tokens)])
        _table(console, ["kind", "rows", "under-trained", "share", LONG], lines)
    if topn and found.under_trained.flagged.any():
        lines = [
            [str(row.id), _shown(row.text), row.kind or "", f"{row.score:.3f}", f"{row.norm:.4g}"]
            for row in found.findings(topn)
        ]
        _line(console, "")
        _table(console, ["id", "token", "kind", "score", "norm"], lines, left=(1, 2))


def _show_bands(console: "Console", bands: "list[FrequencyBand] | None") -> None:
    if not bands:
        return
    _line(console, "\nNorms by frequency in the text of the run")
    lines = [
        [
            "never"
            if band.high == 0
            else f"{band.low:,} to {band.high:,}"
            if band.high > band.low
            else f"{band.low:,}",
            f"{band.rows:,}",
            *(f"{value:.3g}" for value in (band.p10, band.median, band.p90)),
        ]
        for band in bands
    ]
    _table(console, ["occurrences", "tokens", "a tenth below", "median", "nine tenths below"], lines)


def _show_scores(console: "Console", word_pairs: Any, analogies: Any) -> None:
    from embedlayer.analysis.evaluate import FEWEST_PAIRS

    if word_pairs is None and analogies is None:
        return
    _line(console, "\nAgreement with people")
    if word_pairs is not None:
        used = f"{word_pairs.used:,} of {word_pairs.total:,} pairs are two tokens"
        found = "no correlation" if word_pairs.spearman is None else f"Spearman {word_pairs.spearman:.3f}"
        used += f", and fewer than {FEWEST_PAIRS} say too little" if word_pairs.spearman is None else ""
        _facts(console, [("word pairs", found, used)])
    if analogies is not None:
        used = (
            f"{analogies.used:,} of {analogies.total:,} questions are four tokens; {analogies.candidates:,} candidates"
        )
        _facts(console, [("analogies", f"{analogies.accuracy:.1%} right", used)])
        lines = [
            [part.name, f"{part.total:,}", f"{part.used:,}", f"{part.correct / part.used:.0%}" if part.used else ""]
            for part in analogies.sections
        ]
        _table(console, ["section", "questions", "used", "right"], lines)


# Two tables


def compare(before: "OpenedTable", after: "OpenedTable", *, topn: int, as_they_are: bool, as_json: bool) -> None:
    """Print which tokens moved from one table to another."""
    from embedlayer.analysis.geometry import align, moved_most, shared_tokens
    from embedlayer.analysis.rows import Rows
    from embedlayer.errors import TokenizerError

    one, other = Rows(before.table), Rows(after.table)
    pairs = None
    if before.vocabulary is not None and after.vocabulary is not None:
        pairs = shared_tokens(before.vocabulary, after.vocabulary)
        pairs = pairs[(pairs[:, 0] < len(one)) & (pairs[:, 1] < len(other))]
        if not len(pairs):
            raise TokenizerError(f"{before.source} and {after.source} have no token in common.")
    alignment = None if as_they_are else align(before.table, after.table, pairs=pairs)
    movement = moved_most(before.table, after.table, alignment=alignment, pairs=pairs)
    plain = moved_most(before.table, after.table, pairs=pairs) if one.embed_dim == other.embed_dim else None
    text_of = _namer(before)
    if as_json:
        lists = {"most": movement.most(topn), "least": movement.least(topn)}
        content = {
            "before": {"source": str(before.source), "vocab_size": len(one), "embed_dim": one.embed_dim},
            "after": {"source": str(after.source), "vocab_size": len(other), "embed_dim": other.embed_dim},
            "tokens": len(movement.pairs),
            "median_cosine_as_they_are": None if plain is None else _median(plain.cosines),
            "turned": None
            if alignment is None
            else {
                "median_cosine": _median(movement.cosines),
                "scale": alignment.scale,
                "residual": alignment.residual,
            },
            **{name: [{"token": text_of(row.before), **row._asdict()} for row in rows] for name, rows in lists.items()},
        }
        click.echo(json.dumps(content))
        return
    console = _console()
    for opened, sizes in ((before, one), (after, other)):
        _line(console, f"{opened.source}: {opened.kind}, {len(sizes):,} rows of {sizes.embed_dim:,} {opened.dtype}")
    by = "token" if pairs is not None else "ID"
    facts = [("compared", f"{len(movement.pairs):,} rows", f"of the same {by}")]
    if plain is not None:
        facts += [("as they are", f"{_median(plain.cosines) or 0:.3f}", "median cosine of a row with itself")]
    if alignment is not None:
        left = f"median cosine; {alignment.residual:.1%} of the later table is left over, scale {alignment.scale:.3g}"
        facts += [("turned to fit", f"{_median(movement.cosines) or 0:.3f}", left)]
    _facts(console, facts)
    for title, rows in (("Moved most", movement.most(topn)), ("Moved least", movement.least(topn))):
        _line(console, f"\n{title}")
        lines = [
            [
                str(row.before),
                _shown(text_of(row.before)),
                f"{row.cosine:.3f}",
                f"{row.norm_before:.4g}",
                f"{row.norm_after:.4g}",
            ]
            for row in rows
        ]
        _table(console, ["id", "token", "cosine", "norm before", "norm after"], lines, left=(1,))


def _namer(opened: "OpenedTable") -> Any:
    from embedlayer.data.tokenizer import token_text

    tokenizer = opened.vocabulary
    if tokenizer is None:
        return lambda row: f"row {row}"
    return lambda row: token_text(tokenizer, row)


def _median(values: Any) -> float | None:
    kept = values[~values.isnan()]
    return float(kept.median()) if len(kept) else None


# Printing


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    return console


def _line(console: "Console", text: str, indent: int = 0) -> None:
    from rich.padding import Padding
    from rich.text import Text

    style = "" if indent or not text.strip() else "bold"
    console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))


def _facts(console: "Console", facts: Iterable[tuple[str, str, str]]) -> None:
    """Numbers: each one's name, itself, and what it means."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=16)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(overflow="fold", style="dim")
    for cells in facts:
        table.add_row(*map(Text, cells))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _table(console: "Console", columns: Sequence[str], lines: list[list[str]], left: Sequence[int] = ()) -> None:
    """A table without lines; the columns in `left`, else the first, begin at the left; long last cells are cut."""
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    room = console.width - 2
    for place, column in enumerate(columns):
        at_left = place in left or (place == 0 and not left) or column == LONG
        width = max(len(column), *(cell_len(line[place]) for line in lines)) if lines else len(column)
        width = min(width, max(len(column), room) if column == LONG else LONGEST_TOKEN)
        room -= width + 2
        justify: Literal["left", "right"] = "left" if at_left else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _named(found: "Health", rows: Sequence[int], limit: int = 12) -> str:
    named = "  ".join(_shown(found.text_of(row))[:LONGEST_TOKEN] for row in rows[:limit])
    return named + "  ..." * (len(rows) > limit)


def _shown(text: str) -> str:
    from embedlayer.plots import visible_text

    return visible_text(text)


def _bars(shares: Sequence[float]) -> str:
    """Variance by direction in so many groups of equal number, as blocks on a scale of logarithms, 1 to 1/1000."""
    import math
    from itertools import pairwise

    blocks = " ▁▂▃▄▅▆▇█"
    count = min(BARS, len(shares))
    edges = [round(place * len(shares) / count) for place in range(count + 1)]
    means = [sum(shares[low:high]) / (high - low) for low, high in pairwise(edges)]
    highest = max(means)
    if highest <= 0:
        return blocks[0] * count
    heights = [1 + math.log10(max(mean / highest, 1e-9)) / 3 for mean in means]
    return "".join(blocks[max(0, min(8, round(8 * height)))] for height in heights)
