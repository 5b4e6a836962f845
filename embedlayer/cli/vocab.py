"""`embedlayer vocab`: add, remove, trim or replace the tokens of a run, a saved layer, a checkpoint or a GGUF file."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import (
    FOLDER,
    NEW_FILE,
    SOURCE,
    TEXT,
    TEXTS,
    TOKENIZER,
    chosen_device,
    json_option,
    new_model_option,
    token_or_id,
)
from embedlayer.cli.vocab_results import SHOWN, show_comparison, show_receipt, show_suggestion
from embedlayer.core.errors import EmbedLayerError, EmbedLayerWarning, TokenizerError, VocabularyError
from embedlayer.core.formatting import command_line
from embedlayer.io.files import new_file
from embedlayer.io.partials import temporary_folder
from embedlayer.opening.path_kinds import OWN_FOLDERS, PathKind, path_kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from embedlayer.training.loop import TrainingOptions
    from embedlayer.vocab.init.row_init import RowInit
    from embedlayer.vocab.new_tokens import AddedMerge
    from embedlayer.vocab.receipt import Receipt

STARTS = {
    "subword-mean": "SubwordMeanInit",
    "mean": "MeanInit",
    "mean+noise": "MeanNoiseInit",
    "random": "RandomInit",
    "omp": "OMPInit",
    "focus": "FocusInit",
    "wechsel": "WechselInit",
}
"""Values of `--init`, each with its class in `vocab.init`: the last three in `auxiliary_init`, others in `row_init`."""

VALIDATION_TOKENS = 8192

_WITH_MODELS = (*OWN_FOLDERS, PathKind.CHECKPOINT, PathKind.GGUF)


@click.group()
def vocab() -> None:
    """Edit the vocabulary of a model, or compare two.

    The model is the folder of a run, a saved layer or a checkpoint, or a GGUF file. Tables, heads, tokenizer,
    configuration and training state are edited together. The result is a new folder or file, which appears complete or
    not at all, and the source is unchanged. The receipt in it (of a GGUF file, beside it) remaps stored token IDs.
    """


def _edit_command(edit: "Callable[..., tuple[Receipt, dict[str, Any]]]") -> click.Command:
    """Turn a function that edits a model's folder into a subcommand of `vocab`, which prints the receipt."""

    @vocab.command()
    @click.argument("directory", type=FOLDER)
    @new_model_option
    @click.option("--pad-to-multiple-of", type=int, help="Pad the rows to this multiple.  [default: as before]")
    @json_option
    @wraps(edit)
    def command(directory: Path, output: Path, as_json: bool, **options: Any) -> None:
        receipt, trained = edit(directory, out=output, **options)
        show_receipt(receipt, directory, output, as_json=as_json, **trained)

    return command


@dataclass(frozen=True)
class InitOptions:
    """Store the options that choose the initialisation of new rows.

    Attributes:
        init: Value of `--init`, a key of `STARTS`.
        donor: Model whose table gives the auxiliary vectors of OMP.
        auxiliary: File of word vectors for FOCUS and WECHSEL.
        auxiliary_text: Texts to train these vectors on, if there is no file.
        seed: Seed of random rows and of these vectors.
    """

    init: str
    donor: Path | None
    auxiliary: Path | None
    auxiliary_text: tuple[Path, ...]
    seed: int


def _init(edit: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `InitOptions` to a subcommand, which gets them as the argument `start`."""

    @wraps(edit)
    def command(
        *arguments: Any,
        init: str,
        donor: Path | None,
        auxiliary: Path | None,
        auxiliary_text: tuple[Path, ...],
        seed: int,
        **options: Any,
    ) -> Any:
        return edit(*arguments, start=InitOptions(init, donor, auxiliary, auxiliary_text, seed), **options)

    for option in (
        click.option("--seed", default=0, show_default=True, help="Seed of random rows and of training."),
        click.option("--auxiliary-text", multiple=True, type=TEXTS, help="Text to train fastText vectors on instead."),
        click.option("--auxiliary", type=TEXT, help="focus, wechsel: a file of word vectors."),
        click.option("--donor", type=SOURCE, help="omp: a model with another tokenizer, whose rows are approximated."),
        click.option(
            "--init",
            type=click.Choice([*STARTS]),
            default=next(iter(STARTS)),
            show_default=True,
            help="Initial rows of new tokens: the mean of the token's former subwords, the mean of all rows, ...",
        ),
    ):
        command = option(command)
    return command


@_edit_command
@click.argument("terms", nargs=-1, metavar="TERM...")
@click.option("--terms", "file", type=TEXT, help="File with one term a line, or what `vocab suggest` wrote.")
@click.option("--special", multiple=True, help="A special token to add; may be repeated.")
@click.option("--as-is", is_flag=True, help="Add terms unchanged, without the space before a word in running text.")
@_init
@click.option("--train-on", multiple=True, type=TEXTS, help="Text to train the new rows on.")
@click.option("--seconds", default=30.0, show_default=True, help="Seconds to train them.")
@click.option("--steps", type=int, help="Number of steps instead of a time.")
@click.option("--learning-rate", default=3e-3, show_default=True, help="Peak learning rate.")
def add(
    directory: Path,
    terms: tuple[str, ...],
    file: Path | None,
    special: tuple[str, ...],
    as_is: bool,
    start: InitOptions,
    train_on: tuple[Path, ...],
    seconds: float,
    steps: int | None,
    learning_rate: float,
    **options: Any,
) -> "tuple[Receipt, dict[str, Any]]":
    """Add tokens to the model in DIRECTORY: TERM..., the lines of a file, or both.

    With --train-on only the new rows are trained, by default for half a minute; the model's results for its old tokens
    stay the same bit for bit. A term that is a token already is left out, with a warning. Added tokens of the tokenizer
    that have no row in the table get one, also without TERM; that is a step of its own, before --train-on.
    """
    from embedlayer.training.loop import TrainingOptions
    from embedlayer.vocab.operations import add_tokens
    from embedlayer.vocab.row_training import TrainedInit
    from embedlayer.vocab.suggestion import read_terms
    from embedlayer.vocab.tokenizer_edit import edit_tokenizer

    wanted = _without_known(directory, [*terms, *read_terms(_lines(file))], spaced=not as_is)
    lacks_rows = (bool(train_on) or not (wanted or special)) and _lacks_rows(directory)
    if lacks_rows and train_on:
        raise VocabularyError(
            f"The tokenizer of {directory} has tokens without a row in the table, and a model without these rows "
            f"cannot be trained on text. Give them rows first: {command_line('vocab', 'add', directory, '-o', '...')}. "
            f"Then add terms with --train-on to that folder; or load its model, and call "
            f"embedlayer.vocab.train_only_rows(model, token_ids) to train those rows."
        )
    if not wanted and not special and not lacks_rows:
        raise VocabularyError("There is nothing to add: pass terms, or a file with one a line.")

    def edited(old: "Tokenizer") -> "Tokenizer":
        return edit_tokenizer(old, add=wanted, special=special).tokenizer

    init, trained = _row_init(start, directory, edited, train_on), dict[str, Any]()
    options["init"] = init
    if train_on:
        training = TrainingOptions(
            steps=steps,
            minutes=seconds / 60 if steps is None else None,
            learning_rate=learning_rate,
            seed=start.seed,
            weight_decay=0.0,
            validation_tokens=VALIDATION_TOKENS,
        )
        trained, table, head = _train_new_rows(directory, wanted, special, train_on, init, training)
        options |= {"init_head": TrainedInit(head, init), "init": TrainedInit(table, init)}
    return add_tokens(directory, wanted, special=special, **options), trained


@_edit_command
@click.argument("tokens", nargs=-1, metavar="TOKEN...", type=token_or_id)
@click.option("--tokens", "file", type=TEXT, help="File with one token a line.")
def remove(
    directory: Path, tokens: tuple[str | int, ...], file: Path | None, **options: Any
) -> "tuple[Receipt, dict[str, Any]]":
    """Remove tokens from the model in DIRECTORY: TOKEN..., the lines of a file, or both.

    A token is named by its text (" dog"), as it is written in the vocabulary (Ġdog), or by its ID ("#304"). The lines
    of a file are texts, as `vocab suggest --prune` writes them.
    """
    from embedlayer.vocab.operations import remove_tokens

    wanted = [*tokens, *_lines(file)]
    if not wanted:
        raise VocabularyError(
            'There is nothing to remove: name tokens, or a file with one a line. An ID needs quotation marks: "#304".'
        )
    return remove_tokens(directory, wanted, **options), {}


@_edit_command
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=TEXTS)
@click.option("--min-count", default=1, show_default=True, help="Minimum number of occurrences of a kept token.")
@click.option("--drop-special", is_flag=True, help="Also drop special tokens that neither text nor tokenizer needs.")
def trim(
    directory: Path, files: tuple[Path, ...], drop_special: bool, **options: Any
) -> "tuple[Receipt, dict[str, Any]]":
    """Keep only the tokens that FILE... need, and drop all others.

    FILE... are text files (.gz too) and folders of them. These texts are still split into the same tokens, with new
    IDs.
    """
    from embedlayer.vocab.operations import trim_vocabulary

    return trim_vocabulary(directory, files, keep_special=not drop_special, **options), {}


@_edit_command
@click.argument("tokenizer", type=TOKENIZER)
@_init
def transplant(
    directory: Path, tokenizer: Path, start: InitOptions, **options: Any
) -> "tuple[Receipt, dict[str, Any]]":
    """Replace the tokenizer of the model in DIRECTORY by TOKENIZER (a file or folder).

    Tokens that both tokenizers have keep their rows. The rows of new tokens are initialised as --init says.
    """
    from embedlayer.tokenization.read import load_tokenizer
    from embedlayer.vocab.operations import transplant as change_tokenizer

    init = _row_init(start, directory, lambda _: load_tokenizer(tokenizer), ())
    return change_tokenizer(directory, tokenizer, init=init, **options), {}


@vocab.command()
@click.argument("directory", type=FOLDER)
@click.argument("files", nargs=-1, required=True, metavar="TEXT...", type=TEXTS)
@click.option("--count", default=500, show_default=True, help="Number of tokens to suggest.")
@click.option("--prune", is_flag=True, help="Suggest tokens to remove: those whose removal costs least.")
@click.option("--held-out", multiple=True, type=TEXTS, help="Text to measure on.  [default: a tenth of TEXT...]")
@click.option("-o", "--output", type=NEW_FILE, help="New file for the list.")
@json_option
def suggest(
    directory: Path,
    files: tuple[Path, ...],
    count: int,
    prune: bool,
    held_out: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Suggest tokens to add to the tokenizer in DIRECTORY, so that TEXT... is encoded with fewer tokens.

    TEXT... are text files (.gz too) and folders of them. A tenth of the text is held out, and the bytes per token
    before and after are measured on it. For BPE the tokens are the next merges of its training, continued on TEXT. No
    file but the list is written.
    """
    from embedlayer.tokenization.read import load_tokenizer
    from embedlayer.vocab.suggestion import suggest_removals, suggest_tokens

    choose = suggest_removals if prune else suggest_tokens
    suggestion = choose(load_tokenizer(directory), files, count=count, held_out=held_out or None)
    if output is not None:
        with new_file(output) as list_file:
            list_file.write_text("".join(f"{line}\n" for line in suggestion.lines()), encoding="utf-8")
    show_suggestion(suggestion, directory, output, prune=prune, as_json=as_json)


@vocab.command()
@click.argument("first", metavar="A", type=TOKENIZER)
@click.argument("second", metavar="B", type=TOKENIZER)
@click.option("--text", type=TEXT, help="Text to split with both: a UTF-8 file, or .gz.")
@json_option
def compare(first: Path, second: Path, text: Path | None, as_json: bool) -> None:
    """Compare the tokenizers of A and B: the tokens that both have, and how both split a text.

    A and B are tokenizers, or models with one: files, or folders. Where both are causal language models, the bits per
    byte with which they predict the text are compared too, as `embedlayer evaluate` computes them.
    """
    from embedlayer.data.text_chunks import read_text_chunks
    from embedlayer.tokenization.comparison import compare_tokenizers
    from embedlayer.tokenization.read import load_tokenizer

    tokenizers = load_tokenizer(first), load_tokenizer(second)
    chunks = None if text is None else read_text_chunks(text, tokenizer=tokenizers)
    comparison = compare_tokenizers(*tokenizers, chunks)
    bits, reason = (None, "") if text is None else _bits_per_byte(first, second, text)
    show_comparison(comparison, (first, second), text, bits, reason, as_json=as_json)


def _bits_per_byte(first: Path, second: Path, text: Path) -> tuple[list[float] | None, str]:
    """Return the bits per byte of two causal language models on a text; or `None`, and why there are none."""
    from embedlayer.analysis.text_evaluation import evaluate_text
    from embedlayer.cli.evaluate import causal_model
    from embedlayer.opening.readers import open_model

    no_model = [path for path in (first, second) if path_kind(path) not in _WITH_MODELS]
    if no_model:
        return None, f"{no_model[0]} is a tokenizer without a model."
    try:
        device = chosen_device("auto")
        models = [causal_model(open_model(path, device=device), device) for path in (first, second)]
        evaluation = evaluate_text(models[0], text, models[1])
    except EmbedLayerError as error:
        return None, str(error)
    assert evaluation.other is not None
    return [evaluation.model.bits_per_byte, evaluation.other.bits_per_byte], ""


# Terms


def _lacks_rows(directory: Path) -> bool:
    """Return whether the tokenizer in a model's folder or file was extended and its table was not."""
    # Also `True` if the tokenizer keeps the model from being opened: the edit then raises that error.
    from embedlayer.opening.readers import open_model
    from embedlayer.tokenization.ids import added_without_rows

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmbedLayerWarning)  # about these tokens
        try:
            opened = open_model(directory, parts="table")
            tokenizer = opened.tokenizer
        except TokenizerError:  # a folder of this library with such a tokenizer; the edit says if it is another one
            return True
    return tokenizer is not None and bool(added_without_rows(tokenizer, opened.table.vocab_size))


def _lines(file: Path | None) -> list[str]:
    """Return the lines of a text file, without line ends and without blank lines; an empty list if `file` is `None`."""
    from embedlayer.data.text_chunks import read_text_chunks

    text = "" if file is None else "".join(read_text_chunks(file))
    return [line for line in text.splitlines() if line.strip()]


def _without_known(directory: Path, terms: "Sequence[str | AddedMerge]", *, spaced: bool) -> "list[str | AddedMerge]":
    """Return the terms that are not yet tokens, each once, in the form in which they occur in running text."""
    from embedlayer.tokenization.bytes import TokenBytes
    from embedlayer.tokenization.read import load_tokenizer
    from embedlayer.vocab.new_tokens import AddedMerge
    from embedlayer.vocab.targets.folder import check_folder

    if path_kind(directory) is not PathKind.GGUF:
        check_folder(directory)
    tokens = TokenBytes(load_tokenizer(directory))
    spaced = spaced and tokens.convention in ("byte-level", "sentencepiece")
    wanted: dict[str, str | AddedMerge] = {}
    known = []
    for term in terms:
        name = term.name(tokens.prefix) if isinstance(term, AddedMerge) else f" {term.strip()}" if spaced else term
        is_text = spaced and not isinstance(term, AddedMerge)
        if name in tokens.vocabulary or (is_text and name.encode() in tokens.by_bytes):
            known.append(name)
        else:
            wanted.setdefault(name, term if isinstance(term, AddedMerge) else name)
    if known:
        shown = ", ".join(repr(term) for term in known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
        warnings.warn(f"Already tokens, and left unchanged ({len(known)}): {shown}", EmbedLayerWarning, stacklevel=2)
    return list(wanted.values())


# Initialisation


def _row_init(
    start: InitOptions, directory: Path, edited: "Callable[[Tokenizer], Tokenizer]", train_on: Sequence[Path]
) -> "RowInit":
    """Return the initialisation of new rows that the options choose, and seed torch's default generator."""
    import torch

    from embedlayer.checkpoints.vector_files import read_vectors
    from embedlayer.data.readers.sources import find_text_files
    from embedlayer.data.text_chunks import read_text_chunks
    from embedlayer.opening.readers import open_model
    from embedlayer.tokenization.read import load_tokenizer
    from embedlayer.vocab.init import auxiliary_init, row_init
    from embedlayer.vocab.init.auxiliary_vectors import AuxiliaryVectors, train_fasttext

    torch.manual_seed(start.seed)
    old = load_tokenizer(directory)
    init: RowInit
    needs = {"omp": "--donor", "focus": "--auxiliary", "wechsel": "--auxiliary"}.get(start.init)
    passed = {"--donor": start.donor, "--auxiliary": start.auxiliary or start.auxiliary_text}
    wrong = [option for option, value in passed.items() if value and option != needs]
    if wrong:
        raise VocabularyError(f"{wrong[0]} has no effect with --init {start.init}: leave it out, or change --init.")
    chosen = getattr(row_init if needs is None else auxiliary_init, STARTS[start.init])
    if needs is None:
        init = chosen()
        return init
    new = edited(old)
    if start.donor is not None:
        donor = open_model(start.donor, parts="table")
        vectors = AuxiliaryVectors.from_donor(donor.table, donor.require_tokenizer(), old, new)
    elif start.auxiliary is not None:
        vectors = AuxiliaryVectors.from_words(*read_vectors(start.auxiliary), old, new)
    else:
        files = start.auxiliary_text or train_on
        texts = ["".join(read_text_chunks(file)) for file in (find_text_files(files) if files else [])]
        if needs == "--donor" or not texts:
            others = "" if needs == "--donor" else ", or a text to train fastText vectors on with --auxiliary-text"
            raise VocabularyError(f"--init {start.init} needs auxiliary vectors: pass {needs}{others}.")
        whole = "\n".join(texts)
        vectors = train_fasttext(
            [whole if start.auxiliary_text else whole[: len(whole) * 9 // 10]], old, new, seed=start.seed
        )
    init = chosen(vectors)
    return init


# Training


def _train_new_rows(
    directory: Path,
    terms: "Sequence[str | AddedMerge]",
    special: Sequence[str],
    texts: Sequence[Path],
    init: "RowInit",
    training: "TrainingOptions",
) -> "tuple[dict[str, Any], Tensor, Tensor]":
    """Train the rows of new tokens on text, in memory; the folder does not change."""
    # Only inside a click command with the parameter `as_json`. The folder does not change. About the last tenth of the
    # text is held out. `training.max_length` is replaced.
    import torch

    from embedlayer.cli.progress import display, stopping_gently
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.models.causal import PatchedDecoder, longest_sequence
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.opening.readers import open_model
    from embedlayer.training.loop import Trainer
    from embedlayer.vocab.operations import add_tokens

    opened = open_model(directory)
    model, tokenizer = opened.require_causal(), opened.require_tokenizer()
    decoder = model if isinstance(model, DecoderLM) else PatchedDecoder(model)
    run, length = opened.run, 128
    if run is not None and run.contains_run:
        length = run.options().max_length
    training = replace(training, max_length=min(length, longest_sequence(model) or length))
    with temporary_folder() as folder, warnings.catch_warnings():
        corpus = TokenCorpus.build(list(texts), tokenizer, folder / "old")
        before = Trainer(decoder, *corpus.split(0.1), training).validate()
        losses = {"loss_with_old_tokens": before["validation_bits_per_byte"] * math.log(2)}
        receipt = add_tokens(model, terms, special=special, tokenizer=tokenizer, init=init, train_only_new=True)
        ids = list(receipt.added)
        corpus = TokenCorpus.build(list(texts), receipt.tokenizer, Path(folder) / "new")
        counts = corpus.counts(receipt.row_map.size)[ids]
        if not counts.sum():
            raise VocabularyError("The text contains none of the new tokens, so their rows cannot be trained on it.")
        trainer = Trainer(decoder, *corpus.split(0.1), training)
        measured = []
        warnings.filterwarnings("ignore", "The first loss", EmbedLayerWarning)  # a trained model is far from ln V
        quiet = click.get_current_context().params["as_json"]
        with stopping_gently(trainer), display(trainer, quiet=quiet) as show:
            for line in trainer.run(on_step=show):
                show(line["step"], line)
                measured += [line["validation_bits_per_byte"] * math.log(2)] if "validation_loss" in line else []
        losses |= {"loss_before_training": measured[0], "loss_after_training": measured[-1]}
    table, head = decoder.table, decoder.head
    row_ids = torch.tensor(ids, device=table.rows(0, 1).device)
    sources = (table,) if head is None else (table, head.own_rows, head.own_table)  # a tied head may name no table
    rows, *of_head = (each.look_up(row_ids).detach().clone() for each in sources if each is not None)
    head_rows = of_head[0] if of_head else rows
    occurrences = {"new_tokens_in_text": int(counts.sum()), "different_new_tokens_in_text": int((counts > 0).sum())}
    return {**losses, **occurrences, "steps": trainer.step}, rows, head_rows
