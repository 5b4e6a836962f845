"""`embedlayer plan`: what the two ends of a model take, before it is built."""

import json
from collections.abc import Sequence

import click

from embedlayer import planner
from embedlayer.planner import EmbeddingPlan, format_bytes, format_parameters

FLOAT_DTYPES = [name for name in planner.DTYPE_BITS if not name.startswith("int")]


@click.command()
@click.argument("presets", nargs=-1, metavar="[MODEL]...")
@click.option("--vocab", "vocab_size", type=int, help="Rows of the table, V.")
@click.option("--dim", "embed_dim", type=int, help="Width of a row, D.")
@click.option("--tied/--untied", default=None, help="Whether the head reads the table; tied unless the model is not.")
@click.option("--rank", type=int, help="Rank of a factorised table.")
@click.option("--positions", type=int, help="Rows of a learned position table.")
@click.option("--dtype", type=click.Choice(list(planner.DTYPE_BITS)), default="fp32", show_default=True)
@click.option("--tokens", type=int, default=4096, show_default=True, help="Tokens whose logits are held at once.")
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
@click.option("--textbook", is_flag=True, help="The tables that introductions to embeddings print.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list with every size, in bytes.")
def plan(
    presets: tuple[str, ...],
    vocab_size: int | None,
    embed_dim: int | None,
    tied: bool | None,
    rank: int | None,
    positions: int | None,
    dtype: str,
    tokens: int,
    optimizer: str,
    moments: str,
    textbook: bool,
    as_json: bool,
) -> None:
    """Parameters and bytes of a table, its head, their training and the logits.

    Name one MODEL for all its parts or several to compare them; without a name, give --vocab and --dim, or see all
    models that are known.

    \b
    embedlayer plan gpt2
    embedlayer plan gpt2 llama-7b gemma-2b --dtype bf16
    embedlayer plan --vocab 32000 --dim 4096 --untied --tokens 8192
    """  # noqa: D301 (click needs the backspace)
    sized = vocab_size is not None or embed_dim is not None
    if textbook and (presets or sized):
        raise click.UsageError("--textbook shows its own sizes: leave out models and sizes.")
    if textbook:
        plans = [row for table in planner.textbook_tables().values() for row in table]
    else:
        names: Sequence[str | None] = presets or ([None] if sized else list(planner.PRESETS))
        plans = [
            planner.plan(
                name,
                vocab_size=vocab_size,
                embed_dim=embed_dim,
                tied=tied,
                rank=rank,
                positions=positions,
                dtype=dtype,
                tokens=tokens,
                optimizer=optimizer,
                moment_dtype=moments,
            )
            for name in names
        ]
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in plans], indent=2))
    elif textbook:
        _show(*_textbook(plans))
    elif len(plans) == 1:
        _show(*_parts(plans[0]))
    else:
        _show(*_comparison(plans))


def _parts(row: EmbeddingPlan) -> tuple[str, list[str], list[list[str]], str]:
    title = f"{row.name or 'plan'}: {_size(row)}, {'tied' if row.tied else 'untied'}, {row.dtype}"
    if row.rank is not None:
        title += f", rank {row.rank}"
    head = "the table" if row.tied else format_parameters(row.head_parameters)
    lines = [
        ["table", format_parameters(row.table_parameters), format_bytes(row.table_bytes)],
        ["head", head, format_bytes(row.head_bytes)],
        ["learned positions", format_parameters(row.position_parameters), format_bytes(row.position_bytes)],
        ["weights", format_parameters(row.parameters), format_bytes(row.weight_bytes)],
        ["gradient", "", format_bytes(row.gradient_bytes)],
        [f"optimizer ({row.optimizer})", "", format_bytes(row.optimizer_bytes)],
        [f"logits of {row.tokens:,} tokens", "", format_bytes(row.logits_bytes)],
        ["gradient of the logits", "", format_bytes(row.logits_gradient_bytes)],
        ["total", "", format_bytes(row.total_bytes)],
    ]
    return title, ["part", "parameters", "memory"], lines, _note([row])


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
            _number((row.logits_bytes + row.logits_gradient_bytes) / 2**20),
            _number(row.total_bytes / 2**20),
        ]
        for row in plans
    ]
    return title, ["model", "V x D", "tied", "params", "weights", "training", "logits", "total"], lines, _note(plans)


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
    if not plans[0].scale_bytes:
        return ""
    scales = f", {format_bytes(plans[0].scale_bytes)} of the weights" if len(plans) == 1 else ""
    return f"{plans[0].dtype} is for inference, so nothing is trained; each row has one fp32 scale{scales}."


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
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line, style="bold" if line[0] == "total" else None)
    console.print(table)
    if note:
        console.print(note)
