"""`embedlayer plan`: parameters and bytes of the table and head of a model, before it is built."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.analysis.embedding_plan import (
    FLOAT_DTYPES,
    GGUF_BLOCK,
    OPTIONS,
    EmbeddingPlan,
    PlanAlternative,
    RowSize,
    command_flag,
    plan_alternatives,
)
from embedlayer.analysis.plan_presets import INSTEAD, PLAN_DTYPES, PRESETS
from embedlayer.analysis.plan_presets import plan as plan_sizes
from embedlayer.cli.options import SOURCE, TEXTS, tokenizer_option
from embedlayer.cli.printing import make_console, print_json, print_table
from embedlayer.core.errors import CheckpointError
from embedlayer.core.formatting import format_bytes, format_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from embedlayer.families.edit_report import CensusReport
    from embedlayer.heads.output import OutputHead
    from embedlayer.heads.prediction import PredictionHead
    from embedlayer.positions.position import Position
    from embedlayer.tables.lookup import LookupTable
    from embedlayer.tables.packed_rows import PackedRows

TOKENS = 4096  # tokens of a step where `--tokens` is not given
SIZES = {"vocab_size", "embed_dim", "tied", "rank", "positions", "per_layer_dim", "dtype"}  # that a checkpoint has

Printed = tuple[str, list[str], list[list[str]], str]
"""A table to print: title, column headings, lines, and a note below."""


def planner_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one click option for each field of `EmbeddingPlan` to a command, and return the command."""
    for name, option in reversed(OPTIONS.items()):
        choices, text, is_flag = option.metadata["choices"], option.metadata["help"], isinstance(option.default, bool)
        default = TOKENS if name == "tokens" else option.default
        if default is not None and default is not MISSING and not is_flag:
            text += f"  [default: {default}]"
        kind = None if is_flag else click.Choice(choices) if choices else int
        command = click.option(command_flag(name), name, default=None, help=text, is_flag=is_flag, type=kind)(command)
    return command


@click.command()
@click.argument("presets", nargs=-1, metavar="[MODEL]...")
@planner_options
@click.option(
    "--checkpoint",
    type=SOURCE,
    metavar="DIR",
    help="Plan a model on disk, a run or a checkpoint, and show what each change would save.",
)
@click.option(
    "--text",
    "texts",
    type=TEXTS,
    multiple=True,
    metavar="FILE",
    help="With --checkpoint: also plan a vocabulary trimmed to the tokens of FILE. May be given again.",
)
@tokenizer_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with every size, in bytes.")
def plan(
    presets: tuple[str, ...],
    checkpoint: Path | None,
    texts: tuple[Path, ...],
    tokenizer_from: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the parameters and bytes of an embedding table, its head, their training and the loss.

    Name one MODEL to see all its parts, or several to compare them: a known name, or the path of a config.json of
    transformers. Without a name give --vocab and --dim, or see all known models. With --checkpoint, plan a model that
    exists, see what each change would save, and what an edit of its vocabulary moves.

    \b
    embedlayer plan gpt2
    embedlayer plan gpt2 llama-7b gemma-2b --dtype bf16
    embedlayer plan Qwen3-0.6B/config.json --dtype bf16
    embedlayer plan --vocab 32000 --dim 4096 --untied --tokens 8192
    embedlayer plan --checkpoint DIR --text corpus.txt
    """  # noqa: D301 (click needs the backspace)
    passed = {name: value for name, value in options.items() if value is not None}
    sized = "vocab_size" in passed or "embed_dim" in passed
    passed.setdefault("tokens", TOKENS)
    if (texts or tokenizer_from is not None) and checkpoint is None:
        raise click.UsageError("--text is read with the tokenizer of a checkpoint: give --checkpoint.")
    if checkpoint is not None:
        if presets or passed.keys() & SIZES:
            raise click.UsageError("--checkpoint has its own sizes: leave out models and sizes.")
        from embedlayer.opening.readers import open_model
        from embedlayer.tables.packed_rows import PackedRows
        from embedlayer.vocab.targets.folder import folder_census
        from embedlayer.vocab.token_usage import used_tokens

        opened = open_model(checkpoint, tokenizer_from, parts="layer")
        now = planned(opened.table, opened.head, opened.position, name=checkpoint.name)
        inputs = getattr(opened.model, "per_layer", None)
        if inputs is not None:
            rows = inputs.table.num_rows
            rows = 0 if rows == now.vocab_size else rows  # follows the vocabulary of an alternative
            now = replace(now, per_layer_dim=inputs.table.embed_dim, per_layer_rows=rows)
            if isinstance(inputs.table, PackedRows):
                now = replace(now, row_sizes={**now.row_sizes, "per_layer": _row_size(inputs.table)})
        now = replace(now, **passed)
        injected = planned_injections(getattr(opened.model, "injections", ()), passed)
        used = len(used_tokens(opened.require_tokenizer(), texts)) if texts else None
        census = folder_census(checkpoint) if checkpoint.is_dir() else None
        unknown_head = opened.table_only != ""
        alternatives = plan_alternatives(now, used=used)
        _show_alternatives(now, injected, alternatives, census, unknown_head=unknown_head, as_json=as_json)
        return
    names: Sequence[str | None] = presets or ([None] if sized else list(PRESETS))
    plans = [plan_sizes(name, **passed) for name in names]
    if as_json:
        print_json([row.as_dict() for row in plans], indent=2)
    else:
        _show(*(_parts(plans[0]) if len(plans) == 1 else _comparison(plans)))
        if len(plans) == 1 and plans[0].tokens:
            click.echo()
            _show(*_operations(plans[0]))


def planned(
    table: "LookupTable", head: "OutputHead | PredictionHead | None", position: "Position | None", *, name: str
) -> EmbeddingPlan:
    """Return the plan of an existing table, head and position scheme."""
    from embedlayer.positions.learned import LearnedPositionalEmbedding
    from embedlayer.tables.delta import DeltaEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding
    from embedlayer.tables.packed_rows import PackedRows
    from embedlayer.tables.quantized import QuantizedEmbedding
    from embedlayer.tables.stored.mapped import MappedEmbedding

    base = table.base if isinstance(table, DeltaEmbedding) else table
    if isinstance(base, PackedRows):
        stored_type = base.dtype_name
    else:
        rows = base.source if isinstance(base, MappedEmbedding) else next(iter(base.state_dict().values()))
        stored_type = str(rows.dtype).removeprefix("torch.")
    dtype = PLAN_DTYPES.get(stored_type)
    if isinstance(base, QuantizedEmbedding):
        dtype = base.row_format.layout().type_name(base.row_format.bits)
    if dtype is None:
        raise CheckpointError(f"A table of {stored_type} cannot be planned. {INSTEAD}")
    parts: dict[str, Any] = {} if isinstance(base, QuantizedEmbedding) else {"table": base}
    if head is not None and not head.tied:
        output = getattr(head, "output", head)
        parts["head"] = output.weight if output.own_rows is None else output.own_rows
    is_head_alone = dtype not in FLOAT_DTYPES  # whose rows may have another type
    return EmbeddingPlan(
        base.num_rows,
        base.embed_dim,
        tied=head is None or head.tied,
        lookup_only=head is None,
        rank=base.rank if isinstance(base, FactorizedEmbedding) else None,
        positions=len(position.weight) if isinstance(position, LearnedPositionalEmbedding) else 0,
        dtype=dtype,
        group_size=base.group_size if isinstance(base, QuantizedEmbedding) else None,
        row_sparse=base.row_sparse,
        delta_rows=len(table.token_ids) if isinstance(table, DeltaEmbedding) else 0,
        row_sizes={
            part: _row_size(rows)
            for part, rows in parts.items()
            if isinstance(rows, PackedRows) or (part == "head" and is_head_alone)
        },
        name=name,
    )


def _row_size(rows: "PackedRows | Tensor") -> RowSize:
    """Return the format and size of the rows of a table of codes, or of a weight."""
    from torch import Tensor

    if isinstance(rows, Tensor):
        return RowSize(str(rows.dtype).removeprefix("torch."), rows[0].nbytes)
    return RowSize(rows.stored_type, rows.stored_rows.format.row_bytes)


def planned_injections(injections: "Iterable[nn.Module]", options: Mapping[str, Any]) -> list[EmbeddingPlan]:
    """Return the plan of each additional table of a decoder, named after its injection."""
    from embedlayer.inputs.ngram import NgramEmbedding
    from embedlayer.tables.lookup import LookupTable

    left_out = ("plain_loss", "delta_rows", "lookup_only", "tokens")
    applied = {name: value for name, value in options.items() if name not in left_out}
    plans = []
    for number, injection in enumerate(injections):
        rows = 1  # that a token looks up
        for module in injection.modules():
            if isinstance(module, NgramEmbedding):
                rows = module.hash.num_hashes
            if isinstance(module, LookupTable):
                name = f"{number}: {type(injection).__name__}"
                tokens = rows * options.get("tokens", 0)
                table = planned(module, None, None, name=name)
                plans.append(replace(table, tokens=tokens, **applied))
    return plans


def _show_alternatives(
    now: EmbeddingPlan,
    injected: list[EmbeddingPlan],
    changes: list[PlanAlternative],
    census: "CensusReport | None",
    *,
    unknown_head: bool,
    as_json: bool,
) -> None:
    """Print a plan, those of additional tables, what each alternative saves, and what follows the vocabulary."""
    if as_json:
        after = [{**one.plan.as_dict(), "saved_bytes": one.saved_bytes, "tradeoff": one.tradeoff} for one in changes]
        vocabulary = None if census is None else census.as_dict()
        first = {**now.as_dict(), "unknown_head": unknown_head, "vocabulary": vocabulary}
        print_json([first, *after, *(each.as_dict() for each in injected)], indent=2)
        return
    _show(*_parts(now, unknown_head=unknown_head))
    if unknown_head:
        click.echo("The head is not known: the table alone is planned.")
    click.echo()
    if injected:
        _show(*_additional(injected))
        click.echo()
    lines = [["as it is", format_bytes(now.peak_bytes), "", "", ""]]
    for each in changes:
        saved = ("-" if each.saved_bytes < 0 else "") + format_bytes(abs(each.saved_bytes))
        share = f"{100 * each.saved_bytes / now.peak_bytes:.0f} %"
        lines.append([each.change, format_bytes(each.plan.peak_bytes), saved, share, each.tradeoff])
    _show("what each change saves in a step", ["change", "peak", "saves", "", "trade-off"], lines, "")
    if census is not None:
        click.echo(f"\nwhat an edit of the vocabulary moves\n{census}")


def _parts(row: EmbeddingPlan, *, unknown_head: bool = False) -> Printed:
    """Return a table of all parts of one plan, with parameters and bytes: title, headings, lines, and note below."""
    head = "head not known" if unknown_head else "look-up only" if row.lookup_only else "tied" if row.tied else "untied"
    title = f"{row.name or 'plan'}: {_size(row)}, {head}, {row.dtype}"
    title += "" if row.rank is None else f", rank {row.rank}"
    title += ", row-sparse" if row.row_sparse else ""
    title += f", one of {row.vocab_parallel_size} ranks" if row.vocab_parallel_size > 1 else ""
    title += f", {row.replicas} replicas" if row.replicas > 1 else ""
    head = "the table" if row.tied else format_parameters(row.head_parameters)
    loss = "loss, by blocks" if row.loss_by_blocks else "loss, chunked" if row.loss_in_chunks else "loss, plain"
    of_several = row.vocab_parallel_size > 1
    parts = [
        ("table", format_parameters(row.table_parameters), row.table_bytes, True),
        ("head", head, row.head_bytes, not row.lookup_only),
        ("learned positions", format_parameters(row.position_parameters), row.position_bytes, True),
        ("per-layer inputs", format_parameters(row.per_layer_parameters), row.per_layer_bytes, row.per_layer_dim),
        (f"{row.delta_rows:,} trained rows", format_parameters(row.delta_parameters), row.delta_bytes, row.delta_rows),
        ("weights", format_parameters(row.parameters), row.weight_bytes, True),
        ("gradient", format_parameters(row.trained_parameters), row.gradient_bytes, True),
        (f"optimizer ({row.optimizer})", "", row.optimizer_bytes, True),
        (f"activations of {row.tokens:,} tokens", "", row.activation_bytes, True),
        (loss if row.trained or of_several else "logits", "", row.loss_bytes, not row.lookup_only),
        ("hidden states of all ranks, a chunk", "", row.gathered_bytes, row.gathered_bytes),
        ("peak of a step" if row.trained else "in all", "", row.peak_bytes, True),
        ("sent by a rank: look-up, on average", "", row.lookup_network_bytes, of_several),
        ("sent by a rank: loss", "", row.loss_network_bytes, row.loss_network_bytes),
        ("sent by a rank: gradients of replicas", "", row.replicas_network_bytes, row.replicas > 1),
        ("sent by a rank: unsharded gradients", "", row.replicated_network_bytes, row.replicated_network_bytes),
    ]
    lines = [[name, parameters, format_bytes(size)] for name, parameters, size, shown in parts if shown]
    return title, ["part", "parameters", "memory"], lines, _note([row])


def _operations(row: EmbeddingPlan) -> Printed:
    """Return a table of the operations of a step, forward and backward: title, headings, lines, and note below."""
    parts = [
        ("look-up", row.lookup_flops, row.lookup_backward_flops),
        ("projections", row.projection_flops, row.projection_backward_flops),
        ("product of the head", row.head_flops, row.head_backward_flops),
        ("all", row.forward_flops, row.backward_flops),
    ]
    lines = [[name, f"{forward / 1e9:,.1f}", f"{backward / 1e9:,.1f}"] for name, forward, backward in parts]
    title = f"operations of {row.tokens:,} tokens on one rank, in GFLOP"
    return title, ["part", "forward", "backward"], lines, "A multiplication with an addition is two."


def _additional(injected: list[EmbeddingPlan]) -> Printed:
    """Return a table with one line for each additional table of a model: title, headings, lines, and the note below."""
    lines = []
    for row in injected:
        training = row.gradient_bytes + row.optimizer_bytes
        sizes = [format_bytes(size) for size in (row.weight_bytes, training, row.peak_bytes)]
        lines.append([row.name, _size(row), format_parameters(row.parameters), *sizes])
    columns = ["injection", "rows", "parameters", "weights", "training", "peak"]
    return "additional tables, each planned alone", columns, lines, "They are not in the other sums."


def _comparison(plans: list[EmbeddingPlan]) -> Printed:
    """Return a table with one line for each plan: title, headings, lines, and the note below."""
    first = plans[0]
    loss = "plain" if first.plain_loss else "chunked"
    title = (
        f"{first.dtype}, {first.optimizer}, {first.tokens:,} tokens, {loss} loss; parameters in millions, memory in MiB"
    )
    lines = []
    for row in plans:
        sizes = (row.weight_bytes, row.gradient_bytes + row.optimizer_bytes, row.loss_bytes, row.peak_bytes)
        numbers = [row.parameters / 10**6, *(size / 2**20 for size in sizes)]
        shown = [f"{number:,.1f}" if number < 100 else f"{number:,.0f}" for number in numbers]
        lines.append([row.name, _size(row), "none" if row.lookup_only else "yes" if row.tied else "no", *shown])
    return title, ["model", "V x D", "tied", "params", "weights", "training", "loss", "peak"], lines, _note(plans)


def _note(plans: list[EmbeddingPlan]) -> str:
    """Return the note to print below the table of one or several plans, or `""` if there is none."""
    if plans[0].row_sizes:
        sizes = [f"{part} {size.format}, {size.nbytes:,} bytes a row" for part, size in plans[0].row_sizes.items()]
        return f"Stored rows are not trained: {'; '.join(sizes)}."
    if plans[0].quantised:
        scales = f", {format_bytes(plans[0].scale_bytes)}" if len(plans) == 1 else ""
        kind, numbers = "group" if plans[0].group_size else "row", "a step and an offset"
        if plans[0].dtype in GGUF_BLOCK:
            kind, numbers = "block of 32 numbers", "a scale"
        return f"{plans[0].dtype} rows are not trained; each {kind} has {numbers}{scales}."
    if len(plans) == 1 and plans[0].trained and plans[0].tokens and not plans[0].lookup_only:
        twice = "\n(a tied table has two)" if plans[0].tied and not plans[0].delta_rows else ""
        return f"The peak: weights, optimizer, activations, and the larger of loss and gradients{twice}."
    return ""


def _size(row: EmbeddingPlan) -> str:
    """Return the size of a plan's table as text, rows by columns, such as `50,257 x 768`."""
    return f"{row.vocab_size:,} x {row.embed_dim:,}"


def _show(title: str, columns: list[str], lines: list[list[str]], note: str) -> None:
    """Print a title, a table, and below it the note, if that is not empty."""
    click.echo(title)
    left = [place for place, column in enumerate(columns) if place == 0 or column == "trade-off"]
    print_table(make_console(), columns, lines, left=left, indent=0, widest=120)
    if note:
        click.echo(note)
