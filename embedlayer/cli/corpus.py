"""`embedlayer corpus`: turn text into token IDs once, with many processes or hosts, for many runs."""

from pathlib import Path
from typing import Any

import click

from embedlayer.cli.options import (
    CORPUS,
    TEXTS_OR_ROWS,
    TOKENIZER,
    OutputPath,
    dtype_option,
    json_option,
    text_field_option,
)
from embedlayer.cli.printing import print_json
from embedlayer.core.errors import FileError, SizeError
from embedlayer.core.formatting import command_line, count_of
from embedlayer.io.files import check_new_files, check_new_folder, create_folder, visible_names

VOCAB_SIZE = 4096


@click.group()
def corpus() -> None:
    """Turn texts into one array of token IDs."""


@corpus.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=TEXTS_OR_ROWS)
@click.option("-o", "--output", required=True, type=OutputPath(), help="Folder for the corpus.")
@click.option(
    "--tokenizer",
    "tokenizer_from",
    type=TOKENIZER,
    help="Use this tokenizer (a file or folder).  [default: a BPE tokenizer trained on FILE...]",
)
@click.option("--vocab-size", type=int, help=f"Number of tokens of a trained tokenizer.  [default: {VOCAB_SIZE}]")
@click.option("--shards", default=1, help="Number of shards of the corpus.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of processes.  [default: one per core]")
@click.option("--only", type=int, metavar="K", help="Build shard K only, counted from 0; other hosts build the others.")
@text_field_option
@dtype_option
@json_option
def build(
    files: tuple[Path, ...],
    output: Path,
    tokenizer_from: Path | None,
    vocab_size: int | None,
    shards: int,
    workers: int | None,
    only: int | None,
    text_field: str | None,
    dtype: str | None,
    as_json: bool,
) -> int:
    """Turn texts into a corpus of token IDs; the same command continues after a stop.

    FILE... are text files, JSON lines, Parquet and Arrow files, folders of them, or - for standard input, which gives
    one shard. Each row is a document. The IDs are the same for any number of shards and workers. The folder also
    contains the tokenizer. Train on it with: embedlayer train FOLDER -o RUN

    FILE... may also be files of token IDs, with --tokenizer: NumPy's .npy, the .bin of llm.c and nanoGPT, Megatron's
    .bin and .idx. They are mapped, not copied.
    """
    from embedlayer.cli.progress import reading
    from embedlayer.cli.texts import learn_tokenizer, named_tokenizer
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.corpus_files import PLAN_FILE
    from embedlayer.data.readers.documents import RowOptions
    from embedlayer.data.readers.sources import find_sources
    from embedlayer.data.readers.token_files import find_token_files, map_token_files
    from embedlayer.data.sharded_build import build_in_shards, build_shard
    from embedlayer.data.text_files import saved_standard_input
    from embedlayer.tokenization.read import load_tokenizer

    is_stream = "-" in map(str, files)
    has_ids = bool(find_token_files(files, dtype))
    if tokenizer_from is not None and vocab_size is not None:
        raise SizeError("--vocab-size sets the size of a trained tokenizer: leave it out, or leave --tokenizer out.")
    if is_stream or has_ids or (visible_names(output) and not (output / PLAN_FILE).exists()):
        check_new_folder(output)  # before the tokenizer is trained
    if is_stream or has_ids:
        if shards > 1 or only is not None:
            what = "Standard input can be read only once" if is_stream else "Files of token IDs are not copied"
            raise FileError(f"{what}: leave --shards and --only out, or pass files of text.")
        create_folder(output.parent)
    if has_ids:
        map_token_files(files, named_tokenizer(tokenizer_from), output, dtype=dtype)
        return _show(output, as_json=as_json)
    begun = output / "tokenizer.json"
    template = tokenizer_from or (begun if begun.exists() else None)
    with saved_standard_input(files, output.parent) as sources:
        if tokenizer_from is not None or (vocab_size is None and begun.exists()):
            tokenizer = load_tokenizer(tokenizer_from or begun)
        elif only is not None:
            raise SizeError(
                "--only builds one shard, and all shards need the same tokenizer: name it with --tokenizer."
            )
        else:
            readers = find_sources(sources, RowOptions(text_field))
            tokenizer = learn_tokenizer([readers], "bpe", vocab_size or VOCAB_SIZE, quiet=as_json)
        try:
            with reading(quiet=as_json) as show:
                options: dict[str, Any] = {"text_field": text_field, "chat_template": template, "on_progress": show}
                if is_stream:
                    TokenCorpus.build(sources, tokenizer, output, **options)
                elif only is None:
                    build_in_shards(sources, tokenizer, output, shards=shards, workers=workers, **options)
                else:
                    build_shard(sources, tokenizer, output, shards=shards, only=only, **options)
        except KeyboardInterrupt:
            if not is_stream:
                click.echo("Stopped. The finished shards are kept; the same command builds the others.", err=True)
            return 130
    return _show(output, as_json=as_json, only=only)


def _show(output: Path, *, as_json: bool, only: int | None = None) -> int:
    """Print what was built in the folder `output`, and return the exit code; `only` is the shard that was requested."""
    from embedlayer.data.corpus import TokenCorpus
    from embedlayer.data.corpus_files import PLAN_FILE, missing_shards, read_plan

    is_planned = (output / PLAN_FILE).exists()
    shards = read_plan(output)["shards"] if is_planned else 1
    missing = missing_shards(output) if is_planned else []
    facts: dict[str, Any] = {"directory": str(output), "shards": shards, "missing": missing}
    if missing:
        text = f"Shard {only} is in {output}; {len(missing)} of {shards} are still to be built."
    else:
        built = TokenCorpus.open(output)
        facts |= {"tokens": len(built), "bytes": built.num_bytes, "documents": len(built.documents)}
        facts |= {"vocab_size": built.vocab_size, "dtype": str(built.ids.dtype)}
        text = (
            f"{len(built):,} tokens of {built.num_bytes / len(built):.2f} bytes, "
            f"{count_of(len(built.documents), 'document')}, {count_of(shards, 'shard')}, in {output}\n"
            f"Train on them with: {command_line('train', output, '-o', 'RUN')}"
        )
    print_json(facts) if as_json else click.echo(text)
    return 0


@corpus.command()
@click.argument("folder", type=CORPUS)
@click.option(
    "-o",
    "--output",
    required=True,
    type=OutputPath(check_new_files),
    help="New file: .npy, or .bin of Megatron.",
)
@json_option
def export(folder: Path, output: Path, as_json: bool) -> int:
    """Write the token IDs of a corpus as a NumPy array, or as Megatron's pair of .bin and .idx.

    A corpus of one file in the same format gives the bytes of that file again.
    """
    from embedlayer.data.readers.token_files import export_token_ids

    written = [str(path) for path in export_token_ids(folder, output)]
    print_json({"files": written}) if as_json else click.echo(f"Wrote {' and '.join(written)}")
    return 0
