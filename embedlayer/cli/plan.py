"""`embedlayer plan`: what the two ends of a model take, before it is built."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer import planner
from embedlayer.cli.paths import MODEL, TEXTS
from embedlayer.planner import Change, EmbeddingPlan, format_bytes, format_parameters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.checkpoints.layer import TransformedHead
    from embedlayer.layers.output import OutputHead
    from embedlayer.positions.position import Position
    from embedlayer.tables.table import TokenTable

FLOAT_DTYPES = [name for name in planner.DTYPE_BITS if not name.startswith("int")]


@click.command()
@click.argument("presets", nargs=-1, metavar="[MODEL]...")
@click.option("--vocab", "vocab_size", type=int, help="Rows of the table, V.")
@click.option("--dim", "embed_dim", type=int, help="Width of a row, D.")
@click.option("--tied/--untied", default=None, help="Whether the head reads the table; tied unless the model is not.")
@click.option("--rank", type=int, help="Rank of a factorised table.")
@click.option("--positions", type=int, help="Rows of a learned position table.")
@click.option("--dtype", type=click.Choice(list(planner.DTYPE_BITS)), help="Of the weights.  [default: fp32]")
@click.option("--tokens", type=int, default=4096, show_default=True, help="Tokens of a step, of each process.")
@click.option(
    "--chunked-loss", is_flag=True, help="The loss takes a chunk of tokens at a time, not all logits at once."
)
@click.option("--row-sparse", is_flag=True, help="The table's gradient has the looked-up rows only; needs --untied.")
@click.option("--delta", "delta_rows", type=int, default=0, metavar="ROWS", help="Train only so many rows.")
@click.option("--group-size", type=int, help="Numbers that share a scale in int8 and int4; all of a row if not given.")
@click.option("--ranks", type=int, default=1, show_default=True, help="Processes that the rows are divided among.")
@click.option(
    "--copies", type=int, default=1, show_default=True, help="Copies of the table, each divided among --ranks."
)
@click.option(
    "--distinct",
    "distinct_tokens",
    type=int,
    default=0,
    help="How many of a process's --tokens are different; as many as can be if not given.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the loss is made: on cuda its chunks are larger.",
)
@click.option(
    "--optimizer",
    type=click.Choice(list(planner.OPTIMIZER_MOMENTS)),
    default="adamw",
    show_default=True,
    help="none: inference, no gradient either.",
)
@click.option(
    "--moments", type=click.Choice(FLOAT_DTYPES), default="fp32", show_default=True, help="Dtype of AdamW's moments."
)
@click.option(
    "--checkpoint",
    type=MODEL,
    metavar="DIR",
    help="Plan a real model, and what each change would save; a run's folder, or a checkpoint.",
)
@click.option(
    "--text",
    "texts",
    type=TEXTS,
    multiple=True,
    metavar="FILE",
    help="With --checkpoint: trim its vocabulary to what FILE uses. May be given again.",
)
@click.option("--textbook", is_flag=True, help="The tables that introductions to embeddings print.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list with every size, in bytes.")
def plan(
    presets: tuple[str, ...],
    vocab_size: int | None,
    embed_dim: int | None,
    tied: bool | None,
    rank: int | None,
    positions: int | None,
    dtype: str | None,
    tokens: int,
    chunked_loss: bool,
    row_sparse: bool,
    delta_rows: int,
    group_size: int | None,
    ranks: int,
    copies: int,
    distinct_tokens: int,
    device: str,
    optimizer: str,
    moments: str,
    checkpoint: Path | None,
    texts: tuple[Path, ...],
    textbook: bool,
    as_json: bool,
) -> None:
    """Parameters and bytes of a table, its head, their training and the loss.

    Name one MODEL for all its parts or several to compare them; without a name, give --vocab and --dim, or see all
    models that are known. With --checkpoint, see what a model takes that is there, and what each change would save.

    \b
    embedlayer plan gpt2
    embedlayer plan gpt2 llama-7b gemma-2b --dtype bf16
    embedlayer plan --vocab 32000 --dim 4096 --untied --tokens 8192
    embedlayer plan --checkpoint DIR --text corpus.txt
    """  # noqa: D301 (click needs the backspace)
    sized = vocab_size is not None or embed_dim is not None
    if textbook and (presets or sized or checkpoint):
        raise click.UsageError("--textbook shows its own sizes: leave out models and sizes.")
    if checkpoint is not None and (presets or sized or (tied, rank, positions, dtype) != (None,) * 4):
        raise click.UsageError("--checkpoint has its own sizes: leave out models and sizes.")
    if texts and checkpoint is None:
        raise click.UsageError("--text is read with a checkpoint's tokenizer: give --checkpoint.")
    options: dict[str, Any] = {
        "tokens": tokens,
        "chunked_loss": chunked_loss,
        "row_sparse": row_sparse,
        "delta_rows": delta_rows,
        "group_size": group_size,
        "ranks": ranks,
        "copies": copies,
        "distinct_tokens": distinct_tokens,
        "device": device,
        "optimizer": optimizer,
        "moment_dtype": moments,
    }
    if checkpoint is not None:
        now, tokenizer = real_model(checkpoint)
        given = {name: value for name, value in options.items() if value != getattr(EmbeddingPlan, name)}
        now = replace(now, **{"tokens": tokens, **given})
        used = tokens_kept(texts, tokenizer, now.vocab_size, checkpoint) if texts else None
        _show_changes(now, planner.changes(now, used=used), as_json=as_json)
        return
    if textbook:
        plans = [row for table in planner.textbook_tables().values() for row in table]
    else:
        names: Sequence[str | None] = presets or ([None] if sized else list(planner.PRESETS))
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "embed_dim": embed_dim, "tied": tied, "rank": rank}
        sizes |= {"positions": positions, "dtype": dtype or "fp32"}
        plans = [planner.plan(name, **sizes, **options) for name in names]
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in plans], indent=2))
    elif textbook:
        _show(*_textbook(plans))
    elif len(plans) == 1:
        _show(*_parts(plans[0]))
    else:
        _show(*_comparison(plans))


def real_model(directory: Path) -> "tuple[EmbeddingPlan, Tokenizer | None]":
    """The ends of a run, or of a checkpoint, as they are, and its tokenizer if it has one.

    Raises:
        FileError: There is nothing of that name. Damaged: `CheckpointError`.
    """
    from embedlayer.io.files import read_json

    config = directory / "config.json"
    if config.exists() and read_json(config).get("kind") == "DecoderLM":
        from embedlayer.training.run_directory import load_run

        run = load_run(directory)
        return planned(run.model.table, run.model.head, run.model.position, name=directory.name), run.tokenizer
    from embedlayer.checkpoints.loader import load

    layer = load(directory)
    return planned(layer.table, layer.head, layer.position, name=directory.name), layer.tokenizer


def planned(
    table: "TokenTable", head: "OutputHead | TransformedHead | None", position: "Position", *, name: str
) -> EmbeddingPlan:
    """The plan of two ends that are there.

    Raises:
        CheckpointError: The table is of a type or a kind that is not planned.
    """
    from embedlayer.errors import CheckpointError
    from embedlayer.positions.learned import LearnedPositionalEmbedding
    from embedlayer.tables.delta import DeltaEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding
    from embedlayer.tables.quantized import QuantizedEmbedding

    base = table.base if isinstance(table, DeltaEmbedding) else table
    stored = str(next(iter(base.state_dict().values())).dtype).removeprefix("torch.")
    dtype = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(stored)
    if isinstance(base, QuantizedEmbedding):
        dtype = f"int{base.layout.bits}"
    if dtype is None:
        raise CheckpointError(f"A table of {stored} is not planned: give its sizes and --dtype.")
    return EmbeddingPlan(
        base.num_rows,
        base.embed_dim,
        tied=head is None or head.tied,
        rank=base.rank if isinstance(base, FactorizedEmbedding) else None,
        positions=len(position.weight) if isinstance(position, LearnedPositionalEmbedding) else 0,
        dtype=dtype,
        group_size=base.group_size if isinstance(base, QuantizedEmbedding) else None,
        row_sparse=base.row_sparse,
        delta_rows=len(table.token_ids) if isinstance(table, DeltaEmbedding) else 0,
        name=name,
    )


def tokens_kept(texts: Sequence[Path], tokenizer: "Tokenizer | None", rows: int, source: Path) -> int:
    """Return how many tokens `embedlayer vocab trim` keeps for these texts.

    Raises:
        TokenizerError: There is no tokenizer, or it is another model's.
        FileError: A text cannot be read.
    """
    from embedlayer.errors import TokenizerError
    from embedlayer.data.tokenizer import require_rows
    from embedlayer.vocab.used_tokens import used_tokens

    if tokenizer is None:
        raise TokenizerError(f"{source} has no tokenizer, so texts cannot be counted: leave out --text.")
    require_rows(tokenizer, rows, source)
    return len(used_tokens(tokenizer, texts))


def _show_changes(now: EmbeddingPlan, found: list[Change], *, as_json: bool) -> None:
    if as_json:
        after = [
            {**change.plan.as_dict(), "saved_bytes": change.saved_bytes, "price": change.price} for change in found
        ]
        click.echo(json.dumps([now.as_dict(), *after], indent=2))
        return
    _show(*_parts(now))
    click.echo()
    lines = [["as it is", format_bytes(now.peak_bytes), "", "", ""]]
    lines += [
        [
            change.what,
            format_bytes(change.plan.peak_bytes),
            ("-" if change.saved_bytes < 0 else "") + format_bytes(abs(change.saved_bytes)),
            f"{100 * change.saved_bytes / now.peak_bytes:.0f} %",
            change.price,
        ]
        for change in found
    ]
    _show("what each change saves in a step", ["change", "peak", "saves", "", "price"], lines, "")


def _parts(row: EmbeddingPlan) -> tuple[str, list[str], list[list[str]], str]:
    title = f"{row.name or 'plan'}: {_size(row)}, {'tied' if row.tied else 'untied'}, {row.dtype}"
    title += "" if row.rank is None else f", rank {row.rank}"
    title += ", row-sparse" if row.row_sparse else ""
    title += f", one of {row.ranks} ranks" if row.ranks > 1 else ""
    title += f", {row.copies} copies" if row.copies > 1 else ""
    head = "the table" if row.tied else format_parameters(row.head_parameters)
    lines = [
        ["table", format_parameters(row.table_parameters), format_bytes(row.table_bytes)],
        ["head", head, format_bytes(row.head_bytes)],
        ["learned positions", format_parameters(row.position_parameters), format_bytes(row.position_bytes)],
    ]
    if row.delta_rows:
        lines.append(
            [
                f"{row.delta_rows:,} rows that learn",
                format_parameters(row.delta_parameters),
                format_bytes(row.delta_bytes),
            ]
        )
    lines += [
        ["weights", format_parameters(row.parameters), format_bytes(row.weight_bytes)],
        ["gradient", format_parameters(row.trained_parameters), format_bytes(row.gradient_bytes)],
        [f"optimizer ({row.optimizer})", "", format_bytes(row.optimizer_bytes)],
        [f"vectors of {row.tokens:,} tokens", "", format_bytes(row.activation_bytes)],
        [_loss(row), "", format_bytes(row.loss_bytes)],
        [_peak(row), "", format_bytes(row.peak_bytes)],
    ]
    if row.ranks > 1:
        lines[-1:-1] = [["vectors of all ranks, a chunk", "", format_bytes(row.gathered_bytes)]]
        lines += [
            ["sent by a rank: look-up, on average", "", format_bytes(row.lookup_network_bytes)],
            ["sent by the busiest rank: rows, at most", "", format_bytes(row.busiest_lookup_network_bytes)],
            ["sent by a rank: loss", "", format_bytes(row.loss_network_bytes)],
        ]
    if row.copies > 1:
        average = ", on average" if row.row_sparse else ""
        lines.append([f"sent by a rank: copies{average}", "", format_bytes(row.copies_network_bytes)])
    if row.undivided_network_bytes:
        lines.append(["sent by a rank: undivided gradients", "", format_bytes(row.undivided_network_bytes)])
    return title, ["part", "parameters", "memory"], lines, _note([row])


def _loss(row: EmbeddingPlan) -> str:
    if not row.trained and row.ranks == 1:
        return "logits"
    chunked = row.chunked_loss or row.ranks > 1
    return "loss, by blocks" if row.tied and row.delta_rows else "loss, chunked" if chunked else "loss, plain"


def _peak(row: EmbeddingPlan) -> str:
    return "peak of a step" if row.trained else "in all"


def _comparison(plans: list[EmbeddingPlan]) -> tuple[str, list[str], list[list[str]], str]:
    first = plans[0]
    title = f"{first.dtype}, {first.optimizer}, {first.tokens:,} tokens; parameters in millions, memory in MiB"
    lines = [
        [
            row.name,
            _size(row),
            "yes" if row.tied else "no",
            _number(row.parameters / 10**6),
            _number(row.weight_bytes / 2**20),
            _number((row.gradient_bytes + row.optimizer_bytes) / 2**20),
            _number(row.loss_bytes / 2**20),
            _number(row.peak_bytes / 2**20),
        ]
        for row in plans
    ]
    return title, ["model", "V x D", "tied", "params", "weights", "training", "loss", "peak"], lines, _note(plans)


def _textbook(plans: list[EmbeddingPlan]) -> tuple[str, list[str], list[list[str]], str]:
    lines = [
        [
            row.name,
            f"{row.vocab_size:,}",
            f"{row.embed_dim:,}",
            format_parameters(row.table_parameters),
            format_bytes(row.table_bytes),
            format_bytes(row.table_bytes // 2),
        ]
        for row in plans
    ]
    return "one table", ["model", "V", "D", "parameters", "fp32", "fp16"], lines, ""


def _note(plans: list[EmbeddingPlan]) -> str:
    if plans[0].scale_bytes:
        scales = f", {format_bytes(plans[0].scale_bytes)}" if len(plans) == 1 else ""
        kind = "group" if plans[0].group_size else "row"
        return f"{plans[0].dtype} rows are not trained; each {kind} has a step and an offset{scales}."
    if len(plans) == 1 and plans[0].trained and plans[0].tokens:
        return "The peak: weights, optimizer, vectors, and the larger of loss and gradients."
    return ""


def _size(row: EmbeddingPlan) -> str:
    return f"{row.vocab_size:,} x {row.embed_dim:,}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _show(title: str, columns: list[str], lines: list[list[str]], note: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nothing is cut in a file
    console.print(title, soft_wrap=True, markup=False, style="italic")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or column == "price" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line, style="bold" if line[0] in ("peak of a step", "in all", "as it is") else None)
    with console.capture() as shown:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in shown.get().splitlines()), color=console.is_terminal)
    if note:
        console.print(note)
