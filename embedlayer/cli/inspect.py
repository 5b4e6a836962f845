"""`embedlayer inspect`: measure a table, list rows that are broken or not learned, or compare it with another one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from embedlayer.cli.options import SOURCE, TEXT, json_option, tokenizer_option
from embedlayer.cli.printing import LONGEST_TOKEN, make_console, print_facts, print_json, print_line, print_table
from embedlayer.core.errors import TokenizerError
from embedlayer.core.formatting import count_of, visible_text

if TYPE_CHECKING:
    from jaxtyping import Bool
    from rich.console import Console
    from torch import Tensor

    from embedlayer.analysis.geometry import ChanceGeometry, FrequencyBand, TableGeometry
    from embedlayer.analysis.health_report import TableHealth
    from embedlayer.analysis.judgements import AnalogyScores, WordPairScores
    from embedlayer.analysis.movement import MovedRow, RowMovement
    from embedlayer.opening.opened_model import OpenedModel

EXAMPLES = 60
BARS = 16
NAMED_ONLY = 8
LEAST_TRAINED = "least trained first"
MOVED_NAMES = {"most": "most", "least": "least", "never": "most, of the tokens that never occur in the training text"}


class Measurements(NamedTuple):
    """All measurements of one table.

    Attributes:
        health: The verdict about the table and about each row, with broken, repeated and untouched rows.
        geometry: Measures over all rows, such as effective rank; `None` if all rows are zero, NaN or infinite.
        chance: The same measures of random numbers; `None` with `geometry`.
        bands: Norms of rows by token frequency; `None` without the corpus of a run.
        word_pairs: Correlation with human scores of word pairs; `None` if not requested.
        analogies: Accuracy on analogy questions; `None` if not requested.
        absent: IDs of the tokens that never occur in the texts that were passed; `None` without one.
    """

    health: "TableHealth"
    geometry: "TableGeometry | None"
    chance: "ChanceGeometry | None"
    bands: "list[FrequencyBand] | None"
    word_pairs: "WordPairScores | None"
    analogies: "AnalogyScores | None"
    absent: list[int] | None


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("other", required=False, type=SOURCE)
@tokenizer_option
@click.option("-n", "--topn", type=click.IntRange(min=0), default=10, help="Tokens in each list.")
@click.option("--word-pairs", type=TEXT, help="Also measure correlation with human scores of word pairs (WordSim-353).")
@click.option("--analogies", type=TEXT, help="Also answer these analogy questions (questions-words.txt).")
@click.option("--text", "texts", type=TEXT, multiple=True, help="Also count the tokens that never occur in this text.")
@click.option("--no-align", is_flag=True, help="With OTHER: do not rotate and scale one table to fit the other.")
@json_option
def inspect(
    source: Path,
    other: Path | None,
    tokenizer_from: Path | None,
    topn: int,
    word_pairs: Path | None,
    analogies: Path | None,
    texts: tuple[Path, ...],
    no_align: bool,
    as_json: bool,
) -> None:
    """Measure a table and list its bad rows.

    The report covers geometry, broken rows, and which rows were learned.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    With OTHER, tell whether SOURCE (A) and OTHER (B) are related, and list the tokens that moved most from A to B.

    \b
    embedlayer inspect DIR
    embedlayer inspect model.safetensors --tokenizer tokenizer.json --json
    embedlayer inspect before/ after/
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.opening.readers import open_model

    if other is None and no_align:
        raise click.UsageError("--no-align belongs to a comparison: name OTHER too.")
    if other is not None and (word_pairs is not None or analogies is not None or texts):
        raise click.UsageError("--word-pairs, --analogies and --text measure one table: leave OTHER out.")
    opened = open_model(source, tokenizer_from, parts="layer")
    if other is not None:
        compare(opened, open_model(other, parts="layer"), topn=topn, aligned=not no_align, as_json=as_json)
        return
    measurements = measure(opened, word_pairs, analogies, texts)
    if as_json:
        print_json(as_json_object(opened, measurements, topn))
    else:
        show(opened, measurements, topn)


# One table


def measure(
    opened: "OpenedModel", word_pairs: Path | None = None, analogies: Path | None = None, texts: Sequence[Path] = ()
) -> Measurements:
    """Compute all measurements of a table. `geometry` is `None` if every row is zero, NaN or infinite."""
    from embedlayer.analysis.geometry import chance_geometry, norms_by_frequency, table_geometry
    from embedlayer.analysis.health import model_health
    from embedlayer.analysis.vectors import TokenVectors

    health = model_health(opened)
    is_broken = len(health.zero_rows) + len(health.nonfinite_rows) == health.vocab_size
    scores: dict[str, Any] = {"word_pairs": None, "analogies": None}
    if word_pairs is not None or analogies is not None:
        vectors = TokenVectors(opened.table, opened.require_tokenizer())
        scores["word_pairs"] = None if word_pairs is None else vectors.evaluate_word_pairs(word_pairs)
        scores["analogies"] = None if analogies is None else vectors.evaluate_word_analogies(analogies)
    geometry = None if is_broken else table_geometry(opened.table)
    return Measurements(
        health=health,
        geometry=geometry,
        chance=None if geometry is None else chance_geometry(geometry),
        bands=None if opened.counts is None else norms_by_frequency(opened.table, opened.counts),
        absent=_absent(opened, texts) if texts else None,
        **scores,
    )


def _absent(opened: "OpenedModel", texts: Sequence[Path]) -> list[int]:
    """Return the IDs of the tokens that never occur in some texts; rows without a token are left out."""
    from embedlayer.data.readers.sources import find_text_files
    from embedlayer.data.text_chunks import encode_chunks, read_text_chunks

    tokenizer = opened.require_tokenizer()
    present: set[int] = set()
    for file in find_text_files(texts):
        for _, ids in encode_chunks(read_text_chunks(file, tokenizer=tokenizer), tokenizer):
            present.update(ids.tolist())
    return sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - present)


def as_json_object(opened: "OpenedModel", content: Measurements, topn: int) -> dict[str, Any]:
    """Return what `--json` prints for one table, as a dictionary; lists of tokens have at most `topn` entries."""
    health, geometry, scores = content.health.to_json(limit=topn), content.geometry, content.analogies
    more: dict[str, Any] = {"geometry": None, "analogies": None}
    if geometry is not None:
        names = ("rows", "effective_rank", "isotropy", "mean_cosine", "mean_norm")
        more["geometry"] = {name: getattr(geometry, name) for name in names} | {
            "directions_for_half": geometry.directions_for(0.5),
            "directions_for_nine_tenths": geometry.directions_for(0.9),
            "explained_variance_ratio": geometry.explained_variance_ratio.tolist(),
            "by_chance": None if content.chance is None else asdict(content.chance),
        }
    if scores is not None:
        sums = {name: getattr(scores, name) for name in ("accuracy", "correct", "used", "total")}
        more["analogies"] = {**sums, **asdict(scores)}
    return {
        "source": str(opened.source),
        "kind": opened.kind,
        "vocab_size": health.pop("vocab_size"),
        "embed_dim": health.pop("embed_dim"),
        "dtype": opened.dtype,
        "stored_type": opened.stored_type,
        "per_layer": _per_layer(opened),
        "has_tokenizer": opened.tokenizer is not None,
        "under_trained_by": "table" if opened.untied_head is None else "head",
        "norms_by_frequency": None if content.bands is None else [asdict(band) for band in content.bands],
        "not_in_the_text": None
        if content.absent is None
        else {"rows": len(content.absent), "ids": content.absent[:topn]},
        "health": health,
        "word_pairs": None if content.word_pairs is None else asdict(content.word_pairs),
        **more,
    }


def show(opened: "OpenedModel", content: Measurements, topn: int) -> None:
    """Print the measurements of one table as a readable report; `topn` limits the list of rows."""
    console, health = make_console(), content.health
    print_line(console, _heading(opened))
    print_line(console, health.summary(), indent=2)
    print_line(console, "")
    print_facts(console, _geometry_lines(content, health))
    _show_bands(console, content.bands)
    print_line(console, "\nRows")
    print_line(console, health.verdicts.sentence(), indent=2)
    print_facts(console, _health_lines(health, content.absent))
    _show_unlearned(console, health, topn, by_head=opened.untied_head is not None)
    _show_scores(console, content)


def _heading(opened: "OpenedModel") -> str:
    """Return one line with the source, its kind, and the size, stored type and data type of its table."""
    rows, width = opened.table.vocab_size, opened.table.embed_dim
    sizes = _per_layer(opened)
    more = "" if sizes is None else "; per-layer table of {rows:,} rows, {layers:,} blocks x {width:,}".format(**sizes)
    numbers = opened.stored_type
    numbers += "" if numbers == opened.dtype else f", read as {opened.dtype}"
    return f"{opened.source}: {opened.kind}, {rows:,} rows of {width:,} {numbers}{more}"


def _per_layer(opened: "OpenedModel") -> dict[str, int] | None:
    """Return the sizes of the per-layer table of Gemma 3n or 4; `None` for a model without one."""
    each = getattr(opened.model, "per_layer", None)
    return each and {"rows": each.table.vocab_size, "layers": each.num_layers, "width": each.layer_width}


def _geometry_lines(content: Measurements, health: "TableHealth") -> Iterator[tuple[str, str, str]]:
    """Yield `(name, value, meaning)` for each geometric measurement, for `print_facts`."""
    from embedlayer.analysis.shared_variance import SAMPLED

    geometry, chance = content.geometry, content.chance
    if geometry is None or chance is None:
        yield "geometry", "none", "all rows are zero, NaN or infinite"
        return
    norms = health.norms[health.norms.isfinite() & (health.norms > 0)]
    low, middle, high = norms.sort().values[[len(norms) * tenths // 10 for tenths in (1, 5, 9)]].tolist()
    half, most = geometry.directions_for(0.5), geometry.directions_for(0.9)
    shares, width = geometry.explained_variance_ratio, geometry.embed_dim
    of_learned = health.is_shared_of_learned
    of_all = f" of all {geometry.rows:,} rows" * of_learned
    yield "norms", f"{low:.3g}  {middle:.3g}  {high:.3g}", "10th, 50th and 90th percentile"
    components = f"variance{of_all} by principal component; the first has {float(shares[0]):.1%}"
    yield "spectrum", _bars(shares.tolist()), components
    yield "", f"{half:,}, {most:,} of {width:,}", "components with 50 % and 90 % of the variance"
    rank = f"exp of the entropy of the singular values; random numbers: {chance.effective_rank:.1f}"
    yield "effective rank", f"{geometry.effective_rank:.1f} of {width:,}", rank
    error = f"random directions: 0 ± {chance.mean_cosine_deviation:.2g}"
    yield "mean cosine", f"{geometry.mean_cosine:.3f}", f"of two different rows; {error}"
    nearest = f"of a row with its nearest row, median; random directions: {health.nearest.by_chance:.3f}"
    yield "nearest cosine", f"{health.nearest.median:.3f}", nearest
    if health.spelling is not None:
        pairs = f"mean cosine of {health.spelling.pairs:,} pairs, such as dog and dogs; unrelated pairs: 0.000"
        yield "spelling variants", f"{health.spelling.cosine:.3f}", f"{pairs} ± {health.spelling.error:.2g}"
    mean = f"norm of the mean row{of_all} over the mean norm; random numbers: {geometry.rows**-0.5:.3f}"
    shared = health.shared
    if shared.is_measured:
        rows = f"the {shared.rows:,} learned rows" if of_learned else "the rows"
        varies = f"of the variance{f' of {rows}' * of_learned} is"
        largest = f"{varies} in dimension {shared.dimension}, the largest; constant columns: {len(shared.constant)}"
        yield "largest dimension", f"{shared.dimension_share:.1%}", largest
        if of_learned:
            sampled = ", in a sample" * (shared.rows > SAMPLED)
            component = f"{varies} along their first principal component{sampled}"
            yield "largest direction", f"{shared.component_share:.1%}", component
        offset = f"of the squared length of {rows} is that of the{' mean row' if not of_learned else 'ir mean'}"
        yield "shared offset", f"{shared.offset_share:.1%}", offset
    yield "mean row", f"{geometry.mean_norm:.3f}", mean
    yield "isotropy", f"{geometry.isotropy:.3g}", f"1: no direction is preferred; random numbers: {chance.isotropy:.3g}"


def _health_lines(health: "TableHealth", absent_in_text: list[int] | None) -> Iterator[tuple[str, str, str]]:
    """Yield `(kind, number of rows, examples)` for each kind of bad row, for `print_facts`."""
    yield "zero", f"{len(health.zero_rows):,}", _named(health, health.zero_rows)
    yield "NaN or infinity", f"{len(health.nonfinite_rows):,}", _named(health, health.nonfinite_rows)
    equal = sum(map(len, health.duplicates))
    groups = ";  ".join(_named(health, group, 4) for group in health.duplicates[:6])
    yield "equal to another", f"{equal:,}", f"in {len(health.duplicates):,} groups: {groups}" if equal else ""
    near = sum(map(len, health.near_duplicates))
    groups = ";  ".join(_named(health, group, 4) for group in health.near_duplicates[:6])
    groups = f"within 1 %, in {len(health.near_duplicates):,} groups: {groups}" if near else ""
    yield "nearly equal", f"{near:,}", groups
    if health.never_touched is None:
        yield "never touched", "?", "known for runs only: they keep the seed of the initial table"
    else:
        yield "never touched", f"{len(health.never_touched):,}", _named(health, health.never_touched)
    if absent_in_text is not None:
        words = sum(health.kinds[row] == "word" for row in absent_in_text) if health.kinds is not None else 0
        yield "not in --text", f"{len(absent_in_text):,}", f"{words:,} words:  {_named(health, absent_in_text)}"
    for verdict in ("not learned", "never seen", "cannot tell"):
        rows = health.verdicts.is_(verdict).nonzero()[:, 0].tolist()
        yield verdict, f"{len(rows):,}", _named(health, rows)


def _show_unlearned(console: "Console", health: "TableHealth", topn: int, *, by_head: bool) -> None:
    """Print the rows that are not learned or were never seen: counts per kind of token, and the `topn` first ones."""
    print_line(console, f"\nRows that are not learned, or were never seen{'; cones of the untied head' * by_head}")
    print_line(console, health.under_trained.explain(), indent=2)
    if not health.verdicts.is_unlearned.any():
        return
    lines = []
    for count in health.by_kind or ():
        tokens = [visible_text(finding.text)[:LONGEST_TOKEN] for finding in health.findings(EXAMPLES, kind=count.kind)]
        share = f"{count.under_trained / count.rows:.0%}" if count.under_trained else ""
        lines.append([count.kind, f"{count.rows:,}", f"{count.under_trained:,}", share, " ".join(tokens)])
    if lines:
        columns = ["kind", "rows", "not learned", "share", LEAST_TRAINED]
        print_table(console, columns, lines, long=LEAST_TRAINED)
    if topn:
        lines = [
            [str(row.id), visible_text(row.text), row.kind or "", row.verdict, f"{row.score:.3f}", f"{row.norm:.4g}"]
            for row in health.findings(topn)
        ]
        print_line(console, "")
        print_table(console, ["id", "token", "kind", "verdict", "score", "norm"], lines, left=(1, 2, 3))


def _show_bands(console: "Console", bands: "list[FrequencyBand] | None") -> None:
    """Print the norms of rows for each band of token frequency; print nothing if `bands` is empty or `None`."""
    if not bands:
        return
    print_line(console, "\nNorms by frequency in the training text")
    lines = []
    for band in bands:
        span = "never" if band.high == 0 else f"{band.low:,}" + f" to {band.high:,}" * (band.high > band.low)
        lines.append([span, f"{band.rows:,}", *(f"{value:.3g}" for value in (band.p10, band.median, band.p90))])
    print_table(console, ["occurrences", "tokens", "10th percentile", "median", "90th percentile"], lines)


def _show_scores(console: "Console", content: Measurements) -> None:
    """Print the results of word pairs and analogies; print nothing for those that were not requested."""
    from embedlayer.analysis.judgements import FEWEST_PAIRS

    pairs, analogies = content.word_pairs, content.analogies
    if pairs is not None or analogies is not None:
        print_line(console, "\nAgreement with human judgements")
    if pairs is not None:
        used = f"{pairs.used:,} of {pairs.total:,} pairs are two tokens"
        correlation = "no correlation" if pairs.spearman is None else f"Spearman {pairs.spearman:.3f}"
        used += f"; fewer than {FEWEST_PAIRS} give no correlation" if pairs.spearman is None else ""
        print_facts(console, [("word pairs", correlation, used)])
    if analogies is not None:
        used = (
            f"{analogies.used:,} of {analogies.total:,} questions are four tokens; {analogies.candidates:,} candidates"
        )
        print_facts(console, [("analogies", f"{analogies.accuracy:.1%} right", used)])
        lines = [
            [part.name, f"{part.total:,}", f"{part.used:,}", f"{part.correct / part.used:.0%}" if part.used else ""]
            for part in analogies.sections
        ]
        print_table(console, ["section", "questions", "used", "right"], lines)


# Two tables


def compare(before: "OpenedModel", after: "OpenedModel", *, topn: int, aligned: bool, as_json: bool) -> None:
    """Print whether two tables are related, and which tokens moved most and least from one to the other."""
    from embedlayer.analysis.movement import align_tables, row_movement
    from embedlayer.analysis.relation import common_rows, rows_left_out, table_relation

    one, other, pairs = before.table, after.table, common_rows(before, after)
    if pairs is not None and not len(pairs):
        raise TokenizerError(f"{before.source} and {after.source} have no token in common.")
    relation = table_relation(one, other, pairs=pairs)
    alignment = align_tables(one, other, pairs=pairs) if aligned and not relation.is_as_stored else None
    left_out = rows_left_out(pairs, (one.vocab_size, other.vocab_size))
    movement = row_movement(one, other, alignment=alignment, pairs=pairs)
    plain = row_movement(one, other, pairs=pairs) if one.embed_dim == other.embed_dim else None
    median = None if plain is None else _median(plain)
    lists = _moved(movement, after, 0 if relation.verdict == "unrelated" else topn)
    texts = {row.before: _token(before, row.before) for rows in lists.values() for row in rows}
    if as_json:
        content: dict[str, Any] = {"tokens": len(movement.pairs), "median_cosine_unaligned": median, "aligned": None}
        content |= {"relation": relation.to_json(topn), "scale": movement.scale}
        for name, opened, ids in zip(("before", "after"), (before, after), left_out, strict=True):
            sizes = {"vocab_size": opened.table.vocab_size, "embed_dim": opened.table.embed_dim}
            only = {"rows": len(ids), "tokens": [_token(opened, row) for row in ids[:topn]]}
            content[name] = {"source": str(opened.source), **sizes, "only_here": only}
        if alignment is not None:
            fit = {"scale": alignment.scale, "residual": alignment.residual}
            content["aligned"] = {"median_cosine": _median(movement), **fit}
        content |= {
            name: [{"token": texts[row.before], **row._asdict()} for row in rows] for name, rows in lists.items()
        }
        print_json(content)
        return
    console = make_console()
    for name, opened in (("A", before), ("B", after)):
        print_line(console, f"{name}: {_heading(opened)}")
    print_line(console, relation.sentence(), indent=2)
    facts = [("compared", f"{len(movement.pairs):,} rows", f"of the same {'ID' if pairs is None else 'token'}")]
    for name, opened, ids in zip("AB", (before, after), left_out, strict=True):
        if ids:
            named = "  ".join(visible_text(_token(opened, row))[:LONGEST_TOKEN] for row in ids[:NAMED_ONLY])
            facts.append((f"only in {name}", f"{len(ids):,} rows", named + "  ..." * (len(ids) > NAMED_ONLY)))
    if plain is not None:
        usable = int((~plain.cosines.isnan()).sum())
        meaning = f"median cosine of the two rows of {usable:,} tokens, neither table rotated"
        facts += [("as stored", "none" if median is None else f"{median:.3f}", meaning)]
    if alignment is not None:
        rotated = "median cosine after a rotation and scaling of A to fit B"
        left = f"{rotated}; {alignment.residual:.1%} of B is unexplained, scale {alignment.scale:.3g}"
        facts += [("rotated", f"{_median(movement) or 0:.3f}", left)]
    facts.append(
        ("norms", f"x {movement.scale:.3g}", "median ratio of the norms; the lists show ratios relative to it")
    )
    print_facts(console, facts)
    if relation.verdict == "unrelated":
        print_line(console, "\nUnrelated tables have no tokens that moved most.")
        return
    moved = int(_has_moved(movement).sum())
    unmoved = int((~movement.cosines.isnan()).sum()) - moved
    if unmoved and not lists["least"]:
        which = f"{count_of(unmoved, 'row')} did not move" if moved else "No row moved"
        print_line(console, f"\n{which} by more than rounding.")
    for name, rows in lists.items():
        if not rows:
            continue
        print_line(console, f"\nMoved {MOVED_NAMES[name]}")
        lines = []
        for row in rows:
            numbers = (f"{1 - row.cosine:.3g}", f"{row.norm_after / row.norm_before / movement.scale:.3f}")
            lines.append([str(row.before), visible_text(texts[row.before]), *numbers])
        print_table(console, ["id", "token", "1 - cosine", "relative norm"], lines, left=(1,))


def _moved(movement: "RowMovement", after: "OpenedModel", topn: int) -> "dict[str, list[MovedRow]]":
    """Return the tokens that moved most and least, each list with at most `topn` of them."""
    import torch

    occurs = torch.ones(len(movement.pairs), dtype=torch.bool)
    if after.counts is not None:
        occurs = after.counts[movement.pairs[:, 1]] > 0
    moved, is_measured = _has_moved(movement), ~movement.cosines.isnan()
    has_least = bool(moved.any()) and int((occurs & is_measured & ~moved).sum()) < topn
    never = movement.among(~occurs & moved)
    return {
        "most": movement.among(occurs & moved).most(topn),
        "least": movement.among(occurs).least(topn) if has_least else [],
        "never": never.most(topn),
    }


def _has_moved(movement: "RowMovement") -> "Bool[Tensor, ' N']":
    """Return which rows moved, of those that have a direction in both tables."""
    return movement.has_moved & ~movement.cosines.isnan()


def _token(opened: "OpenedModel", row: int) -> str:
    """Return the text of the token of a row; `"row 7"` for row 7 if it has no token."""
    from embedlayer.tokenization.bytes import token_text

    if opened.tokenizer is None or opened.tokenizer.id_to_token(row) is None:
        return f"row {row}"
    return token_text(opened.tokenizer, row)


def _median(movement: "RowMovement") -> float | None:
    """Return the median cosine of all rows whose cosine is not NaN, or `None` if there is no such row."""
    cosines = movement.cosines[~movement.cosines.isnan()]
    return float(cosines.median()) if len(cosines) else None


def _named(health: "TableHealth", rows: Sequence[int], limit: int = 12) -> str:
    """Return the token texts of the first `limit` rows in one line, with "..." at the end if there are more rows."""
    named = "  ".join(visible_text(health.text_of(row))[:LONGEST_TOKEN] for row in rows[:limit])
    return named + "  ..." * (len(rows) > limit)


def _bars(shares: Sequence[float]) -> str:
    """Return a bar chart in one line of text, of at most `BARS` bars."""
    import numpy as np

    means = np.array([group.mean() for group in np.array_split(shares, min(BARS, len(shares)))])
    heights = 1 + np.log10(np.maximum(means / (means.max() or 1.0), 1e-9)) / 3
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * height)] for height in heights.clip(0, 1))
