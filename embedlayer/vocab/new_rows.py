"""Train the rows of a few tokens and nothing else, at both ends of a live module."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.errors import SizeError
from embedlayer.layers.output import OutputHead
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.live import ends_of
from embedlayer.vocab.starting_rows import NewRows, NewToken, Origin, Rows, StartingRows, Vectors


@dataclass(frozen=True)
class TrainedRows(StartingRows):
    """Rows that were trained already, `(k, D)`, and what they started as: a live module's, for a folder of the same.

    Args:
        values: The rows.
        start: What they were before their training.
    """

    values: Float[Tensor, "k D"]
    start: StartingRows

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The trained rows."""
        begun, done = self.start.rows(old, tokens, generator).origins, 0
        for given in Vectors(self.values).blocks(old, tokens):
            starts, done = begun[done : done + len(given.values)], done + len(given.values)
            yield NewRows(given.values, tuple(Origin(f"trained from {each.start}", each.rows) for each in starts))


_BEFORE = "_trained_before_its_rows"


def train_only_rows(module: nn.Module, token_ids: Iterable[int]) -> None:
    """Let only the rows of these tokens learn: each table becomes a `DeltaEmbedding`, everything else is frozen.

    A tied head reads its table's rows; an untied head gets such rows of its own. Build the optimizer afterwards. What the
    module does with all other tokens stays the same to the bit. `merge_rows` writes the rows back.

    Args:
        module: A layer or model with dense tables.
        token_ids: The tokens, each once.

    Raises:
        SizeError: The module is a table itself, or has one that does not store its rows one by one; or as for
            `DeltaEmbedding`. Nothing was changed.

    Example:
        >>> train_only_rows(model, [7, 9])
        >>> [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        [('table.delta', (2, 16))]
        >>> merge_rows(model)
    """
    ends = ends_of(module)
    if isinstance(module, TokenTable):
        raise SizeError("This is the table itself: make DeltaEmbedding(table, token_ids) of it.")
    weights = {id(part.stored.weight) for part in ends.parts.values()}
    if len(weights) < len(ends.parts):
        raise SizeError(
            f"{', '.join(ends.tables)} share one weight, as in an encoder-decoder: rows that learn by themselves would "
            f"be other ones in each. Train the whole weight."
        )
    ids = list(token_ids)
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        made = {id(table): (table, DeltaEmbedding(_dense(name, table), ids)) for name, table in ends.tables.items()}
        heads = {name: DeltaEmbedding(_rows_of(head), ids) for name, head in ends.heads.items() if not head.tied}
    except Exception:
        for parameter in learned:
            parameter.requires_grad_(True)
        raise
    module.requires_grad_(False)
    module.__dict__[_BEFORE] = learned
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if id(child) in made:
                part._modules[name] = made[id(child)][1]
    for name, head in ends.heads.items():
        table = head.__dict__["table"]
        if name not in heads and table is None:
            continue  # a patched head reads what is in the place of its table
        rows = heads[name] if name in heads else made[id(table)][1]
        head.__dict__["table"] = rows
        if name in heads:
            head.add_module("new_rows", rows)  # so that its rows are found among the parameters
    for rows in [*heads.values(), *(delta for _, delta in made.values())]:
        rows.delta.requires_grad_(True)


def merge_rows(module: nn.Module) -> None:
    """Write what `train_only_rows` let learn into the tables and heads, and let everything learn that did before.

    Raises:
        SizeError: `train_only_rows` was not called on this module.
    """
    learned = module.__dict__.pop(_BEFORE, None)
    if learned is None:
        raise SizeError("No rows of this module learn by themselves: call train_only_rows first.")
    for head in [part for part in module.modules() if isinstance(part, OutputHead)]:
        rows = head.__dict__["table"]
        if isinstance(rows, DeltaEmbedding):
            head.__dict__["table"] = None if "new_rows" in head._modules else rows.base
            if head._modules.pop("new_rows", None) is not None:
                rows.merge()
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if isinstance(child, DeltaEmbedding):
                part._modules[name] = child.merge()
    for parameter in learned:
        parameter.requires_grad_(True)


def _dense(name: str, table: TokenTable) -> TokenEmbedding:
    if not isinstance(table, TokenEmbedding):
        raise SizeError(
            f"{name} is a {type(table).__name__}, which does not store each row by itself: its new rows cannot learn "
            f"without the others. Train the whole table."
        )
    return table


def _rows_of(head: OutputHead) -> TokenEmbedding:
    """The rows of an untied head as a table, over the same parameter."""
    table = TokenEmbedding(head.out_features, head.in_features, padding_idx=head.padding_idx, device="meta")
    table.weight = head.weight
    table.index_check.move_record(head.weight.device)
    return table
