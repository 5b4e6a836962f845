"""`embedlayer corpus`: text to token IDs once, by many processes or hosts, for many runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embedlayer.cli.paths import TEXTS, TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer


VOCAB_SIZE = 4096


@click.group()
def corpus() -> None:
    """Texts as one array of token IDs that runs read."""


@corpus.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=TEXTS)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the corpus.")
@click.option(
    "--tokenizer",
    "tokenizer_from",
    type=TOKENIZER,
    help="Use this tokenizer (a file or folder).  [default: a BPE tokenizer learned from FILE...]",
)
@click.option("--vocab-size", type=int, help=f"Entries of a learned tokenizer.  [default: {VOCAB_SIZE}]")
@click.option("--shards", default=1, show_default=True, help="Parts of the corpus.")
@click.option("--workers", type=int, help="Processes at a time.  [default: one for each core]")
@click.option("--only", type=int, metavar="K", help="Build part K alone, from 0 on; other hosts build the others.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def build(
    files: tuple[Path, ...],
    output: Path,
    tokenizer_from: Path | None,
    vocab_size: int | None,
    shards: int,
    workers: int | None,
    only: int | None,
    as_json: bool,
) -> int:
    """Turn texts into a corpus of token IDs; called again after a stop, it goes on.

    FILE... are text files (.gz too) and folders of them. The IDs are the same for any number of shards and workers.
    The corpus keeps its tokenizer. Train on it with: embedlayer train FOLDER -o RUN
    """
    from embedlayer.cli.progress import reading
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.corpus_files import missing_shards
    from embedlayer.data.sharded_build import build_in_shards, build_shard

    tokenizer = _tokenizer_of(files, output, tokenizer_from, vocab_size, only=only, quiet=as_json)
    try:
        with reading(quiet=as_json) as show:
            if only is None:
                build_in_shards(files, tokenizer, output, shards=shards, workers=workers, on_progress=show)
            else:
                build_shard(files, tokenizer, output, shards=shards, only=only, on_progress=show)
    except KeyboardInterrupt:
        click.echo("Stopped. The parts that are done stay; the same command goes on with the others.", err=True)
        return 130
    missing = missing_shards(output)
    if missing:
        if as_json:
            click.echo(json.dumps({"directory": str(output), "shards": shards, "missing": missing}))
        else:
            click.echo(f"Part {only} is in {output}; {len(missing)} of {shards} are still to be built.")
        return 0
    built = TokenCorpus.open(output)
    if as_json:
        facts = {
            "directory": str(output),
            "shards": shards,
            "missing": [],
            "tokens": len(built),
            "bytes": built.num_bytes,
            "documents": len(built.documents),
            "vocab_size": built.vocab_size,
            "dtype": str(built.ids.dtype),
        }
        click.echo(json.dumps(facts))
    else:
        click.echo(
            f"{len(built):,} tokens of {built.num_bytes / len(built):.2f} bytes, "
            f"{_count(len(built.documents), 'document')}, {_count(shards, 'part')}, in {output}\n"
            f"Train on them with: embedlayer train {output} -o RUN"
        )
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tokenizer_of(
    files: tuple[Path, ...],
    output: Path,
    tokenizer_from: Path | None,
    vocab_size: int | None,
    *,
    only: int | None,
    quiet: bool,
) -> "Tokenizer":
    """Read the tokenizer that is named, or the one of a corpus that was begun; else learn one from the texts."""
    from embedlayer.cli.pipeline import learn_tokenizer
    from embedlayer.errors import SizeError
    from embedlayer.data.corpus import find_text_files
    from embedlayer.data.tokenizer import load_tokenizer

    begun = output / "tokenizer.json"
    if tokenizer_from is not None and vocab_size is not None:
        raise SizeError("--vocab-size is of a tokenizer that is learned: leave it out, or leave --tokenizer out.")
    if tokenizer_from is not None:
        return load_tokenizer(tokenizer_from)
    if vocab_size is None and begun.exists():
        return load_tokenizer(begun)
    if only is not None:
        raise SizeError(
            "--only builds one part of a corpus whose parts need the same tokenizer: name it with --tokenizer."
        )
    return learn_tokenizer(find_text_files(files), "bpe", vocab_size or VOCAB_SIZE, quiet=quiet)
