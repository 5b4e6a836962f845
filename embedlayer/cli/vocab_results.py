"""What the subcommands of `embedlayer vocab` print: receipts, suggested tokens, and compared tokenizers."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.printing import make_console, number_cell, print_json, print_line, print_table
from embedlayer.core import visible_text
from embedlayer.core.formatting import command_line
from embedlayer.opening.path_kinds import PathKind, path_kind

if TYPE_CHECKING:
    from embedlayer.tokenization.comparison import TokenizerComparison
    from embedlayer.vocab.receipt import Receipt
    from embedlayer.vocab.suggestion import TokenSuggestion

SHOWN = 12  # tokens in each list


def show_receipt(receipt: "Receipt", directory: Path, output: Path, *, as_json: bool, **trained: Any) -> None:
    """Print what an edit changed, as lines of text or, with `as_json`, as one JSON object."""
    from embedlayer.vocab.receipt import EXTRA_SPACE, UNREACHABLE
    from embedlayer.vocab.targets.folder import receipt_beside

    extra = receipt.extra_space
    old, new = (_weight_bytes(folder) for folder in (directory, output))
    if as_json:
        summary = {
            "directory": str(output),
            "tokens": list(receipt.num_tokens),
            "rows": [receipt.row_map.old_size, receipt.row_map.size],
            "kept": receipt.kept,
            "kept_rows_unchanged": not receipt.requantised,
            "stored": {name: rows._asdict() for name, rows in receipt.stored.items()},
            "added": {str(token): [text, receipt.origins.get(token)] for token, text in receipt.added.items()},
            "extra_space": extra,
            "extra_space_decoded": list(receipt.extra_space_decoded),
            "dropped": {str(token): text for token, text in receipt.dropped.items()},
            "unreachable": list(receipt.unreachable),
            "merged": {str(token): into for token, into in receipt.merged.items()},
            "new_rows": receipt.new_rows,
            "left_out": list(receipt.left_out),
            "weight_bytes": [old, new],
            **trained,
        }
        print_json(summary)
        return
    before, after = receipt.num_tokens
    click.echo(f"Tokens   {before:,} -> {after:,}")
    click.echo(f"Rows     {receipt.row_map.old_size:,} -> {receipt.row_map.size:,}")
    if receipt.requantised:
        click.echo(f"Kept     {receipt.kept:,}, not bit for bit:")
        for name, rows in receipt.stored.items():
            click.echo(f"           {name}: {rows}")
    else:
        click.echo(f"Kept     {receipt.kept:,}, unchanged bit for bit")
    _list("New", [(token, text, receipt.origins.get(token, "")) for token, text in receipt.added.items()])
    if extra:
        click.echo(f"Spaces   {EXTRA_SPACE.format(len(extra))}; merges from `vocab suggest` do not")
    if receipt.new_rows:
        click.echo(f"Init     {receipt.new_rows}")
    along = {*receipt.unreachable}
    _list("Dropped", [(token, text, UNREACHABLE * (token in along)) for token, text in receipt.dropped.items()])
    if along:
        click.echo(f"Of these {len(along):,} {UNREACHABLE}")
    _list("Merged", [(token, f"-> {into}", "") for token, into in receipt.merged.items()])
    if receipt.left_out:
        click.echo(f"Left out {', '.join(receipt.left_out)}")
    change = "the same" if new == old else f"{abs(new - old):,} {'fewer' if new < old else 'more'}"
    click.echo(f"Bytes    {old:,} -> {new:,} of weights ({change})")
    if trained:
        click.echo(
            f"\nTrained  {trained['steps']:,} steps, the new rows only; the text has "
            f"{trained['different_new_tokens_in_text']:,} of the new tokens, {trained['new_tokens_in_text']:,} times\n"
            f"Loss     on held-out text, nats per byte:\n"
            f"         {trained['loss_with_old_tokens']:.4f} with the old tokens\n"
            f"         {trained['loss_before_training']:.4f} with the new ones before training\n"
            f"         {trained['loss_after_training']:.4f} after it"
        )
    receipt_file = f"; the receipt is {receipt_beside(output).name}" if output.is_file() else ""
    click.echo(f"\nWritten to {output}{receipt_file}\n{directory} is unchanged; to undo, delete {output}.")


def show_suggestion(
    suggestion: "TokenSuggestion", directory: Path, file: Path | None, *, prune: bool, as_json: bool
) -> None:
    """Print suggested tokens and the size of held-out text, as lines of text or, with `as_json`, as one JSON object."""
    before, after, scores = suggestion.before, suggestion.after, suggestion.scores
    lines = suggestion.lines()
    if as_json:
        tokens = [{**asdict(score), "saved": score.saved} for score in scores]
        sizes = {
            when: {**asdict(size), "bytes_per_token": size.bytes_per_token}
            for when, size in (("before", before), ("after", after))
        }
        print_json({"requested": suggestion.requested, "lines": lines, "tokens": tokens, **sizes})
        return
    change = 100 * (after.num_tokens / before.num_tokens - 1)
    click.echo(f"Text     {before.num_bytes:,} bytes held out")
    click.echo(f"Tokens   {before.num_tokens:,} -> {after.num_tokens:,} for it ({change:+.1f} %)")
    click.echo(f"Bytes    {before.bytes_per_token:.3f} -> {after.bytes_per_token:.3f} per token")
    if before.num_unknown or after.num_unknown:
        click.echo(f"Unknown  {before.num_unknown:,} -> {after.num_unknown:,} tokens")
    fewer = "" if len(scores) == suggestion.requested else f" of {suggestion.requested:,}: the text yields no more"
    click.echo(f"\n{'Remove' if prune else 'Add':<9}{len(scores):,}{fewer}")
    for score in sorted(scores, key=lambda score: -abs(score.saved))[:SHOWN]:
        subwords = " ".join(visible_text(each) for each in score.subwords)
        click.echo(f"  {visible_text(score.text):<24}  {score.count:>6,} times, {'as' if prune else 'for'} {subwords}")
    if len(scores) > SHOWN:
        click.echo(f"  ... and {len(scores) - SHOWN:,} more")
    if file is None:
        click.echo("\n-o FILE writes the list")
        return
    texts = () if prune or lines[0].startswith("#version") else ("--as-is",)
    edit = ("remove", directory, "--tokens", file) if prune else ("add", directory, "--terms", file, *texts)
    click.echo(f"\nWritten to {file}; next: {command_line('vocab', *edit, '-o', '...')}")


def show_comparison(
    comparison: "TokenizerComparison",
    paths: tuple[Path, Path],
    text: Path | None,
    bits_per_byte: Sequence[float] | None,
    no_bits_per_byte: str,
    *,
    as_json: bool,
) -> None:
    """Print the comparison of two tokenizers, as lines of text or, with `as_json`, as one JSON object."""
    if as_json:
        result = asdict(comparison)
        for place, side in enumerate("ab"):
            bits = None if bits_per_byte is None else bits_per_byte[place]
            result[side] = {"path": str(paths[place]), **result[side], "bits_per_byte": bits}
        print_json({**result, "text": None if text is None else str(text), "no_bits_per_byte": no_bits_per_byte})
        return
    console, sides = make_console(), (comparison.a, comparison.b)
    lines = [
        ["tokens", *(f"{side.num_tokens:,}" for side in sides)],
        ["that the other has too", *(f"{side.shared:.1%}" for side in sides)],
    ]
    if text is not None:
        lines += [
            ["tokens of the text", *(f"{side.text_tokens:,}" for side in sides)],
            ["that the other has too", *(number_cell(side.coverage, ".1%") for side in sides)],
            ["bytes per token", *(number_cell(side.bytes_per_token, ".3f") for side in sides)],
        ]
    if bits_per_byte is not None:
        lines.append(["bits per byte", *(f"{bits:.4f}" for bits in bits_per_byte)])
    print_table(console, ["", *(path.name for path in paths)], lines)
    if text is None:
        return
    one_to_one, inexact = number_cell(comparison.one_to_one, ".1%"), number_cell(comparison.inexact, ".1%")
    print_line(console, f"\n{text}: {comparison.num_bytes:,} bytes, {comparison.num_chunks:,} chunks of the same bytes")
    print_line(console, f"{one_to_one} of the chunks are one token on each side", indent=2)
    print_line(console, f"{inexact} of the bytes are not in exact chunks: dropped, changed or unknown text", indent=2)
    if no_bits_per_byte:
        print_line(console, f"No bits per byte: {no_bits_per_byte}", indent=2)


def _list(title: str, rows: Sequence[tuple[int, str, str]]) -> None:
    """Print a title with the number of rows, and one line for each of the first `SHOWN` rows."""
    if not rows:
        return
    click.echo(f"{title:<9}{len(rows):,}")
    for token, text, origin in rows[:SHOWN]:
        click.echo(f"  {token:>9,}  {visible_text(text):<24}  {origin}".rstrip())
    if len(rows) > SHOWN:
        click.echo(f"             ... and {len(rows) - SHOWN:,} more")


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of a model's weights on disk, or the size of a GGUF file."""
    from embedlayer.checkpoints.reader import Checkpoint
    from embedlayer.checkpoints.second_copies import own_files

    if folder.is_file():
        return folder.stat().st_size
    if path_kind(folder) is PathKind.CHECKPOINT:
        return sum(file.stat().st_size for file in own_files(Checkpoint.open(folder)))
    files = (file for file in folder.glob("*.safetensors") if file.name != "checkpoint.safetensors")
    return sum(file.stat().st_size for file in files)
