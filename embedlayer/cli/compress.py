"""`embedlayer compress`: replace a table by a smaller one, and measure what that costs."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import NEW_FOLDER, SOURCE, TEXT, json_option, tokenizer_option
from embedlayer.cli.printing import make_console, number_cell, print_json, print_line, print_table
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, MissingExtraError, TextError
from embedlayer.core.formatting import format_bytes
from embedlayer.families.left_out_files import FileRule, not_copied_message
from embedlayer.io.files import new_folder, visible_names, write_json
from embedlayer.opening.path_kinds import BLOCKS, GENERATION

if TYPE_CHECKING:
    from embedlayer.compress.report import CompressionResult
    from embedlayer.opening.opened_model import OpenedModel
    from embedlayer.tables.table import TokenTable

REST = FileRule((), "the rest of the model", "Compress the folder of a checkpoint whose blocks can be copied.")


@click.command()
@click.argument("source", type=SOURCE)
@click.option(
    "--to",
    help="Kind of the smaller table: int8, int4, int4-g32 (groups of 32 columns), q8_0, q4_0, rank=128; or that of "
    "another library: mlx-int4, ct-int4-g32 (compressed-tensors).",
)
@click.option("-o", "--output", type=NEW_FOLDER, help="New folder for the result.")
@click.option("--compare", is_flag=True, help="Show all choices side by side, with --to among them.")
@click.option("--text", type=TEXT, help="Text to measure the loss on, and to count tokens in.")
@tokenizer_option
@json_option
def compress(
    source: Path,
    to: str | None,
    output: Path | None,
    compare: bool,
    text: Path | None,
    tokenizer_from: Path | None,
    as_json: bool,
) -> None:
    """Make the table of SOURCE smaller.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors. The
    result is the same model with the smaller table: embed, neighbors and export read it, and generate if SOURCE is a
    run or of LLaMA type. The blocks of any other checkpoint folder are kept too, in the folder model of the result, and
    embedlayer.compress.load_model(OUTPUT) loads the whole model with transformers. A low-rank table approximates the
    tokens best that occur often in --text, else in the training text of a run.

    With --to mlx-int4, ct-int4-g32 and the like, a checkpoint folder becomes one with a table in the codes of this
    library, which mlx-lm or transformers with compressed-tensors opens; all else in it stays.

    \b
    embedlayer compress run --compare --text book.txt
    embedlayer compress run --to int4-g32 -o smaller
    embedlayer compress model --to mlx-int4 -o model-mlx
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.compress.convert import check_kind, compress_table
    from embedlayer.compress.report import compare_compression
    from embedlayer.opening.readers import open_model

    if to is None and not compare:
        raise click.UsageError("Give --to with -o to compress, or --compare to see the choices.")
    if (to is None and output is not None) or (to is not None and output is None and not compare):
        raise click.UsageError("--to and -o belong together: pass the kind of table and the new folder.")
    if to is not None:
        check_kind(to)
    opened = open_model(source, tokenizer_from, parts="layer" if output is None and text is None else "model")
    use, context = (known_use(opened), "") if text is None else measure_use(opened, text)
    note = ""
    left_out: tuple[str, ...] = ()
    rows = compare_compression(opened.table, _choices(opened.table.embed_dim, to), **use) if compare else []
    if to is not None and output is not None:
        table = compress_table(opened.table, to, counts=use["counts"])
        rows = rows or compare_compression(opened.table, {to: table}, **use)[:2]
        note, left_out = _write(opened, table, output)
    if as_json:
        facts: dict[str, Any] = {"output": None if output is None else str(output), "left_out": left_out}
        facts |= {"context": context} if context else {}
        print_json({**facts, "rows": [asdict(row) for row in rows]})
        return
    _show(opened, rows, context)
    if output is not None:
        click.echo(f"\nWritten to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")
        click.echo(note, nl=bool(note))


def known_use(opened: "OpenedModel") -> dict[str, Any]:
    """Return how the training text of a run uses its tokens, as keyword arguments of `compare_compression`."""
    from embedlayer.vocab.token_usage import with_required_tokens

    counts = opened.counts
    if counts is None or opened.tokenizer is None:
        return {"counts": counts}
    return {"counts": counts, "kept": len(with_required_tokens(opened.tokenizer, counts.nonzero()[:, 0].tolist()))}


def measure_use(opened: "OpenedModel", text: Path) -> tuple[dict[str, Any], str]:
    """Measure how a text file uses the tokens of a model."""
    import torch

    from embedlayer.analysis.text_evaluation import context_of, encode_text
    from embedlayer.cli.evaluate import causal_model
    from embedlayer.compress.report import loss_on_text
    from embedlayer.data.text_chunks import read_text_chunks
    from embedlayer.vocab.token_usage import used_tokens

    encoded = opened.encode("".join(read_text_chunks(text)))
    starts = opened.text_limits[0][:1] if opened.adds_special_tokens else ()
    ids = torch.tensor(encoded if tuple(encoded[:1]) == starts else [*starts, *encoded])
    if len(ids) < 2:
        raise TextError(f"{text} is {len(ids)} tokens long: too short to measure on.")
    use = {
        "counts": torch.bincount(ids, minlength=opened.table.vocab_size),
        "kept": len(used_tokens(opened.require_tokenizer(), text)),
    }
    try:
        model = causal_model(opened, "cpu")
        read = encode_text(model, text)
        window = min(model.default_window, read.predicted)
        stride = max(1, window // 2)
        loss = loss_on_text(model.model, read.ids, window=window, stride=stride, start_id=model.start_id)
        return {**use, "loss": loss}, context_of(window, stride)
    except (CheckpointError, MissingExtraError) as error:
        warnings.warn(f"The loss on {text} is not measured: {error}", EmbedLayerWarning, stacklevel=2)
        return use, ""


def _choices(width: int, to: str | None) -> list[str]:
    """Return the kinds of compressed tables to compare, as `compress_table` names them."""
    from embedlayer.compress.report import choices_for

    choices = [*choices_for(width)]
    choices += [f"rank={rank}" for rank in (width // 2, width // 4) if rank]
    if to is not None and to not in choices:
        choices.append(to)
    return choices


def _write(opened: "OpenedModel", table: "TokenTable", output: Path) -> tuple[str, tuple[str, ...]]:
    """Write the model with a compressed table to the folder `output`, which appears complete or not at all."""
    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.compress.convert import replace_table
    from embedlayer.compress.transformers_models import MODULES, tensors_beside
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.saving import Pretrained, hide_weights
    from embedlayer.tables.stored_embedding import StoredEmbedding

    if isinstance(table, StoredEmbedding) and opened.kind.startswith("checkpoint") and Path(opened.source).is_dir():
        from embedlayer.compress.stored_checkpoints import OPENED_BY, write_checkpoint

        paths = write_checkpoint(table, opened.source, output, tokenizer=opened.tokenizer)
        return f"The whole model: {OPENED_BY[table.stored_format.library].format(folder=str(output))}", paths
    layer: Pretrained = table
    if opened.model is not None:
        layer = replace_table(opened.model, table)
    elif opened.kind == "file of vectors":
        layer = EmbeddingLayer(table, family="vectors")
    is_whole = isinstance(layer, DecoderLM) or not opened.kind.startswith(("checkpoint", "GGUF"))
    if isinstance(opened.model, EmbeddingLayer):
        others = tensors_beside(opened.model, Path(opened.source))
        is_whole = is_whole or (others is not None and not any(others.values()))
    with new_folder(output) as partial:
        with warnings.catch_warnings():
            if opened.no_tokenizer:  # open_model has said so
                warnings.simplefilter("ignore", EmbedLayerWarning)
            layer.save_pretrained(partial, tokenizer=opened.tokenizer)
        if isinstance(layer, DecoderLM) and opened.adds_special_tokens and opened.tokenizer is not None:
            starts, ends = opened.text_limits
            write_json(partial / GENERATION, {"bos_token_id": [*starts], "eos_token_id": [*ends]})
        has_blocks, left_out = _copy_rest(opened, partial, is_whole=is_whole)
        if has_blocks:
            hide_weights(partial)
    if left_out:
        warnings.warn(not_copied_message(left_out), EmbedLayerWarning, stacklevel=2)
    note = ""
    if has_blocks:
        library = "sentence-transformers" if (output / BLOCKS / MODULES).exists() else "transformers"
        note = f'The whole model: embedlayer.compress.load_model("{output}"), with {library}.'
    elif not is_whole:
        reason = opened.table_only or "they are copied from the folder of a checkpoint only."
        note = f"Only the embedding layer is written, without the model's blocks: {reason}"
    return note, tuple(left_out)


def _copy_rest(opened: "OpenedModel", partial: Path, *, is_whole: bool) -> tuple[bool, dict[str, FileRule]]:
    """Copy what is beside the table in the folder of the source into a folder with the layer."""
    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.checkpoints.reader import Checkpoint
    from embedlayer.checkpoints.vector_formats.projector import FILES
    from embedlayer.compress.transformers_models import copy_blocks, copy_other_files
    from embedlayer.io.safetensors_files import INDEX
    from embedlayer.saving import TABLE_WEIGHTS, WEIGHTS

    model, source = opened.model, Path(opened.source)
    rest = copy_blocks(model, source, partial) if model is None or isinstance(model, EmbeddingLayer) else None
    if rest is not None:
        return True, rest
    if not source.is_dir():
        return False, {}
    written = [WEIGHTS, TABLE_WEIGHTS, GENERATION, *FILES, *(path.name for path in partial.iterdir())]
    if is_whole:
        weights = Checkpoint.open(source).headers if opened.kind.startswith("checkpoint") else ()
        written += [*weights, INDEX]
        return False, copy_other_files(source, partial, written=written, num_rows=opened.table.vocab_size)
    names = [f"{name}/" if (source / name).is_dir() else name for name in visible_names(source)]
    return False, {name: REST for name in names if name not in written or name == WEIGHTS}


def _show(opened: "OpenedModel", rows: "Sequence[CompressionResult]", context: str) -> None:
    """Print a table with one line for each result, and below it notes on the loss, trimming and an untied head."""
    console, table = make_console(), opened.table
    print_line(console, f"Table of {table.vocab_size:,} x {table.embed_dim}")
    headings = ["kind", "bytes", "of it", "row error", "nearest 10 kept"]
    headings += ["loss, nats per token", "change"] if any(row.loss is not None for row in rows) else []
    lines = [
        [
            *(row.to, format_bytes(row.bytes), f"{row.share:.1%}", f"{row.row_error:.2%}"),
            *(number_cell(row.neighbors, ".1%", ""), number_cell(row.loss, ".4f", "")),
            number_cell(row.loss_change, "+.4f", ""),
        ]
        for row in rows
    ]
    print_table(console, headings, lines)
    if context:
        print_line(console, f"The loss is that of embedlayer evaluate. {context}")
    if any(row.to == "trim" for row in rows):
        click.echo("trim: the table without the rows that embedlayer vocab trim drops; the other rows are unchanged.")
    if opened.head is not None and not opened.head.tied:
        own = sum(tensor.nbytes for tensor in opened.head.state_dict().values())
        click.echo(f"The untied head keeps its own {format_bytes(own)} unchanged.")
