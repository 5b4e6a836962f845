"""Names of parameters in the unsharded model, under which checkpoints store them."""

from collections.abc import Iterator

from torch import nn

from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.distributed.sharded import ShardedTable


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Yield those of `unsharded_parameters` with `requires_grad`."""
    return (each for each in unsharded_parameters(model) if each[1].requires_grad)


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Yield (name, parameter, table) for each parameter of `model`.

    The name is that in the unsharded model. The table is the `ShardedTable` whose rows the parameter contains, or
    `None`.

    Raises:
        SizeError: DeepSpeed's ZeRO-3 has partitioned a parameter.
    """
    refuse_partitioned(model.named_parameters(), "is saved and shared between ranks", gathered=False)
    tables = list(sharded_tables(model))
    named = {
        parameter: ".".join(filter(None, (prefix, name)))
        for prefix, table in tables
        for name, parameter in table.local.named_parameters()
    }
    table_of = {parameter: table for _, table in tables for _, parameter in table.sharded_parameters()}
    for name, parameter in model.named_parameters():
        yield named.get(parameter, name), parameter, table_of.get(parameter)


def sharded_tables(model: nn.Module) -> Iterator[tuple[str, ShardedTable]]:
    """Yield (name, table) for each `ShardedTable` in `model`.

    The name is that of the module in the unsharded model: for the rows of an untied head, the name of the head.
    """
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            yield name.removesuffix(".rows"), module
