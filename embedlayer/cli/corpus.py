"""`embedlayer corpus`: text to token IDs once, by many processes or hosts, for many runs."""

import json
from pathlib import Path

import click


@click.group()
def corpus() -> None:
    """Texts as one array of token IDs that runs read."""


@corpus.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the corpus.")
@click.option("--tokenizer", required=True, type=click.Path(path_type=Path), help="Tokenizer: a file or folder.")
@click.option("--shards", default=1, show_default=True, help="Parts of the corpus.")
@click.option("--workers", type=int, help="Processes at a time.  [default: one for each core]")
@click.option("--only", type=int, metavar="K", help="Build part K alone, from 0 on; other hosts build the others.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def build(
    files: tuple[str, ...],
    output: Path,
    tokenizer: Path,
    shards: int,
    workers: int | None,
    only: int | None,
    as_json: bool,
) -> int:
    """Turn texts into a corpus of token IDs; called again after a stop, it goes on.

    FILE... are text files (.gz too) and folders of them. The IDs are the same for any number of shards and workers.
    Train on the result with: embedlayer train FOLDER -o RUN
    """
    from embedlayer.cli.progress import reading
    from embedlayer.text.corpus import TokenCorpus
    from embedlayer.text.parts import missing_parts
    from embedlayer.text.shards import build_in_shards, build_shard
    from embedlayer.text.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    try:
        with reading(quiet=as_json) as show:
            if only is None:
                build_in_shards(files, loaded, output, shards=shards, workers=workers, on_progress=show)
            else:
                build_shard(files, loaded, output, shards=shards, only=only, on_progress=show)
    except KeyboardInterrupt:
        click.echo("Stopped. The parts that are done stay; the same command goes on with the others.", err=True)
        return 130
    missing = missing_parts(output)
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
            f"{len(built):,} tokens of {built.num_bytes / len(built):.2f} bytes, {len(built.documents):,} documents, "
            f"{shards} parts, in {output}"
        )
    return 0
