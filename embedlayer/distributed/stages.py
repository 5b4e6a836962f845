"""Tied ends over pipeline stages: each stage that holds the table has a copy, and the copies train as one parameter.

`torch.distributed.pipelining` sends hidden states and their gradients between stages, and knows no parameter that two
stages have. Here the gradients of the copies are summed once per step, so that every optimizer makes the same step on
each copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.core.collectives import Collectives
from embedlayer.core.errors import PeerError, SizeError, StaleRowsError
from embedlayer.core.held_parameters import optimizers_of
from embedlayer.core.partitioned import is_sharded, local_shard
from embedlayer.distributed.data_parallel import sum_gradient
from embedlayer.distributed.sharded import collectives_of, trained_parameters
from embedlayer.row_sparse.gradient import row_gradient
from embedlayer.tables.table import TokenTable


class StageCopy:
    """The copy of one parameter on this pipeline stage; it is the attribute `stage_copy` of the parameter.

    `ranks` are those whose stages have a copy, in the order of the stages. `is_summed` says whether `sum_gradient` was
    called after the last backward pass, as far as hooks of torch say so.
    """

    def __init__(self, name: str, parameter: nn.Parameter, ranks: Collectives) -> None:
        self.name, self.parameter, self.ranks = name, parameter, ranks
        self.is_summed = self._has_optimizer = False
        parameter.stage_copy = self  # type: ignore[attr-defined]
        if parameter.requires_grad and not is_sharded(parameter):  # FSDP calls no hooks of a parameter
            parameter.register_hook(self._before_accumulation)

    def sum_gradient(self) -> None:
        """Replace the gradient by its sum over the stages; a stage without a gradient counts as zeros."""
        if not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:
            zeros = torch.zeros_like(self.parameter)
            is_sparse = hasattr(self.parameter, "pending_updates")
            self.parameter.grad = row_gradient(self.parameter, zeros) if is_sparse else zeros
        sum_gradient(self.parameter, self.ranks)
        self.is_summed = True

    def require_summed(self, *_: Any) -> None:
        """Raise a `StaleRowsError` if the gradient is that of this stage alone; also a step pre-hook of optimizers."""
        if self.parameter.grad is not None and not self.is_summed:
            raise StaleRowsError(
                f"The gradient of {self.name} is that of one pipeline stage, and the table is on {self.ranks.size}: "
                f"call sum_gradients() of tie_stages' result on each of them before clipping and the optimizer's step."
            )

    def _before_accumulation(self, _: Tensor) -> None:
        """Hook of the parameter, before a gradient is added to its own."""
        if self.is_summed and self.parameter.grad is not None:
            raise StaleRowsError(
                f"The gradient of {self.name} was summed over the pipeline stages already: accumulate all gradients "
                f"first, call sum_gradients() once, and optimizer.zero_grad() after the step."
            )
        self.is_summed = False
        if not self._has_optimizer:
            for optimizer in optimizers_of([self.parameter]):
                optimizer.register_step_pre_hook(self.require_summed)
                self._has_optimizer = True


@dataclass(frozen=True)
class TiedStages:
    """The parameters that this pipeline stage shares with others; `tie_stages` returns it.

    Attributes:
        copies: Each parameter with its ranks; empty on a stage without the table.
        parts: The stage modules of this rank.
    """

    copies: Sequence[StageCopy]
    parts: Sequence[nn.Module]

    def sum_gradients(self) -> None:
        """Replace the gradients of the tied parameters by their sums over the stages, in place.

        Call it once per step: after the last `schedule.step` of the step, before clipping. Every stage with the table
        must call it; on the others it does nothing. Afterwards the gradients have equal bits on all of them.

        Raises:
            SizeError: A parameter is no longer that of `tie_stages`.
            PeerError: Another stage has ended, or hangs.
        """
        current = {parameter for part in self.parts for parameter in part.parameters()}
        for copy in self.copies:
            if copy.parameter not in current and not is_sharded(copy.parameter):  # FSDP may have gathered it
                raise SizeError(
                    f"{copy.name} was replaced by another parameter after tie_stages, as sharding it does: call it "
                    f"again."
                )
            copy.sum_gradient()


def stage_copies(parameters: Iterable[Tensor]) -> Iterator[StageCopy]:
    """Yield the `StageCopy` of each parameter that `tie_stages` has tied."""
    return (parameter.stage_copy for parameter in parameters if hasattr(parameter, "stage_copy"))


def require_equal_copies(copy: StageCopy, state: Mapping[str, Tensor]) -> None:
    """Raise a `PeerError` on all stages of a tied parameter if its bits, or those of its state, differ between them."""
    tensors = {"rows": copy.parameter.detach(), **state}
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = {key: local_shard(each).contiguous() for key, each in tensors.items()}
    bits = {key: each.view(integers[each.element_size()]) for key, each in bits.items()}
    sums = copy.ranks.all_gather_object({key: int(each.sum(dtype=torch.int64)) for key, each in bits.items()})
    different = [key for key in tensors if any(each.get(key) != sums[0].get(key) for each in sums)]
    if different:
        raise PeerError(
            f"The copies of {copy.name} on the pipeline stages of ranks "
            f"{' and '.join(map(str, copy.ranks.global_ranks))} differ ({', '.join(different)}). See docs/errors.md, "
            f"Copies of a table on pipeline stages."
        )


def tie_stages(stages: nn.Module | Sequence[nn.Module], mesh: DeviceMesh) -> TiedStages:
    """Tie the tables that several pipeline stages hold: copy the rows of the first stage to the others.

    Parameters have the names of the whole model on each stage. So a parameter of a table whose name is on several
    stages is one parameter of the model, for example `table.weight` of the first stage, which looks it up, and of the
    last, whose head is `OutputHead(table)`. Each has its copy in memory. For one step of the training:

        schedule.step(ids)  # on the other stages schedule.step(), on the last one with target=...
        tied.sum_gradients()
        clip_grad_norm_(stage.parameters(), 1.0, pp_mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()

    Then the copies have equal bits after each step. `distributed_state` checks that, and stores one of them.
    `edit_vocabulary(stage, ...)` is called on each stage with the table, and is made on all of them or on none. Call
    `tie_stages` after `fully_shard` and `to_empty`, and before the wrapping in `DistributedDataParallel`.

    Args:
        stages: The stage module of this rank; for an interleaved schedule the list of them.
        mesh: The ranks of the pipeline, a one-dimensional mesh. Each of them must make the call.

    Returns:
        The tied parameters of this stage, whose `sum_gradients()` is called before each step of the optimizer.

    Raises:
        SizeError: The mesh is not one-dimensional, no parameter of a table is on several stages, another parameter is,
            a parameter is on the meta device, or two modules of this rank have a copy each.
        PeerError: The copies differ in shape, dtype, `row_sparse` or `requires_grad`.

    Example:
        >>> tied = tie_stages(stage, mesh["pp"])  # doctest: +SKIP

    Reference: Megatron-LM's embedding group, megatron/core/distributed/finalize_model_grads.py.
    """
    pipeline = collectives_of(mesh)
    parts = [stages] if isinstance(stages, nn.Module) else list(stages)
    parameters: dict[str, nn.Parameter] = {}
    tables = {
        parameter
        for part in parts
        for module in part.modules()
        if isinstance(module, TokenTable | nn.Embedding)
        for parameter in module.parameters()
    }
    with pipeline.all_or_none():
        for part in parts:
            for name, parameter, _ in trained_parameters(part, with_frozen=True):
                if parameters.setdefault(name, parameter) is not parameter:
                    raise SizeError(f"Two stage modules of this rank have a {name} each: give both the same module.")
                if parameter.is_meta:
                    raise SizeError(f"{name} is on the meta device: call tie_stages after to_empty.")
    facts = {
        name: {
            "kind": "of a table" if parameter in tables else "of no table",
            "shape": tuple(local_shard(parameter.detach()).shape),
            "dtype": str(parameter.dtype),
            "row_sparse": hasattr(parameter, "pending_updates"),
            "requires_grad": parameter.requires_grad,
        }
        for name, parameter in parameters.items()
    }
    everyones = pipeline.all_gather_object(facts)
    ranks_of = {
        name: [rank for rank, each in enumerate(everyones) if name in each]
        for name in dict.fromkeys(name for each in everyones for name in each)
    }
    tied = {name: ranks for name, ranks in ranks_of.items() if len(ranks) > 1}
    for name, ranks in tied.items():
        both = f"Ranks {' and '.join(str(pipeline.global_ranks[rank]) for rank in ranks)} both have {name}"
        if any(everyones[rank][name]["kind"] != "of a table" for rank in ranks):
            raise SizeError(
                f"{both}, which is no parameter of a table: give the parameters of a stage their names in the whole "
                f"model (blocks.0 on the first stage, blocks.1 on the next)."
            )
        if any(everyones[rank][name] != everyones[ranks[0]][name] for rank in ranks):
            described = "; ".join(str(everyones[rank][name]) for rank in ranks)
            raise PeerError(f"{both}, and they are no copies of one parameter: {described}.")
    if not tied and pipeline.size > 1:
        raise SizeError(
            "No table is on several pipeline stages: register it on the last stage under its name on the first, and "
            "tie the head to it, self.head = OutputHead(self.table)."
        )
    groups: dict[tuple[int, ...], Collectives] = {tuple(range(pipeline.size)): pipeline}
    copies = []
    for name, ranks in tied.items():
        if pipeline.rank in ranks:
            key = tuple(ranks)
            if key not in groups:
                chosen = [pipeline.global_ranks[rank] for rank in ranks]
                groups[key] = Collectives(dist.new_group(chosen, use_local_synchronization=True), mesh.device_type)
            copies.append(StageCopy(name, parameters[name], groups[key]))
    with torch.no_grad():
        for copy in copies:
            copy.ranks.broadcast(local_shard(copy.parameter.data))
    return TiedStages(copies, parts)
