"""Training of the rows of a few codes of one stream: the tables and heads that have them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from embedlayer.census.tensors import models_in
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.heads.output import OutputHead
from embedlayer.heads.streams import StackedRows, StreamHead
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import require_stream
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.targets.module_parts import dotted
from embedlayer.vocab.targets.stream_layers import codes_in, heads_of
from embedlayer.vocab.targets.stream_models import streams_of_model
from embedlayer.vocab.targets.stream_rows import StreamRows


class TrainedParts(NamedTuple):
    """The tables and heads whose rows are trained, by name in the module, each with the numbers of these rows.

    Attributes:
        tables: The tables.
        heads: The heads; a tied one has no rows of its own.
        restore: Functions that merge trained rows and put back the modules in whose place others were put.
    """

    tables: dict[str, tuple[TokenTable, list[int]]]
    heads: dict[str, tuple[OutputHead, list[int]]]
    restore: list[Callable[[], object]]


def parts_of_stream(module: nn.Module, stream: int, token_ids: Sequence[int]) -> TrainedParts:
    """Return the tables and heads with the rows of some codes of one stream.

    In a model of transformers, tables and heads of this library over the same weights take the place of its modules; in
    a layer, K heads over views take that of a weight of stacked rows. `restore` reverts both.

    Raises:
        SizeError: There are no streams, several sets of them or no such stream; or a module of transformers reads the
            rows in a way of its own.
        TokenIdError: A code is outside the stream.
    """
    for name, model in models_in(module).items():
        if (streams := streams_of_model(model)) is not None:
            require_stream(stream, len(streams.sizes))
            check_codes(token_ids, streams.sizes[stream])
            return _parts_of_model(name, model, streams.rows, stream, token_ids)
    return _parts_of_layer(module, stream, token_ids)


def check_codes(codes: Sequence[int], size: int) -> None:
    """Check that codes are those of a stream of so many."""
    if outside := [code for code in codes if not 0 <= code < size]:
        raise TokenIdError(f"Code {outside[0]} is outside this stream of {size} codes (0..{size - 1}).")


def _parts_of_layer(module: nn.Module, stream: int, token_ids: Sequence[int]) -> TrainedParts:
    """Return the parts of a layer or table of this library; see `parts_of_stream`."""
    name, table_name, codes = codes_in(module)
    start = codes.table.stream(stream).start
    check_codes(token_ids, codes.table.sizes[stream])
    parts = TrainedParts({dotted(table_name, "rows"): (codes.rows, [start + each for each in token_ids])}, {}, [])
    for head_name, head, first in heads_of(name, codes):
        at = stream - first
        if head.tied:
            outputs = [(key, each) for key, each in head.named_modules() if isinstance(each, OutputHead)]
            parts.heads.update({dotted(head_name, key): (each, []) for key, each in outputs})
        elif 0 <= at < head.num_streams and (own := [each for each in token_ids if each < head.sizes[at]]):
            if isinstance(head.output, StackedRows):
                parts.restore.append(_unstack(head))
            first_row = 0 if head.first_rows is None else head.first_rows[at]
            key = "output" if isinstance(head.output, OutputHead) else f"output.{at}"
            output = cast(OutputHead, head.get_submodule(key))
            parts.heads[dotted(head_name, key)] = output, [first_row + each for each in own]
    return parts


def _unstack(head: StreamHead) -> Callable[[], object]:
    """Put K heads over views of a stacked weight in its place; the returned function merges rows and reverts it."""
    stack = head.output
    assert isinstance(stack, StackedRows)
    weights = [each.mT if stack.transposed else each for each in stack.weight.detach().unbind()]
    outputs = [_head_of(nn.Parameter(weight, requires_grad=False)) for weight in weights]
    head.output = nn.ModuleList(outputs)

    def restore() -> None:
        for output in outputs:
            _merge(output)
        head.output = stack

    return restore


def _head_of(weight: Tensor) -> OutputHead:
    """Return an untied head with a weight."""
    head = OutputHead(weight.shape[1], weight.shape[0], device="meta")
    head.weight = weight
    return head


def _merge(module: nn.Module | None) -> None:
    """Merge the rows of a table or untied head that were trained separately, if there are any."""
    rows = module.own_table if isinstance(module, OutputHead) else module
    if isinstance(rows, DeltaEmbedding):
        rows.merge()


def _parts_of_model(
    prefix: str, model: Any, rows: Sequence[StreamRows], stream: int, token_ids: Sequence[int]
) -> TrainedParts:
    """Return the parts of a model of transformers, in which tables and heads of this library take their places."""
    parts, places = TrainedParts({}, {}, []), _places(model)
    own = [part for part in rows if stream in part.streams]
    for part in own:
        for _, _, child in places[id(part.tensor)]:
            if not isinstance(child, nn.Embedding | nn.Linear):
                raise SizeError(
                    f"{part.name} is read by {a_or_an(child)} in a way of its own: train the rows of its "
                    f"layer, el.load(folder), and write them back with layer.write_into."
                )
    for part in own:
        ids = [part.first_row(stream) + each for each in token_ids]
        table: TokenEmbedding | None = None
        for name, parent, child in sorted(places[id(part.tensor)], key=lambda place: isinstance(place[2], nn.Linear)):
            key, full_name = name.rpartition(".")[2], dotted(prefix, name)
            if isinstance(child, nn.Embedding):
                table = TokenEmbedding.from_embedding(child) if table is None else table
                parts.tables[full_name] = table, ids
                parent._modules[key] = table
            elif isinstance(child, nn.Linear):
                head = _head_of(child.weight) if table is None else OutputHead(table)
                parts.heads[full_name] = head, ids if table is None else []
                parent._modules[key] = head
            parts.restore.append(partial(_put_back, parent, key, child))
    return parts


def _places(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, nn.Module]]]:
    """Return name, parent and module of each place of a parameter `weight`, by its `id`."""
    places: dict[int, list[tuple[str, nn.Module, nn.Module]]] = {}
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            if (weight := child._parameters.get("weight")) is not None:
                places.setdefault(id(weight), []).append((dotted(name, key), parent, child))
    return places


def _put_back(parent: nn.Module, key: str, child: nn.Module) -> None:
    """Merge the trained rows of what is in the place of a module, and put the module back."""
    _merge(parent._modules[key])
    parent._modules[key] = child
