"""`embedlayer vocab`: another vocabulary for a trained run or a checkpoint."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from embedlayer.cli.paths import EDITED, MODEL, TEXT, TEXTS, TOKENIZER
from embedlayer.errors import FileError, VocabularyError

if TYPE_CHECKING:
    from embedlayer.vocab.receipt import Receipt
    from embedlayer.vocab.row_init import RowInit

STARTS = ("subword-mean", "mean", "mean+noise", "random")
SHOWN = 12
VALIDATION_TOKENS = 8192

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def vocab() -> None:
    """Add, remove, trim or replace the tokens of a trained run or a checkpoint.

    Tables, heads, tokenizer, configuration and the state of a run move together into a new folder, wholly or not at
    all. The receipt in it undoes the edit and carries stored IDs over.
    """


def _common(command: Command) -> Command:
    """The options that all edits have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else."),
        click.option("--pad-to-multiple-of", type=int, help="Store rows up to this multiple.  [default: as before]"),
        click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder."),
        click.argument("directory", type=MODEL),
    ):
        command = option(command)
    return command


_init = click.option(
    "--init",
    type=click.Choice(STARTS),
    default=STARTS[0],
    show_default=True,
    help="What new rows start as: the mean of the subwords of its text, or of all rows, ...",
)
_seed = click.option("--seed", default=0, show_default=True, help="Of what is drawn.")


@vocab.command()
@_common
@click.argument("terms", nargs=-1, metavar="TERM...")
@click.option("--terms", "file", type=TEXT, help="File with one term a line.")
@click.option("--special", multiple=True, help="A special token to add; may be repeated.")
@click.option("--as-is", is_flag=True, help="Add terms as given, without the space that stands before a word in text.")
@_init
@click.option("--train-on", multiple=True, type=TEXTS, help="Text to train the new rows on.")
@click.option("--seconds", default=30.0, show_default=True, help="How long to train them.")
@click.option("--steps", type=int, help="Updates, instead of a time.")
@click.option("--learning-rate", default=3e-3, show_default=True, help="Peak of the schedule.")
@_seed
def add(
    directory: Path,
    output: Path,
    terms: tuple[str, ...],
    file: Path | None,
    special: tuple[str, ...],
    as_is: bool,
    init: str,
    train_on: tuple[Path, ...],
    seconds: float,
    steps: int | None,
    learning_rate: float,
    seed: int,
    pad_to_multiple_of: int | None,
    as_json: bool,
) -> None:
    """Add tokens to the model in DIRECTORY: TERM..., the lines of a file, or both.

    With --train-on only the new rows are trained, for half a minute; everything the model does with its old tokens
    stays the same to the bit. A term that is a token already is passed over, with a warning.
    """
    import torch

    from embedlayer.vocab.edit import add_tokens
    from embedlayer.vocab.row_training import TrainedInit

    _refuse_filled(output)
    wanted = _without_known(directory, [*terms, *_lines(file)], spaced=not as_is)
    if not wanted and not special:
        raise VocabularyError("There is nothing to add: give terms, or a file with one a line.")
    torch.manual_seed(seed)
    options: dict[str, Any] = {"init": _start(init), "pad_to_multiple_of": pad_to_multiple_of}
    trained: dict[str, Any] = {}
    if train_on:
        trained, table, head = _train_new_rows(
            directory,
            wanted,
            special,
            train_on,
            options["init"],
            {
                "steps": steps,
                "minutes": seconds / 60 if steps is None else None,
                "learning_rate": learning_rate,
                "seed": seed,
            },
            quiet=as_json,
        )
        options |= {"init_head": TrainedInit(head, options["init"]), "init": TrainedInit(table, options["init"])}
    receipt = add_tokens(directory, wanted, special=special, out=output, **options)
    _show(receipt, directory, output, as_json=as_json, **trained)


@vocab.command()
@_common
@click.argument("tokens", nargs=-1, metavar="TOKEN...")
@click.option("--tokens", "file", type=TEXT, help="File with one token a line.")
def remove(
    directory: Path,
    output: Path,
    tokens: tuple[str, ...],
    file: Path | None,
    pad_to_multiple_of: int | None,
    as_json: bool,
) -> None:
    """Remove tokens from the model in DIRECTORY, by their text or as they stand in the vocabulary."""
    from embedlayer.vocab.edit import remove_tokens

    wanted = [*tokens, *_lines(file)]
    if not wanted:
        raise VocabularyError("There is nothing to remove: name tokens, or a file with one a line.")
    receipt = remove_tokens(directory, wanted, out=output, pad_to_multiple_of=pad_to_multiple_of)
    _show(receipt, directory, output, as_json=as_json)


@vocab.command()
@_common
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=TEXTS)
@click.option("--min-count", default=1, show_default=True, help="How often a token must occur to stay.")
@click.option("--drop-special", is_flag=True, help="Drop special tokens too that nothing needs.")
def trim(
    directory: Path,
    output: Path,
    files: tuple[Path, ...],
    min_count: int,
    drop_special: bool,
    pad_to_multiple_of: int | None,
    as_json: bool,
) -> None:
    """Keep only the tokens that FILE... need: texts (.gz too) or folders of them, whose IDs stay the same, remapped."""
    from embedlayer.vocab.edit import trim_vocabulary

    receipt = trim_vocabulary(
        directory,
        files,
        keep_special=not drop_special,
        min_count=min_count,
        out=output,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    _show(receipt, directory, output, as_json=as_json)


@vocab.command()
@_common
@click.argument("tokenizer", type=TOKENIZER)
@_init
@_seed
def transplant(
    directory: Path,
    output: Path,
    tokenizer: Path,
    init: str,
    seed: int,
    pad_to_multiple_of: int | None,
    as_json: bool,
) -> None:
    """Move the model in DIRECTORY to another TOKENIZER (a file or folder); tokens that both have keep their rows."""
    import torch

    from embedlayer.vocab import edit

    torch.manual_seed(seed)
    receipt = edit.transplant(
        directory,
        tokenizer,
        out=output,
        init=_start(init),
        pad_to_multiple_of=pad_to_multiple_of,
    )
    _show(receipt, directory, output, as_json=as_json)


@vocab.command()
@click.argument("directory", type=EDITED)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder.")
def undo(directory: Path, output: Path) -> None:
    """Write what DIRECTORY was before its last edit, to the bit."""
    from embedlayer.vocab.receipt import last_receipt

    receipt = last_receipt(directory)
    receipt.undo(directory, out=output)
    new, old = receipt.num_tokens
    click.echo(f"{old:,} tokens -> {new:,} tokens, as before the edit\nWritten to {output}")


# What is asked


def _lines(file: Path | None) -> list[str]:
    """The lines of a file without line ends; empty ones do not count."""
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"Cannot read {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise VocabularyError(f"{file} is not UTF-8 text ({error}).") from error
    return [line for line in text.splitlines() if line.strip()]


def _refuse_filled(output: Path) -> None:
    """Say so before a training, not after it."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileError(f"{output} is not empty. Choose a folder that is not there yet.")


def _without_known(directory: Path, terms: Sequence[str], *, spaced: bool) -> list[str]:
    """The terms as they stand in running text, without those that are tokens already."""
    import warnings

    from embedlayer.errors import EmbedLayerWarning
    from embedlayer.text.tokenizer import load_tokenizer
    from embedlayer.vocab.folders import check_folder
    from embedlayer.vocab.token_bytes import TokenBytes

    check_folder(directory)
    tokens = TokenBytes(load_tokenizer(directory))
    spaced = spaced and tokens.convention in ("byte-level", "sentencepiece")
    wanted = dict.fromkeys(f" {term.strip()}" if spaced else term for term in terms)
    known = [term for term in wanted if term in tokens.vocabulary or (spaced and term.encode() in tokens.by_bytes)]
    if known:
        shown = ", ".join(repr(term) for term in known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
        warnings.warn(f"Tokens already, and left as they are ({len(known)}): {shown}", EmbedLayerWarning, stacklevel=2)
    return [term for term in wanted if term not in known]


def _start(name: str) -> "RowInit":
    from embedlayer.vocab.row_init import MeanInit, MeanNoiseInit, RandomInit, SubwordMeanInit

    starts: dict[str, RowInit] = {
        "subword-mean": SubwordMeanInit(),
        "mean": MeanInit(),
        "mean+noise": MeanNoiseInit(),
        "random": RandomInit(),
    }
    return starts[name]


# Training


def _train_new_rows(
    directory: Path,
    terms: Sequence[str],
    special: Sequence[str],
    texts: Sequence[Path],
    init: "RowInit",
    options: dict[str, Any],
    *,
    quiet: bool,
) -> tuple[dict[str, Any], Any, Any]:
    """Train the rows of new tokens on text, in memory.

    Returns:
        The losses, in nats per byte of the text kept for measuring, and the new rows of table and head.
    """
    import math
    import tempfile
    import warnings

    from embedlayer.cli.generate import open_model
    from embedlayer.cli.progress import display, stopping_gently
    from embedlayer.errors import EmbedLayerWarning
    from embedlayer.text.corpus import TokenCorpus
    from embedlayer.training.loop import Trainer, TrainingOptions
    from embedlayer.vocab.edit import add_tokens
    from embedlayer.vocab.row_training import merge_rows

    opened = open_model(directory)
    model, length = opened.model, _length(directory, opened.model.position.max_seq_len)
    training = TrainingOptions(max_length=length, weight_decay=0.0, validation_tokens=VALIDATION_TOKENS, **options)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        corpus = TokenCorpus.build(list(texts), opened.tokenizer, Path(folder) / "old")
        before = Trainer(model, *corpus.split(0.1), training).validate()
        losses = {"loss_with_old_tokens": before["validation_bits_per_byte"] * math.log(2)}
        receipt = add_tokens(model, terms, special=special, tokenizer=opened.tokenizer, init=init, train_only_new=True)
        corpus = TokenCorpus.build(list(texts), receipt.tokenizer, Path(folder) / "new")
        counted = _occurrences(corpus, receipt)
        trainer = Trainer(model, *corpus.split(0.1), training)
        measured = []
        warnings.filterwarnings("ignore", "The first loss", EmbedLayerWarning)  # a trained model is far from ln V
        with stopping_gently(trainer), display(trainer, quiet=quiet) as show:
            for line in trainer.run(on_step=show.step):
                show.line(line)
                measured += [line["validation_bits_per_byte"] * math.log(2)] if "validation_loss" in line else []
        losses |= {"loss_before_training": measured[0], "loss_after_training": measured[-1]}
    merge_rows(model)
    ids = list(receipt.added)
    rows = model.table.rows(0, model.table.vocab_size)[ids].detach().clone()
    head = rows if model.head.tied else model.head.weight[ids].detach().clone()
    return {**losses, **counted, "steps": trainer.step}, rows, head


def _length(directory: Path, reach: int | None) -> int:
    """Tokens per window: as the run had, as far as the positions reach."""
    from embedlayer.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    length = run.options().max_length if run.holds_a_run else 128
    return length if reach is None else min(length, reach)


def _occurrences(corpus: Any, receipt: "Receipt") -> dict[str, int]:
    counts = corpus.counts(receipt.row_map.size)[list(receipt.added)]
    if not counts.sum():
        raise VocabularyError("The text holds none of the new tokens: there is nothing to train their rows on.")
    return {"new_tokens_in_text": int(counts.sum()), "different_new_tokens_in_text": int((counts > 0).sum())}


# What happened


def _show(receipt: "Receipt", directory: Path, output: Path, *, as_json: bool, **trained: Any) -> None:
    old, new = (_weight_bytes(folder) for folder in (directory, output))
    if as_json:
        summary = {
            "directory": str(output),
            "tokens": list(receipt.num_tokens),
            "rows": [receipt.row_map.old_size, receipt.row_map.size],
            "kept": receipt.kept,
            "added": {str(token): [text, receipt.origins.get(token)] for token, text in receipt.added.items()},
            "dropped": {str(token): text for token, text in receipt.dropped.items()},
            "merged": {str(token): into for token, into in receipt.merged.items()},
            "weight_bytes": [old, new],
            **trained,
        }
        click.echo(json.dumps(summary))
        return
    before, after = receipt.num_tokens
    click.echo(f"Tokens   {before:,} -> {after:,}")
    click.echo(f"Rows     {receipt.row_map.old_size:,} -> {receipt.row_map.size:,}")
    click.echo(f"Kept     {receipt.kept:,}, the same to the bit")
    _list("New", [(token, text, receipt.origins.get(token, "")) for token, text in receipt.added.items()])
    _list("Dropped", [(token, text, "") for token, text in receipt.dropped.items()])
    _list("Merged", [(token, f"-> {into}", "") for token, into in receipt.merged.items()])
    change = "the same" if new == old else f"{abs(new - old):,} {'fewer' if new < old else 'more'}"
    click.echo(f"Bytes    {old:,} -> {new:,} of weights ({change})")
    if trained:
        click.echo(
            f"\nTrained  {trained['steps']:,} steps, the new rows only; {trained['different_new_tokens_in_text']:,} of "
            f"them stand in the text, {trained['new_tokens_in_text']:,} times\n"
            f"Loss     on text kept for measuring, nats per byte:\n"
            f"         {trained['loss_with_old_tokens']:.4f} with the old tokens\n"
            f"         {trained['loss_before_training']:.4f} with the new ones before training\n"
            f"         {trained['loss_after_training']:.4f} after it"
        )
    click.echo(f"\nWritten to {output}; undo with: embedlayer vocab undo {output} -o ...")


def _list(title: str, rows: Sequence[tuple[int, str, str]]) -> None:
    """A line of numbers, and below it the first tokens."""
    if not rows:
        return
    from embedlayer.plots import visible_text

    click.echo(f"{title:<9}{len(rows):,}")
    for token, text, origin in rows[:SHOWN]:
        click.echo(f"  {token:>9,}  {visible_text(text):<24}  {origin}".rstrip())
    if len(rows) > SHOWN:
        click.echo(f"             ... and {len(rows) - SHOWN:,} more")


def _weight_bytes(folder: Path) -> int:
    files = (file for file in folder.glob("*.safetensors") if file.name != "checkpoint.safetensors")
    return sum(file.stat().st_size for file in files)
