"""`embedlayer export`: write a table as a file that other tools read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from embedlayer.cli.options import INTO, SOURCE, OutputPath, json_option, tokenizer_option
from embedlayer.cli.printing import print_json
from embedlayer.core.errors import FileError, SizeError
from embedlayer.core.formatting import a_or_an, command_line
from embedlayer.io.files import check_new_files, check_new_folder, is_stream, new_files

if TYPE_CHECKING:
    from embedlayer.checkpoints.vector_files import VectorFormat
    from embedlayer.opening.opened_model import OpenedModel
    from embedlayer.opening.readers import Parts

FORMATS = ("word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector", "parquet", "onnx", "gguf")


@click.command()
@click.argument("source", type=SOURCE)
@click.option("-o", "--output", required=True, type=OutputPath(), help="File; for projector a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="Format of the file.  [default: by its name]")
@tokenizer_option
@click.option("--into", type=INTO, help="GGUF file or checkpoint folder to copy with the new table and tokens.")
@click.option(
    "--neighbors",
    type=click.IntRange(min=0),
    default=15,
    help="Nearest neighbours per token in a parquet file; the search is exact, so slow for large tables.",
)
@json_option
def export(
    source: Path,
    output: Path,
    format: str | None,
    tokenizer_from: Path | None,
    into: Path | None,
    neighbors: int,
    as_json: bool,
) -> None:
    """Write a table for other tools.

    The file contains the rows of the table of SOURCE, with their tokens.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    Spaces in tokens become "▁" in formats that end a token at a space. Rows without a token are left out. The rows of
    a source without a tokenizer are written as npy. A parquet file is for embedding-atlas: it contains a map and
    neighbours instead of the rows.

    An onnx file computes look-ups and, if the head is tied, logits. It needs a table that embedlayer compress wrote
    with --to q4_0 or q8_0.

    With --into, the output is a copy of a GGUF file or of a checkpoint folder, in which the table, an untied head and
    the tokens are those of SOURCE, stored as they are there: in floating point, in blocks of GGUF, or in the codes of
    MLX, compressed-tensors and other libraries. All other tensors are copied byte for byte, and rows that did not
    change keep their bytes.
    """
    from embedlayer.checkpoints.vector_files import files_of, format_of
    from embedlayer.opening.readers import open_model

    if into is not None and into.is_dir():
        if format is not None:
            raise FileError("The copy of a checkpoint folder is a folder: leave --format out.")
        chosen, written = "checkpoint", []
        check_new_folder(output)
    else:
        chosen = format or (output.suffix[1:] if output.suffix in (".parquet", ".onnx", ".gguf") else format_of(output))
        if (chosen == "gguf") != (into is not None):
            raise FileError("A gguf file is a copy of another one: name that file with --into, and the format gguf.")
        written = files_of(output, chosen)
        check_new_files(*written)
        if chosen == "projector":
            check_new_folder(written[0].parent)
    parts: Parts = "layer" if into is not None or chosen == "onnx" else "table"
    opened = open_model(source, tokenizer_from, parts=parts)
    if into is not None:
        from embedlayer.vocab.written_tables import write_into

        write_into(opened.table, opened.require_tokenizer(), into, output, head=opened.untied_head)
        count = opened.table.vocab_size
    else:
        count = _write(opened, source, written, chosen, neighbors)
    columns, left_out = opened.table.embed_dim, opened.table.vocab_size - count
    facts = {"file": str(output), "format": chosen, "rows": count, "columns": columns, "left_out": left_out}
    text = f"Wrote {count:,} rows of {columns} numbers as {chosen} to {output}"
    if left_out:
        text += f"\n{left_out:,} of {opened.table.vocab_size:,} rows are left out: the tokenizer has no token for them"
    print_json(facts) if as_json else click.echo(text, err=is_stream(output))


def _write(opened: "OpenedModel", source: Path, files: Sequence[Path], format: str, neighbors: int) -> int:
    """Write a table as new files in one of `FORMATS`, of which the first has the rows; return their number."""
    with new_files(*files) as (target, *_):
        if format == "onnx":
            from embedlayer.compress.onnx_export import export_onnx, has_onnx_layout

            if not has_onnx_layout(opened.table):
                raise SizeError(
                    f"An onnx file holds a table in blocks of 32 columns with one scale, and that of {source} is "
                    f"{a_or_an(opened.table)} of {opened.dtype}. Compress it first, and export NEW: "
                    f"{command_line('compress', source, '--to', 'q4_0', '-o', 'NEW')}"
                )
            export_onnx(opened.table, target, logits=opened.head is None or opened.head.tied)
            return opened.table.vocab_size
        if format == "parquet":
            from embedlayer.analysis.atlas import write_atlas

            return write_atlas(target, opened.table, opened.require_tokenizer(), num_neighbors=neighbors)
        return _write_vectors(opened, target, cast("VectorFormat", format))


def _write_vectors(opened: "OpenedModel", output: Path, format: "VectorFormat") -> int:
    """Write the rows that have a token, in a file format of word vectors; return their number."""
    import torch

    from embedlayer.analysis.row_reader import RowReader
    from embedlayer.checkpoints.vector_files import write_vectors

    opened = opened.tokens_by_row() if format == "npy" else opened
    rows, tokenizer = RowReader(opened.table), opened.require_tokenizer()
    named = [(row, tokenizer.id_to_token(row)) for row in range(len(rows))]
    ids = [row for row, token in named if token is not None]
    tokens = [token for _, token in named if token is not None]
    if format not in ("npy", "projector"):
        tokens = [token.replace(" ", "▁") for token in tokens]
    with torch.no_grad():
        rows_with_token = opened.table if len(ids) == len(rows) else rows.take(torch.tensor(ids))
        write_vectors(output, tokens, rows_with_token, format)
    return len(ids)
