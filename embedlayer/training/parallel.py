"""Train one `DecoderLM` on one process or many: sharded tables, averaged gradients, and files of whole tensors.

Each rank takes its share of every batch. `DistributedDataParallel` averages the gradients of the parameters that all
ranks have, `ShardedTable` those of sharded rows. The mean loss of a rank is weighted by its share of the batch, so a
step equals that of one process, also where the shares differ.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from embedlayer.core.collectives import SINGLE_PROCESS
from embedlayer.core.errors import SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.data.windows import derive_seed, items_of_rank
from embedlayer.distributed.data_parallel import (
    VOCAB_PARALLEL,
    average_over_replicas,
    data_parallel_mesh,
    distributed_data_parallel,
)
from embedlayer.distributed.launch import Launch, launched_processes
from embedlayer.distributed.sharded import ROW_TENSORS, ShardedTable, shard_table, sharded_tables, trained_parameters
from embedlayer.distributed.sharded_file import load_sharded, save_sharded
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import build_head
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.models.causal import PatchedDecoder
from embedlayer.models.decoder import DecoderLM
from embedlayer.saving import build, building, describe, require_loadable
from embedlayer.tables.conversions import as_table
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable

NOT_BY_ROWS = ("step", "history")
HEAD_OPTIONS = ("bias", "softcap", "logit_scale", "mask_padding", "head_dtype", "batch_invariant")


class ParallelContext:
    """The processes that train one model together, and the operations between them; by default a single process.

    Args:
        launch: The processes that torchrun started, from `launched_processes`; `None` for a single process. Their
            process group must accept CPU tensors: gloo, or `"cpu:gloo,cuda:nccl"`.
        vocab_parallel_size: Number of ranks over which the rows of a table are sharded; `None` for all.

    Attributes:
        collectives: Collective operations of the processes.
        device: Device of this process as the launch states it; a single process may train on another one.
        rank: Number of this process, from 0.
        size: Number of processes.
        is_first: Whether this is rank 0, which writes files and prints.
        launch_id: Names of the launchers of all ranks, separated by spaces; empty for the single process.
    """

    def __init__(self, launch: Launch | None = None, *, vocab_parallel_size: int | None = None) -> None:
        launch = Launch() if launch is None else launch
        self.collectives, self.device, self._store, self.launch_id = launch
        self.rank, self.size = self.collectives.rank, self.collectives.size
        self.is_first = self.collectives.is_first
        self._config: JsonObject = {}
        self._sharded: dict[str, tuple[ShardedTable, int]] = {}
        self._ddp: DistributedDataParallel | None = None
        self._wrapped = WeakSet[DistributedDataParallel]()
        self._mesh: DeviceMesh | None = None
        if self.collectives is not SINGLE_PROCESS:
            self._mesh = data_parallel_mesh(self.device.type, self.size, vocab_parallel_size)
        elif vocab_parallel_size not in (None, 1):
            raise SizeError(f"One process cannot shard over {vocab_parallel_size}: start several with torchrun.")

    def share(self, count: int) -> range:
        """Return which of the items `0..count - 1` this rank processes.

        Consecutive items go to the same rank. The numbers of items of two ranks differ by at most one.

        Example:
            >>> ParallelContext().share(3)
            range(0, 3)
        """
        return items_of_rank(count, self.rank, self.size)

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks (all-reduce), as a new tensor. All ranks must call it.

        Args:
            numbers: This rank's summand, with the same shape on every rank.
        """
        return self.collectives.all_reduce(numbers.clone())

    def wait_for_first(self) -> None:
        """Wait until rank 0 calls this method too, for any length of time. All ranks must call it, once.

        torchrun ends the waiting processes if rank 0 or its machine dies. A single process does not wait.

        Raises:
            PeerError: The key-value store of the ranks cannot be reached.
        """
        if self._store is None:
            return
        with self.collectives.peer_errors():
            if self.is_first:
                self._store.set("embedlayer/prepared", "")
            while not self._store.check(["embedlayer/prepared"]):
                time.sleep(0.2)

    def seed(self, seed: int, step: int) -> None:
        """Seed torch's random generator from `seed`, `step` and this rank, so that the ranks' dropout masks differ.

        A single process keeps its generator unchanged.
        """
        if self._mesh is not None:
            torch.manual_seed(derive_seed(seed, step, self.rank))

    def build(self, config: JsonObject, device: torch.device | str) -> DecoderLM:
        """Build a model with freshly drawn weights.

        With several processes, the model is sharded: each rank draws and stores only its own rows.

        Args:
            config: Description of the model, from `describe(model)`.
            device: Device of the model. It is ignored with several processes, which use the device of their launch.

        Raises:
            CheckpointError: The description is damaged.
            FileError: A file that it names is missing or cannot be read.
        """
        if self._mesh is None:
            model: DecoderLM = build(config)
            return model.to(device)
        arguments = {name: value for name, value in config.items() if name != "kind"}
        self._config = config
        with building(LookupTable, self._draw_table):
            return DecoderLM.from_config(arguments, make_head=self._draw_head).to(self.device)

    def shard(self, model: DecoderLM | PatchedDecoder) -> None:
        """Shard the rows of a model's tables, and of an untied head, over the ranks, in place.

        Afterwards each rank stores its own rows only, and the model is on the device of this rank. A single process
        leaves the model unchanged.

        Args:
            model: The whole model, with equal weights on every rank, or a model from `build`.

        Raises:
            CheckpointError: The model could not be loaded again; see `require_loadable`.
        """
        if self._mesh is None:
            return
        if not isinstance(model, DecoderLM):
            raise SizeError("A model of transformers is trained here by one process only: start it without torchrun.")
        if not isinstance(model.table, ShardedTable):
            self._config = describe(model)
            require_loadable(model, self._config, model.state_dict())
            head, options = _plain_head(model.head), _head_options(model.head)
            model.table = table = self._shard_table(model.table)
            if head.tied:
                model.head = OutputHead(table, **options)
            else:
                model.head = self._shard_head(head, head.weight.detach(), options)
            model.head.bias = head.bias
            owners = [module for module in model.injections.modules() if not isinstance(module, LookupTable)]
            for module in owners:
                for name, part in list(module.named_children()):
                    if isinstance(part, LookupTable):
                        setattr(module, name, self._shard_table(as_table(part)))
        multiple = self._config["table"].get("pad_to_multiple_of") or 1
        for prefix, table in sharded_tables(model):
            spare = -table.vocab_size % multiple if table is model.table else 0
            for name in ROW_TENSORS[type(table.local)]:
                self._sharded[f"{prefix}.{name}"] = table, table.vocab_size + spare
        model.to(self.device)

    def _draw_table(self, config: JsonObject) -> ShardedTable:
        """Build a sharded table from its description; each rank allocates and draws only its own rows."""
        with torch.device("meta"):
            table = build(config)
        return self._shard_table(table)

    def _draw_head(self, description: JsonObject, table: TokenTable) -> OutputHead:
        """Build an output head for `build`; of an untied one each rank draws its own rows."""
        if description["tied"]:
            return cast(OutputHead, build_head(description, table))
        with torch.device("meta"):
            head = _plain_head(cast(OutputHead, build_head(description, table)))
        return self._shard_head(head, head.weight, _head_options(head))

    def _shard_table(self, table: TokenTable) -> ShardedTable:
        """Return a `ShardedTable` with this rank's rows of `table`; rows on the meta device are drawn."""
        assert self._mesh is not None
        return shard_table(table, self._mesh[VOCAB_PARALLEL])

    def _shard_head(self, head: OutputHead, weight: Tensor, options: JsonObject) -> OutputHead:
        """Return an untied head with sharded rows. A `ShardedTable` in its submodule `rows` owns this rank's rows.

        In its state dict the rows are named `weight`, as in a head without shards.
        """
        options_of_rows: JsonObject = {"padding_idx": head.padding_idx, "init_std": head.init_std}
        rows = TokenEmbedding(head.out_features, head.in_features, **options_of_rows, device="meta")
        rows.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)
        table = self._shard_table(rows)
        sharded = OutputHead(rows=table, **options)
        sharded.register_state_dict_post_hook(_rename_rows_to_weight)  # type: ignore[no-untyped-call]
        sharded.register_load_state_dict_pre_hook(_rename_weight_to_rows)  # type: ignore[no-untyped-call]
        return sharded

    def describe(self, model: DecoderLM) -> JsonObject:
        """Return the description of a model before it was sharded, as `describe(model)` gives it for one process."""
        return describe(model) if self._mesh is None else self._config

    def loss_function(self, model: DecoderLM | PatchedDecoder) -> Callable[..., Tensor]:
        """Return the function `(ids, targets) -> loss` to train with: the mean loss over this rank's targets.

        Further arguments are `documents` and `token_weights`, as in `mean_loss`. With several processes it is a
        `DistributedDataParallel` module: `backward` averages the gradients over the ranks. `no_sync` applies to the
        module that the last call returned.
        """
        if self._mesh is None:
            return partial(mean_loss, model)
        module = _LossModule(cast(DecoderLM, model))  # or one in PEFT's wrapper; `shard` refuses others
        self._ddp = distributed_data_parallel(module, forward_sync_buffers=False)
        self._wrapped.add(self._ddp)
        return self._ddp

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context manager for all but the last forward and backward pass of an update.

        Inside it, gradients are added up on each rank without communication. The next backward pass outside of it
        averages them over the ranks. A single process gets a context manager that does nothing.
        """
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def average_replicas(self, model: nn.Module) -> None:
        """Average the gradients of sharded rows over the ranks that store the same rows, in place.

        Call it on all ranks, after the last backward pass of an update. A single process does nothing.
        """
        if self._mesh is not None:
            for _, parameter, table in trained_parameters(model):
                if table is not None:
                    average_over_replicas(parameter, self._mesh)

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write tensors to one safetensors file, atomically; rank 0 writes it. All ranks must call it.

        Rank 0 receives sharded rows in small buffers, so that it needs no memory for whole tables.

        Args:
            path: The file.
            tensors: Tensors under the names of the model or of a checkpoint; DTensors where rows are sharded.
            metadata: Strings for the file's header, or `None`.

        Raises:
            FileError: The file cannot be written.
            PeerError: Another rank has ended.
        """
        if sharded := self._sharded_among(tensors):
            save_sharded(path, tensors, sharded, self.collectives, metadata)
        elif self.is_first:
            save_tensors(path, tensors, metadata)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Read a safetensors file that `save` wrote, also with another number of ranks.

        Returns:
            The tensors by name, and the metadata of the file. A tensor with sharded rows is a DTensor for which only
            this rank's rows were read.

        Raises:
            FileError: The file cannot be read.
            CheckpointError: The file is damaged.
        """
        return load_sharded(path, self._sharded_among)

    def _sharded_among(self, names: Iterable[str]) -> dict[str, tuple[ShardedTable, int]]:
        """Select the names of tensors with sharded rows.

        Return for each selected name the table that says which rows this rank stores, and the number of rows in the
        file. In a checkpoint the rows are `model.NAME`, their optimizer state `optimizer.NAME.KEY`, and their pending
        updates `pending_updates.NAME.KEY`; the numbers `step` and `history` have no rows.
        """
        sharded: dict[str, tuple[ShardedTable, int]] = {}
        for name in names:
            parent, _, key = name.rpartition(".")
            weight = name.removeprefix("model.")
            of_state = parent.removeprefix("optimizer.").removeprefix("pending_updates.")
            if of_state != parent and key not in NOT_BY_ROWS:
                weight = of_state
            if weight in self._sharded:
                sharded[name] = self._sharded[weight]
        return sharded


@contextmanager
def parallel_context(
    device: str, timeout_seconds: float, vocab_parallel_size: int | None = None
) -> Iterator[ParallelContext]:
    """Context manager: join the processes that torchrun started, and yield their `ParallelContext`.

    Without torchrun, it yields that of a single process. The process group is destroyed after the block.

    Args:
        device: `"cpu"`, or `"cuda"` for the GPU with the local rank of the process.
        timeout_seconds: Seconds for which a rank waits for the others in a collective operation.
        vocab_parallel_size: Number of ranks over which the rows of a table are sharded; `None` for all.

    Raises:
        PeerError: Another process hangs or has ended.
    """
    with launched_processes(device, timeout_seconds) as launch:
        context = ParallelContext(launch, vocab_parallel_size=vocab_parallel_size)
        try:
            yield context
        finally:
            # A gloo group must not end by the destructor of a Reducer: it waits for gloo's threads while it holds the
            # GIL, and a thread that frees its last tensors waits for the GIL.
            for module in context._wrapped:
                del module.logger, module.reducer


class _LossModule(nn.Module):
    """Module with `forward(ids, targets) -> loss` around a model: `DistributedDataParallel` calls only `forward`."""

    def __init__(self, model: DecoderLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, **options: Tensor) -> Tensor:
        """Return the model's mean loss in nats per token."""
        return mean_loss(self.model, ids, targets, **options)


def mean_loss(
    model: DecoderLM | PatchedDecoder,
    ids: Tensor,
    targets: Tensor,
    documents: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the sum of the losses of targets, times their weights, over the number of targets, in nats."""
    if isinstance(model, DecoderLM):
        return model.loss(ids, targets, attention_mask=documents, token_weights=token_weights)
    assert documents is None  # `Trainer` refuses them
    if token_weights is None:
        return model.loss(ids, targets)
    return (model.loss(ids, targets, reduction="none") * token_weights).mean()


def _plain_head(head: OutputHead) -> OutputHead:
    """Return a head unchanged; raise a `SizeError` unless it is an `OutputHead`, whose rows can be sharded."""
    if head.own_rows is not None or type(head) is not OutputHead:
        rows = f" with {a_or_an(head.own_rows)}" if head.own_rows is not None else ""
        raise SizeError(f"A {type(head).__name__}{rows} is not sharded: use one process or DistributedDataParallel.")
    return head


def _head_options(head: OutputHead) -> JsonObject:
    """Return the options of a head (bias, softcap, scale, padding mask) as arguments for another `OutputHead`."""
    return {name: value for name, value in head.config.items() if name in HEAD_OPTIONS}


def _rename_rows_to_weight(head: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Rename `rows.weight` to `weight` in the state dict of a sharded untied head, in place."""
    for key in [key for key in state if key.startswith(f"{prefix}rows.")]:
        state[prefix + key.removeprefix(f"{prefix}rows.")] = state.pop(key)


def _rename_weight_to_rows(head: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename `weight` to `rows.weight` in a state dict that a sharded untied head is about to load, in place.

    This is a pre-hook of `load_state_dict()`, and undoes `_rename_rows_to_weight`.
    """
    if f"{prefix}weight" in state:
        state[f"{prefix}rows.weight"] = state.pop(f"{prefix}weight")
