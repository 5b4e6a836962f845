"""A table with its rows sharded over processes: rank r stores rows `r * ceil(V / N)` to `(r + 1) * ceil(V / N) - 1`."""

import sys
from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.core.collectives import Collectives, RowPartition
from embedlayer.core.computed_buffers import recompute_all_buffers
from embedlayer.core.devices import HostCopy
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.partitioned import is_sharded, refuse_partitioned
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.integrations.dtensor import as_dtensor, rows_on
from embedlayer.io.files import JsonObject
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.losses.options import Impl, LogitOptions, LogitSettings, check_options
from embedlayer.losses.rows import check_dtypes
from embedlayer.losses.uncomputed_logits import (
    LinearLogits,
    UncomputedLogits,
    refuse_sharded_invariance,
)
from embedlayer.row_sparse.gradient import with_torch_functions
from embedlayer.tables.conversions import as_table
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.stored.mapped import MappedEmbedding
from embedlayer.tables.table import TokenTable, check_width

if TYPE_CHECKING:
    from embedlayer.integrations.dtensor import DTensor

ROW_TENSORS: dict[type[LookupTable], tuple[str, ...]] = {
    TokenEmbedding: ("weight",),
    RowSparseEmbedding: ("weight",),
    FactorizedEmbedding: ("inner.weight",),
    QuantizedEmbedding: ("packed", "row_scale"),
    MappedEmbedding: ("weight",),
}
"""The kinds of tables that can be sharded, and their tensors with one row per token."""

STATE = (
    "torch takes the moments of one rank's rows for those of all rows. Save and load model and optimizer with "
    "embedlayer.distributed.distributed_state(model, optimizer) and load_distributed_state. For the model alone "
    "get_model_state_dict is right."
)
FSDP1 = (
    "FullyShardedDataParallel would take the rows of this rank for the same on all ranks. Use fully_shard(model, "
    "ignored_params=embedlayer.distributed.sharded_parameters(model))."
)
AVERAGED = (
    "This would overwrite the rows of this rank by those of another one, or by a mean over rows of different tokens. "
    "Pass the parameters without embedlayer.distributed.sharded_parameters(model), and give those an optimizer of "
    "their own."
)
CHECKPOINT = (
    "This saves the rows of one rank alone. Save and load model and optimizer with "
    "embedlayer.distributed.distributed_state(model, optimizer) and load_distributed_state, and turn off the "
    "checkpoints of the trainer (save_strategy='no' in transformers, enable_checkpointing=False in Lightning)."
)
DDP = (
    "DistributedDataParallel would overwrite the rows of this rank by those of rank 0: wrap the model with "
    "embedlayer.distributed.distributed_data_parallel(model)."
)
REFUSED = {
    ("torch.nn.parallel.distributed", "__init__"): DDP,
    ("torch.distributed._composable.replicate", "_collect_params"): DDP,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): FSDP1,
    ("torch.distributed.optim.zero_redundancy_optimizer", "_verify_and_init_params"): AVERAGED,
    ("torch.distributed.algorithms.model_averaging.utils", "get_params_to_average"): AVERAGED,
    ("torch.distributed.algorithms.model_averaging.utils", "average_parameters"): AVERAGED,
    **{
        ("torch.distributed.checkpoint.state_dict", name): STATE
        for name in ("get_state_dict", "set_state_dict", "get_optimizer_state_dict", "set_optimizer_state_dict")
    },
}
"""Module and name of a function -> message of the `SizeError` that it gets if it asks for modules or parameters."""

PEFT_SAVE = ("peft.peft_model", "save_pretrained")
REFUSED_SAVES = dict.fromkeys(
    [
        PEFT_SAVE,
        ("transformers.trainer", "_save"),
        ("transformers.modeling_utils", "save_pretrained"),
        ("accelerate.accelerator", "get_state_dict"),
        ("lightning.pytorch.trainer.connectors.checkpoint_connector", "dump_checkpoint"),
        ("pytorch_lightning.trainer.connectors.checkpoint_connector", "dump_checkpoint"),
        ("safetensors.torch", "save_model"),
    ],
    CHECKPOINT,
)
"""The same for functions that ask for the state dict, and save that of one rank, or fail at it without a reason."""


class ShardedTable(TokenTable, checks_ids=True):
    """A table with its rows sharded over the ranks of a mesh; each rank passes its own IDs and hidden states.

    In a look-up a rank sends each distinct ID of its batch to the rank that stores the row, and receives the row. In
    the loss each rank multiplies the hidden states of all ranks, a chunk at a time, with its own rows, and three
    numbers per token are reduced over the ranks. Only `logits` sends logits.

    Gradients of the rows are means over the ranks, as in `DistributedDataParallel` and FSDP. So a batch that is split
    evenly over N ranks, with a mean loss on each, trains like one process.

    Every rank must take part in each look-up, loss and backward pass. `shard_table` creates a `ShardedTable` from a
    whole table; `distributed_data_parallel` wraps a model that contains one.

    Args:
        local: The rows of this rank, as a table. It may be a `MappedEmbedding` in a folder of this rank, which has the
            `RowPartition` of the ranks: `MappedEmbedding.create(folder, len(partition), embed_dim)`. Then there are no
            logits. In a checkpoint's block, exchange the numbers before rank 0 saves them, and let all ranks wait for
            it at the end (docs/large-tables.md).
        mesh: The ranks, a one-dimensional mesh.
        vocab_size: Number of tokens of all ranks, V.
        padding_idx: Padding token, or `None`.
        equal_loss_factors: Whether all ranks multiply a loss by one number before `backward`, as they do that call
            `loss.backward()`, divide by a number of accumulated batches or use a `GradScaler`. Then its backward pass
            does not wait for the device. If the numbers differ after all, the gradients are NaN. By default the ranks
            compare the numbers, and where they differ the gradients are computed again.

    Attributes:
        collectives: Collective operations of the ranks.
        partition: Which rows this rank stores.

    Raises:
        SizeError: The mesh is not one-dimensional, or a rank has no row.
        ShapeError: In a look-up or loss, if the rows were replaced by `fully_shard` or `load_state_dict(assign=True)`.
        PeerError: In a call that every rank must make, if another rank has ended or hangs.
    """

    is_collective = True

    def __init__(
        self,
        local: LookupTable,
        mesh: DeviceMesh,
        *,
        vocab_size: int,
        padding_idx: int | None = None,
        equal_loss_factors: bool = False,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab_size = self.num_rows = vocab_size
        self.collectives = collectives_of(mesh)
        self.collectives.partition(vocab_size)  # refuses a rank without rows at once
        self.embed_dim = local.embed_dim
        self.padding_idx = padding_idx
        self.equal_loss_factors = equal_loss_factors
        self.scale = local.scale
        self.row_sparse = local.row_sparse
        self.local = local
        self.index_check = IndexCheck(vocab_size, "token id")
        self.index_check.move_record(local.device)
        ranks = mesh.size()  # gradients are sums over the ranks, and become means
        for _, parameter in self.sharded_parameters():
            wanted = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(lambda grad: grad / ranks)
            parameter.register_post_accumulate_grad_hook(_take_gradient)
            parameter.requires_grad_(wanted)
            parameter.shard_group = self.collectives.group  # type: ignore[attr-defined]
        self._register_state_dict_hook(_save_rows)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_rows)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        """Copy the table with this rank's rows. As in the original, gradients of the rows are means over the ranks."""
        local = deepcopy(self.local, memo)
        copy = ShardedTable(
            local,
            self.mesh,
            vocab_size=self.vocab_size,
            padding_idx=self.padding_idx,
            equal_loss_factors=self.equal_loss_factors,
        )
        return copy.train(self.training)

    @property
    def config(self) -> JsonObject:
        """Return the constructor arguments of the whole, unsharded table."""
        return {**self.local.config, "vocab_size": self.vocab_size, "padding_idx": self.padding_idx}

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of this rank's rows, which is that of all ranks."""
        return as_table(self.local).dtype

    @property
    def factor(self) -> float | Tensor | None:
        """Return the factor that multiplies looked-up rows, or `None` for 1."""
        return self.local.factor

    @property
    def weight(self) -> Tensor:
        """Return this rank's rows: of a factorised table the inner rows.

        A quantised table, whose packed rows are no parameter, has no `weight`: an `AttributeError`.
        """
        return self.local.get_parameter(next(iter(ROW_TENSORS[type(self.local)])))

    @property
    def partition(self) -> RowPartition:
        """Return the `RowPartition` that says which rows this rank stores."""
        return self.collectives.partition(self.vocab_size)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield this table and its children, as `nn.Module.named_modules` does.

        Raises:
            SizeError: The caller is one of `REFUSED`.
        """
        self._refuse_callers()
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **options)
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children, as `nn.Module.named_children` does.

        Raises:
            SizeError: The caller is one of `REFUSED`.
        """
        self._refuse_callers()
        children: Iterator[tuple[str, nn.Module]] = super().named_children()
        return children

    def _refuse_callers(self) -> None:
        """Raise a `SizeError` in functions of torch that would take the rows of one rank for the same on all ranks."""
        caller = caller_among(REFUSED)
        if caller is not None and (self.refuses_ddp or REFUSED[caller] is not DDP):
            raise SizeError(REFUSED[caller])

    refuses_ddp = True
    """Whether `DistributedDataParallel` gets a `SizeError`; `distributed_data_parallel` hides the rows from it."""

    def _check_rows(self) -> None:
        """Raise a `ShapeError` unless the parameters with this rank's rows are those that `__init__` prepared."""
        for name, parameter in self.sharded_parameters():
            if not hasattr(parameter, "shard_group"):
                raise ShapeError(
                    f"The {name} of this sharded table was replaced: load without assign=True, and pass "
                    f"ignored_params=sharded_parameters(model) to fully_shard."
                )

    def sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the unsharded table, parameter) for each parameter with one row per token."""
        for name, parameter in self.local.named_parameters():
            if name in ROW_TENSORS[type(self.local)]:
                yield name, parameter

    def as_dtensor(self, part: Tensor) -> "DTensor":
        """Return a DTensor with the rows of all ranks, whose shard on this rank is `part`, without a copy.

        Args:
            part: A tensor with one row for each row that this rank stores.
        """
        return as_dtensor(part, self.mesh, self.vocab_size)

    def look_up(self, ids: Ids) -> Vectors:
        """Return the vectors of `ids` without `scale`, `(...)` to `(..., D)`; every rank must call it.

        Each distinct ID is sent once, to the rank that stores its row, and that rank sends the row back. On CUDA it
        waits once for the device, for the numbers of these IDs.

        Raises:
            ShapeError: The rows were replaced by others, as `fully_shard` does.
            TokenIdError: On the CPU, an ID is outside the table; see `LookupTable.look_up` for accelerators.
        """
        self._check_rows()
        group = self.collectives
        ids, outside = self.index_check(ids)
        ascending, order, places, counts = _distinct_ids(ids, self.partition)
        copied = HostCopy(torch.cat([counts, group.exchanged(counts)]))
        # Computed while the host waits: the distinct IDs, followed by undefined numbers, and the index of each ID.
        unique_ids = ascending.new_empty(len(ascending)).scatter_(0, places, ascending)
        inverse = order.new_empty(len(order)).scatter_(0, order, places).view(ids.shape)
        numbers: list[int] = copied.tolist()
        send_counts, receive_counts = numbers[: group.size], numbers[group.size :]
        requested = group.all_to_all(unique_ids[: sum(send_counts)], send_counts, receive_counts) - self.partition.start
        unused = requested.new_zeros(0 if len(requested) else 1)  # every rank must take part in the backward pass
        factors = self.local if isinstance(self.local, FactorizedEmbedding) else None
        own_rows = self.local if factors is None else factors.inner
        requested_rows = own_rows.look_up(torch.cat([requested, unused]))[: len(requested)]
        rows = group.all_to_all(requested_rows, receive_counts, send_counts)
        vectors = F.embedding(inverse, rows if factors is None else factors.projection(rows))
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Gather rows `start` to `stop - 1` from all ranks, without gradients.

        Every rank must call it with the same range.
        """
        with torch.no_grad():
            return self.collectives.all_gather(self.local.rows(*self.partition.overlap(start, stop)))

    @show_options(LogitOptions)
    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return the logits of this rank's hidden states over the tokens of all ranks; every rank must call it.

        Args:
            hidden: Output of the last block, `(..., D)`.
            **options: See `LogitOptions`.

        Raises:
            ShapeError: `hidden` has another width than the rows or, without `head_dtype` and autocast, another dtype;
                or the rows were replaced.
            SizeError: An option is unknown or outside its range, `batch_invariant` is one, or the rows are a
                `MappedEmbedding`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.logits")
        check_width(hidden, self.embed_dim)
        group, partition = self.collectives, self.partition
        counts = group.exchange_counts([hidden.shape[:-1].numel()] * group.size)
        scores = self._local_logits(hidden, counts, options)
        padded = F.pad(scores, (0, partition.rows_per_rank - scores.shape[1]))
        parts = group.all_to_all(padded, counts, [counts[group.rank]] * group.size)
        joined = parts.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)
        logits: Tensor = joined[:, : self.vocab_size].reshape(*hidden.shape[:-1], self.vocab_size)
        return logits

    @show_options(LogitOptions)
    def sharded_logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> "DTensor":
        """Return the logits of the hidden states of all ranks, as a DTensor sharded over the vocabulary.

        It has shape `(tokens of all ranks, V)`, in the order of the ranks, as torch's `loss_parallel` needs it. Under
        `loss_parallel`, `F.cross_entropy(logits, targets)` with the targets of all ranks is the mean loss over all
        tokens, the same on each rank. For parameters that every rank has, the mean of their gradients over the ranks is
        the right gradient, as `DistributedDataParallel` computes it. Every rank must call this method.

        Args:
            hidden: Output of the last block, `(..., D)`.
            **options: See `LogitOptions`.

        Raises:
            ShapeError: `hidden` has another width than the rows or, without `head_dtype` and autocast, another dtype;
                or the rows were replaced.
            SizeError: An option is unknown or outside its range, `batch_invariant` is one, or the rows are a
                `MappedEmbedding`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.sharded_logits")
        check_width(hidden, self.embed_dim)
        size = self.collectives.size
        scores = self._local_logits(hidden, None, options)
        if scores.requires_grad:  # DTensor sums the gradients of the ranks; here they become means
            scores.register_hook(lambda grad: grad * size)
        return as_dtensor(scores, self.mesh, self.vocab_size, dim=1)

    @show_options(LogitOptions)
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of this rank's hidden states over the rows of all ranks, without computing them.

        Every rank must call each loss, statistic or divergence of them, and `backward` through it. They are always
        computed in chunks of tokens. The backward pass of a loss computes the gradients again if the ranks multiply
        their losses by different numbers; on CUDA it waits for the device to know. Of a quantised table all rows of
        this rank are decoded at once, with `head_dtype` in this dtype. Hidden states are sent in their own dtype.

        Args:
            hidden: Hidden states of the last block, `(..., D)`.
            impl: Has no effect.
            **options: See `LogitOptions`.

        Raises:
            ShapeError: Shapes or dtypes do not fit each other, or the rows were replaced.
            SizeError: An option is unknown or outside its range, `batch_invariant` is one, or the rows are a
                `MappedEmbedding`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        self._check_rows()
        local, settings = as_table(self.local), LogitSettings(**options)
        refuse_sharded_invariance(settings)
        own = local.uncomputed_logits(hidden, padding_idx=None, head_dtype=settings.head_dtype)
        if isinstance(own, LinearLogits):
            rows = own.weight
        elif settings.head_dtype is None:
            rows = local.rows(0, local.vocab_size)
        else:
            rows = local.rows_as(0, local.vocab_size, settings.head_dtype)
        parts = own.hidden, rows, settings, self.collectives, self.partition
        return LinearLogits.sharded(*parts, equal_loss_factors=self.equal_loss_factors)

    def extra_repr(self) -> str:
        """Return which rows this rank stores, for `print`: `"rows 0 to 49 of 100"`."""
        return f"rows {self.partition.start} to {self.partition.stop - 1} of {self.vocab_size}"

    def _local_logits(self, hidden: Tensor, counts: list[int] | None, options: LogitOptions) -> Tensor:
        """Return the logits of the hidden states of all ranks over this rank's rows, `(tokens of all ranks, rows)`."""
        self._check_rows()
        options.setdefault("padding_idx", self.padding_idx)
        settings = LogitSettings(**options)
        refuse_sharded_invariance(settings)
        local = as_table(self.local)
        check_dtypes(hidden, local.dtype, settings.head_dtype)  # before the ranks wait for each other
        everyones = self.collectives.all_gather(hidden.reshape(-1, self.embed_dim), counts)
        return local.logits(everyones, **settings.of_rows(self.partition.start, self.partition.stop)._asdict())


def _distinct_ids(ids: Int[Tensor, "*batch"], partition: RowPartition) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sorted IDs, their order, the index of each among the distinct IDs, and how many each rank stores."""
    ascending, order = ids.flatten().long().sort()
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=is_first[1:])
    totals = F.pad(is_first.cumsum(0), (1, 0))  # [i]: how many distinct IDs the first i sorted ones are
    stops = torch.arange(1, partition.size + 1, device=ids.device) * partition.rows_per_rank
    counts = totals[torch.searchsorted(ascending, stops)].diff(prepend=totals[:1])
    return ascending, order, totals[1:] - 1, counts


def _take_gradient(parameter: Tensor) -> None:
    """Make the gradient of this rank's rows one that clipping and loss scaling take as that of all ranks, in place."""
    if parameter.grad is not None:
        with_torch_functions(parameter.grad, parameter)


def caller_among(functions: Collection[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the innermost caller that is one of `functions`, each the name of a module and of a function in it."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        name = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        if name in functions:
            return name
        frame = frame.f_back
    return None


def collectives_of(mesh: DeviceMesh) -> Collectives:
    """Return the collective operations of the ranks of a device mesh."""
    if mesh.ndim != 1:
        raise SizeError(f"A table is sharded along one dimension, and the mesh has {mesh.ndim}: pass mesh['name'].")
    return Collectives(mesh.get_group(), mesh.device_type)


def shard_table(
    table: TokenTable | nn.Embedding, mesh: DeviceMesh, *, equal_loss_factors: bool = False
) -> ShardedTable:
    """Shard the rows of `table`, which must be the same on every rank, over the ranks of `mesh`.

    For a table on the meta device each rank draws its own rows only. They equal the rows that one process would draw
    with the same seed.

    Args:
        table: A `TokenEmbedding`, `FactorizedEmbedding`, `QuantizedEmbedding` or `nn.Embedding`.
        mesh: The ranks, a one-dimensional mesh.
        equal_loss_factors: See `ShardedTable`.

    Returns:
        The table of this rank; it shares no memory with `table`.

    Raises:
        PeerError: A rank passes another kind of table, or one of another size or dtype.
        SizeError: The mesh is not one-dimensional, there are too few rows for its ranks, or `table` has no logits or is
            no table.
        TypeError: This kind of table cannot be sharded, or it is a quantised table on the meta device.

    Example:
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # doctest: +SKIP
        >>> table = shard_table(TokenEmbedding(50257, 768, device="meta"), mesh)  # doctest: +SKIP
    """
    refuse_partitioned(table.named_parameters(), "is sharded", gathered=False)
    table, group = as_table(table), collectives_of(mesh)
    types = {f"type of {name}": str(value.dtype) for name, value in table.state_dict().items()}
    facts = {"kind of table": type(table).__name__, **table.config, **types}
    group.require_equal(facts)
    partition = group.partition(table.vocab_size)
    local = shard_of(table, partition)
    for whole, part in zip(table.parameters(), local.parameters(), strict=True):
        part.requires_grad_(whole.requires_grad)
    return ShardedTable(
        local,
        mesh,
        vocab_size=table.vocab_size,
        padding_idx=table.padding_idx,
        equal_loss_factors=equal_loss_factors,
    )


def sharded_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of `model` that are sharded rows: each rank stores different rows in them.

    `fully_shard(model, ignored_params=sharded_parameters(model))` leaves them alone.
    """
    return {parameter for parameter in model.parameters() if hasattr(parameter, "shard_group")}


@torch.no_grad()
def shard_of(table: TokenTable, partition: RowPartition) -> TokenTable:
    """Return a new table of the same kind that contains only the rows of `partition`, with the dtype of `table`."""
    kind, rows, tensors = type(table), slice(partition.start, partition.stop), table.state_dict()
    if kind not in ROW_TENSORS:
        raise TypeError(f"A {kind.__name__} cannot be sharded, only {', '.join(one.__name__ for one in ROW_TENSORS)}.")
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
        if isinstance(module, DenseTable):
            module.first_row, module.whole_rows = partition.start, table.num_rows
        if like.is_meta and isinstance(module, (DenseTable, nn.Linear)):
            module.reset_parameters()
    if not like.is_meta:
        for name, tensor in part.state_dict().items():
            tensor.copy_(tensors[name][rows] if name in ROW_TENSORS[kind] else tensors[name])
    return part


def _save_rows(table: ShardedTable, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """State dict hook: name the entries of `table` as those of an unsharded table, and convert its rows to DTensors."""
    caller = caller_among(REFUSED_SAVES)
    if caller is not None and (caller != PEFT_SAVE or "modules_to_save" in prefix.split(".")):
        raise SizeError(REFUSED_SAVES[caller])
    inner = f"{prefix}local."
    for key in [key for key in state if key.startswith(inner)]:
        name, value = key.removeprefix(inner), state.pop(key)
        state[prefix + name] = table.as_dtensor(value) if name in ROW_TENSORS[type(table.local)] else value


def _load_rows(table: ShardedTable, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook: replace the entries of an unsharded table in `state` by those of `table`, with this rank's rows."""
    for name in table.local.state_dict():
        value = state.pop(prefix + name, None)
        if is_sharded(value):
            value = rows_on(table.mesh, value, prefix + name)
        elif value is not None and name in ROW_TENSORS[type(table.local)]:
            value = value[table.partition.start : table.partition.stop]
        if value is not None:
            state[f"{prefix}local.{name}"] = value


def trained_parameters(
    model: nn.Module, *, with_frozen: bool = False
) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Yield (name in the unsharded model, parameter, table) for each trained parameter of `model`."""
    refuse_partitioned(model.named_parameters(), "is saved and shared between ranks", gathered=False)
    tables = list(sharded_tables(model))
    named = {
        parameter: ".".join(filter(None, (prefix, name)))
        for prefix, table in tables
        for name, parameter in table.local.named_parameters()
    }
    table_of = {parameter: table for _, table in tables for _, parameter in table.sharded_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or with_frozen:
            yield named.get(parameter, name), parameter, table_of.get(parameter)


def sharded_tables(model: nn.Module) -> Iterator[tuple[str, ShardedTable]]:
    """Yield (name, table) for each `ShardedTable` in `model`."""
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            yield name.removesuffix(".rows"), module
