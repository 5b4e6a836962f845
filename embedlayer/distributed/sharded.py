"""A table with its rows sharded over processes: rank r stores rows `r * ceil(V / N)` to `(r + 1) * ceil(V / N) - 1`."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from embedlayer.collectives import ProcessGroup, RowPartition
from embedlayer.computed_buffers import recompute_all_buffers
from embedlayer.errors import ShapeError, SizeError
from embedlayer.index_checks import IndexCheck
from embedlayer.io.files import JsonObject
from embedlayer.losses.chunked import chunked_cross_entropy
from embedlayer.losses.cross_entropy import (
    LogitOptions,
    LossOptions,
    check_options,
    check_shapes,
    fill_in_defaults,
    finish_logits,
    options_of_rows,
)
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import TokenEmbedding, as_table
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable, check_width

ROW_TENSORS: dict[type[TokenTable], tuple[str, ...]] = {
    TokenEmbedding: ("weight",),
    FactorizedEmbedding: ("inner.weight",),
    QuantizedEmbedding: ("packed", "row_scale"),
}
"""The kinds of tables that can be sharded, and their tensors with one row per token."""


class ShardedTable(TokenTable):
    """A table with its rows sharded over the ranks of a mesh; each rank passes its own IDs and hidden states.

    A look-up sends each ID of this rank's batch once, to the rank that stores its row, and receives the row. The loss
    multiplies the hidden states of all ranks, a chunk at a time, with the rows of this rank, and reduces three numbers
    per token over the ranks. Only `logits` gathers logits.

    Gradients of the rows are means over the ranks, as in `DistributedDataParallel` and FSDP: a batch split evenly over
    N ranks, with a mean loss on each, trains like one process.

    Every rank must take part in each look-up, loss and backward pass. `shard_table` creates a `ShardedTable` from a
    whole table; `distributed_data_parallel` wraps a model that contains one.

    Args:
        local: The rows of this rank, as a table.
        mesh: The ranks, a one-dimensional mesh.
        vocab_size: Number of tokens of all ranks, V.
        padding_idx: Token whose row is zero, or `None`.

    Attributes:
        collectives: Collective operations of the ranks.
        partition: Which rows this rank stores.

    Raises:
        SizeError: The mesh is not one-dimensional, or a rank has no row.
        ShapeError: In a look-up or loss, if the rows were replaced by `fully_shard` or `load_state_dict(assign=True)`.
    """

    def __init__(self, local: TokenTable, mesh: DeviceMesh, *, vocab_size: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab_size = self.num_rows = vocab_size
        self.collectives = collectives_of(mesh)
        self.collectives.partition(vocab_size)  # refuses a rank without rows at once
        self.embed_dim = local.embed_dim
        self.padding_idx = padding_idx
        self.scale = local.scale
        self.row_sparse = local.row_sparse
        self.local = local
        self.index_check = IndexCheck(vocab_size, "token id")
        self.index_check.move_record(local.device)
        self._mark_rows()
        self._register_state_dict_hook(_rows_as_dtensors)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_rows_from_dtensors)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        """Copy the table on every rank; the gradients of the copy are means over the ranks too."""
        local = deepcopy(self.local, memo)
        copy = ShardedTable(local, self.mesh, vocab_size=self.vocab_size, padding_idx=self.padding_idx)
        return copy.train(self.training)

    @property
    def config(self) -> JsonObject:
        """Return the constructor arguments of the whole table."""
        return {**self.local.config, "vocab_size": self.vocab_size, "padding_idx": self.padding_idx}

    @property
    def factor(self) -> float | Tensor | None:
        """Return the factor that multiplies looked-up rows, or `None` for 1."""
        return self.local.factor

    @property
    def weight(self) -> Tensor:
        """Return the rows of this rank."""
        return self.local.get_parameter(next(iter(ROW_TENSORS[type(self.local)])))

    @property
    def partition(self) -> RowPartition:
        """Return which rows this rank stores."""
        return self.collectives.partition(self.vocab_size)

    def _mark_rows(self) -> None:
        """Turn gradients of the rows into means over the ranks, and mark the rows as sharded by `shard_group`."""
        ranks = self.mesh.size()
        for _, parameter in self.sharded_parameters():
            wanted = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(lambda grad: grad / ranks)
            parameter.requires_grad_(wanted)
            parameter.shard_group = self.collectives.group  # type: ignore[attr-defined]

    def _check_rows(self) -> None:
        """Check that the rows are still the parameters that `_mark_rows` marked.

        Raises:
            ShapeError: Another parameter has replaced one of them.
        """
        for name, parameter in self.sharded_parameters():
            if not hasattr(parameter, "shard_group"):
                raise ShapeError(
                    f"The {name} of this sharded table was replaced after it was created: its gradients would be sums, "
                    f"and after fully_shard its rows those of other ranks. Pass "
                    f"ignored_params=sharded_parameters(model) to fully_shard, load without assign=True, or shard the "
                    f"table again."
                )

    def sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with sharded rows, and their names in the whole table."""
        for name, parameter in self.local.named_parameters():
            if name in ROW_TENSORS[type(self.local)]:
                yield name, parameter

    def as_dtensor(self, part: Tensor) -> DTensor:
        """Wrap this rank's rows of a per-token tensor as a DTensor of the rows of all ranks, without a copy."""
        shape, stride = torch.Size((self.vocab_size, *part.shape[1:])), part.stride()
        return DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def look_up(self, ids: Ids) -> Vectors:
        """Return `rows[ids]` from the ranks that store them: each ID and row of the batch is sent once."""
        self._check_rows()
        group = self.collectives
        ids, outside = self.index_check(ids)
        unique_ids, inverse = torch.unique(ids, return_inverse=True)
        send_counts = torch.bincount(self.partition.rank_of(unique_ids), minlength=group.size).tolist()
        receive_counts = group.exchange_counts(send_counts)
        requested = group.all_to_all(unique_ids, send_counts, receive_counts) - self.partition.start
        unused = requested.new_zeros(0 if len(requested) else 1)  # every rank must take part in the backward pass
        factors = self.local if isinstance(self.local, FactorizedEmbedding) else None
        stored = self.local if factors is None else factors.inner
        found = stored.look_up(torch.cat([requested, unused]))[: len(requested)]
        rows = group.all_to_all(found, receive_counts, send_counts)
        vectors = F.embedding(inverse, rows if factors is None else factors.projection(rows))
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """All-gather rows `start` to `stop - 1`, without gradients; every rank must call it."""
        with torch.no_grad():
            return self.collectives.all_gather(self.local.rows(*self.partition.overlap(start, stop)))

    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return the logits of this rank's hidden states over all tokens, gathered from all ranks."""
        check_width(hidden, self.embed_dim)
        group, partition = self.collectives, self.partition
        counts = group.exchange_counts([hidden.shape[:-1].numel()] * group.size)
        scores = self._local_logits(hidden, counts, options)
        padded = F.pad(scores, (0, partition.rows_per_rank - scores.shape[1]))
        parts = group.all_to_all(padded, counts, [counts[group.rank]] * group.size)
        joined = parts.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)
        logits: Tensor = joined[:, : self.vocab_size].reshape(*hidden.shape[:-1], self.vocab_size)
        return logits

    def sharded_logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> DTensor:
        """Return the logits of all ranks' hidden states, `(tokens of all, V)`, sharded over V as `loss_parallel` wants.

        Under `loss_parallel`, `F.cross_entropy(logits, targets)` with the targets of all ranks, in order, is the mean
        over all tokens, the same on each rank, for any V. It is the mean over the ranks of `loss`, with the same
        gradients; what each rank computes from them becomes right as a mean too.
        """
        check_width(hidden, self.embed_dim)
        size = self.collectives.size
        scores = self._local_logits(hidden, None, options)
        if scores.requires_grad:  # DTensor sums the gradients of the ranks; here they become means
            scores.register_hook(lambda grad: grad * size)
        shape, stride = torch.Size((len(scores), self.vocab_size)), (self.vocab_size, 1)
        return DTensor.from_local(scores, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Compute `linear_cross_entropy` of this rank's hidden states and targets over the rows of all ranks, in nats.

        The loss is always computed in chunks. Its gradients are computed in the forward pass, and again in the backward
        pass if the ranks multiply their losses by different numbers. Quantised rows of this rank are decoded at once.

        Args:
            hidden: Hidden states of the last block, `(..., D)`.
            targets: Token IDs `(...)`, or `ignore_index`.
            **options: See `LossOptions`; `impl` has no effect.

        Returns:
            The loss of this rank's tokens: a scalar, or `(...)` with `reduction="none"`.

        Raises:
            TokenIdError: A target is neither a token nor `ignore_index`.
            ShapeError: Shapes or dtypes do not fit each other, or the rows were replaced.
        """
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        check_options(options)
        self._check_rows()
        linear = self.local.as_linear(hidden)
        states, rows = (hidden, self.local.rows(0, self.local.vocab_size)) if linear is None else linear
        check_shapes(states, rows, targets)
        bias = options.get("bias")
        settings = fill_in_defaults(states, rows, {**options, "vocab_size": self.vocab_size})
        return chunked_cross_entropy(
            states,
            rows,
            None if bias is None else bias[self.partition.start : self.partition.stop],
            targets,
            settings._replace(padding_idx=self.partition.local_or_none(settings.padding_idx)),
            self.collectives,
            self.partition,
        )

    def extra_repr(self) -> str:
        """Return the rows of this rank, for `print`."""
        return f"rows {self.partition.start} to {self.partition.stop - 1} of {self.vocab_size}"

    def _local_logits(self, hidden: Tensor, counts: list[int] | None, options: LogitOptions) -> Tensor:
        """Return the logits of all ranks' hidden states over this rank's rows, `(tokens of all, rows)`."""
        self._check_rows()
        options.setdefault("padding_idx", self.padding_idx)
        everyones = self.collectives.all_gather(hidden.reshape(-1, self.embed_dim), counts)
        start, stop = self.partition.start, self.partition.stop
        return finish_logits(self.local.raw_logits(everyones), **options_of_rows(options, start, stop))


def collectives_of(mesh: DeviceMesh) -> ProcessGroup:
    """Return the collective operations of a one-dimensional mesh.

    Raises:
        SizeError: The mesh has several dimensions.
    """
    if mesh.ndim != 1:
        raise SizeError(f"A table is sharded along one dimension, and the mesh has {mesh.ndim}: pass mesh['name'].")
    return ProcessGroup(mesh.get_group(), mesh.device_type)


def shard_table(table: TokenTable | nn.Embedding, mesh: DeviceMesh) -> ShardedTable:
    """Shard the rows of `table`, which must be the same on every rank, over the ranks of `mesh`.

    For a table on the meta device each rank draws its own rows only. They equal the rows that one process would draw
    with the same seed.

    Args:
        table: A `TokenEmbedding`, `FactorizedEmbedding`, `QuantizedEmbedding` or `nn.Embedding`.
        mesh: The ranks, a one-dimensional mesh.

    Returns:
        The table of this rank; it shares no memory with `table`.

    Raises:
        PeerError: A rank passes another kind of table, or one of another size or dtype.
        SizeError: The mesh is not one-dimensional, or there are too few rows for its ranks.
        TypeError: This kind of table cannot be sharded, or it is a quantised table on the meta device.

    Example:
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # doctest: +SKIP
        >>> table = shard_table(TokenEmbedding(50257, 768, device="meta"), mesh)  # doctest: +SKIP
    """
    table, group = as_table(table), collectives_of(mesh)
    types = {f"type of {name}": str(value.dtype) for name, value in table.state_dict().items()}
    facts = {"kind of table": type(table).__name__, **table.config, **types}
    group.require_equal(facts)
    partition = group.partition(table.vocab_size)
    local = shard_of(table, partition)
    for whole, part in zip(table.parameters(), local.parameters(), strict=True):
        part.requires_grad_(whole.requires_grad)
    return ShardedTable(local, mesh, vocab_size=table.vocab_size, padding_idx=table.padding_idx)


def sharded_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of `model` of which each rank stores its own rows.

    `fully_shard(model, ignored_params=sharded_parameters(model))` leaves them alone.
    """
    return {parameter for parameter in model.parameters() if hasattr(parameter, "shard_group")}


@torch.no_grad()
def shard_of(table: TokenTable, partition: RowPartition) -> TokenTable:
    """Return a table of the same kind with the rows of a partition, copied, or drawn for a table on the meta device.

    The dtype and the device are those of `table`; rows are drawn on the CPU.

    Raises:
        TypeError: This kind of table cannot be sharded, or it is a quantised table on the meta device.
    """
    kind, rows, tensors = type(table), slice(partition.start, partition.stop), table.state_dict()
    if kind not in ROW_TENSORS:
        raise TypeError(
            f"A {kind.__name__} cannot be sharded: pass one of {', '.join(known.__name__ for known in ROW_TENSORS)}."
        )
    like = tensors[ROW_TENSORS[kind][0]]
    if like.is_meta and kind is QuantizedEmbedding:
        raise TypeError("A quantised table cannot be drawn: pass the result of QuantizedEmbedding.from_table.")
    config = {**table.config, "vocab_size": len(partition), "padding_idx": partition.local_or_none(table.padding_idx)}
    config.pop("pad_to_multiple_of", None)
    with torch.device("meta"):
        part = kind.from_config(config)
    if like.is_floating_point():
        part.to(like.dtype)
    device = torch.device("cpu") if like.is_meta else like.device
    part.to_empty(device=device)
    recompute_all_buffers(part, device)
    for module in part.modules():
        if isinstance(module, TokenEmbedding):
            module.first_row, module.whole_rows = partition.start, table.num_rows
        if like.is_meta and isinstance(module, (TokenEmbedding, nn.Linear)):
            module.reset_parameters()
    if not like.is_meta:
        for name, tensor in part.state_dict().items():
            tensor.copy_(tensors[name][rows] if name in ROW_TENSORS[kind] else tensors[name])
    return part


def _rows_as_dtensors(table: ShardedTable, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """Give the entries of a state dict the names of an unsharded table, and return sharded rows as DTensors."""
    inner = f"{prefix}local."
    for key in [key for key in state if key.startswith(inner)]:
        name, value = key.removeprefix(inner), state.pop(key)
        state[prefix + name] = table.as_dtensor(value) if name in ROW_TENSORS[type(table.local)] else value


def _rows_from_dtensors(table: ShardedTable, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace each tensor of the table in `state` by the rows of this rank, before `load_state_dict` reads it.

    An entry may be a DTensor, as `ShardedTable.state_dict()` returns it, or the whole tensor of an unsharded
    table.
    """
    for name in table.local.state_dict():
        value = state.pop(prefix + name, None)
        if isinstance(value, DTensor):
            value = value.redistribute(table.mesh, [Shard(0)]).to_local()
        elif value is not None and name in ROW_TENSORS[type(table.local)]:
            value = value[table.partition.start : table.partition.stop]
        if value is not None:
            state[f"{prefix}local.{name}"] = value
