"""FSDP2: methods other than `forward` that read parameters, and edits of the number of rows.

torch has no public function that gives a parameter another size after `fully_shard`. FSDP2 stores the sizes of each
parameter in an object of its own (`FSDPParam` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py), which
`FsdpParameter` replaces by a new one of the same class. This is the only place that uses FSDP's private objects. They
are checked before anything is changed, so another version of torch gives an error that names the alternatives. Its
module is imported by those who use it: the import takes 0.7 s.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from embedlayer.core.errors import SizeError, VersionError
from embedlayer.core.partitioned import gathers_weights
from embedlayer.integrations.dtensor import check_replaceable, replace_dtensor

PARALLELIZE = "fully_shard or parallelize_module"
"""The functions of torch that shard a model, for advice in errors."""


def has_fsdp_modules(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module or on one of its submodules, which then have `unshard`."""
    return any(hasattr(part, "unshard") and hasattr(part, "reshard") for part in module.modules())


def gather_for(module: nn.Module, methods: Iterable[str]) -> None:
    """Make FSDP2 gather the parameters of a module for some of its methods, and keep them until its backward pass.

    Without effect on a module on which `fully_shard` was not called.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if not isinstance(module, FSDPModule):
        return
    state = cast(Any, fully_shard).state(module)
    if "_fsdp_param_group" in vars(state) and len(state._modules) > 1:
        raise VersionError(
            f"With torch {torch.__version__} the backward pass of a group of modules, fully_shard([norm, head]), "
            f"crashes: shard each module by itself, or install torch 2.13."
        )
    module.set_reshard_after_forward(False, recurse=False)
    for name in methods:
        register_fsdp_forward_method(module, name)


USED = (
    *("_module_info", "mesh_info", "post_forward_mesh_info", "device", "mp_policy", "is_dtensor"),
    *("_post_load_hook_handle", "_setattr_on_modules", "reset_sharded_param", "init_dtype_attrs"),
)
"""Attributes of torch's `FSDPParam` that `FsdpParameter` uses to change the number of rows."""

ARGUMENTS = (
    *("param", "module_info", "mesh_info", "post_forward_mesh_info", "device", "shard_placement_fn", "mp_policy"),
    "offload_policy",
)
"""Arguments of the constructor of `FSDPParam`."""


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter that `fully_shard` has sharded, and the FSDP group that gathers it."""

    parameter: nn.Parameter
    group: Any

    def check(self, num_rows: int) -> None:
        """Check that `replace` can replace the parameter by one with `num_rows` rows; nothing is changed."""
        record = self._record()
        pending = (
            getattr(record, "unsharded_accumulated_grad", None),
            getattr(getattr(record, "unsharded_param", None), "grad", None),
            getattr(self.group, "_partial_reduce_output", None),
        )
        if any(each is not None for each in pending):
            raise SizeError("FSDP has gradients that are not reduced yet: edit after a backward pass that does so.")
        if getattr(self.group, "_all_gather_result", None) is not None:
            raise SizeError("FSDP is gathering this parameter (unshard(async_op=True)): wait for it before the edit.")
        if num_rows == len(self.parameter):
            return
        missing = [name for name in USED if not hasattr(record, name)]
        missing += [name for name in ARGUMENTS if name not in inspect.signature(type(record)).parameters]
        if missing or getattr(record.mesh_info, "is_spmd_mesh", False):
            reason = f"FSDP of torch {torch.__version__} has no {', '.join(missing)}"
            raise SizeError(
                f"The number of rows cannot change from {len(self.parameter)} to {num_rows} after fully_shard: "
                f"{reason if missing else 'it was called with dp_mesh_dims'}. Edit the model before fully_shard, or "
                f"reserve rows with pad_to_multiple_of."
            )
        check_replaceable(self.parameter)

    def replace(self, tensor: Any) -> None:
        """Replace the values of the parameter by those of a DTensor; the parameter stays the same object."""
        record = self._record()
        if hasattr(record, "unsharded_param"):  # a loss that still exists must not be differentiated with new rows
            torch.autograd.graph.increment_version(record.unsharded_param)
        if tensor.shape == self.parameter.shape:
            replace_dtensor(self.parameter, tensor)
            return
        sizes = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if record.is_dtensor:  # the parameter before fully_shard was sharded over the later dimensions of the mesh
            from torch.distributed.tensor import distribute_tensor

            mesh, first = tensor.device_mesh, record.mesh_info.mesh.ndim
            later = mesh[mesh.mesh_dim_names[first:]]
            sizes = distribute_tensor(sizes, later, tensor.placements[first:], src_data_rank=None)
        try:
            new = type(record)(
                param=nn.Parameter(sizes, requires_grad=self.parameter.requires_grad),
                module_info=record._module_info,
                mesh_info=record.mesh_info,
                post_forward_mesh_info=record.post_forward_mesh_info,
                device=record.device,
                shard_placement_fn=None,
                mp_policy=record.mp_policy,
                offload_policy=self.group.offload_policy,
            )
        finally:
            record._setattr_on_modules(self.parameter)  # the constructor registers a parameter of its own
        replace_dtensor(self.parameter, tensor)
        new.sharded_param = self.parameter
        new.reset_sharded_param()  # it reads the parameter of the module, and adds FSDP's own padding
        new.init_dtype_attrs(new.mp_policy)
        self.group.fsdp_params[self.group.fsdp_params.index(record)] = new
        record._post_load_hook_handle.remove()

    def _record(self) -> Any:
        """Return FSDP's object with the sizes of this parameter."""
        return next(each for each in self.group.fsdp_params if each.sharded_param is self.parameter)


def fsdp_parameters(module: nn.Module, parts: Iterable[nn.Module] = ()) -> Mapping[int, FsdpParameter]:
    """Reshard a module, and return the parameters that FSDP2 shards in it, by the `id` of the parameter."""
    sharded: dict[int, FsdpParameter] = {}
    if "torch.distributed.fsdp" not in sys.modules:  # nobody has sharded anything with it
        return sharded
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for wrapped in module.modules():
        if not isinstance(wrapped, FSDPModule):
            continue
        wrapped.reshard()
        state = cast(Any, fully_shard).state(wrapped)
        groups = getattr(state, "_fsdp_param_groups", None)
        if "_fsdp_param_group" in vars(state):  # torch 2.9 to 2.11 have one or none
            groups = [group for group in [state._fsdp_param_group] if group is not None]
        if groups is None:
            raise SizeError(f"An edit does not know FSDP of torch {torch.__version__}: edit before fully_shard.")
        for group in groups:
            for record in group.fsdp_params:
                sharded[id(record.sharded_param)] = FsdpParameter(record.sharded_param, group)
    for part in parts if not isinstance(module, FSDPModule) else ():
        own = [parameter for parameter in part.parameters(recurse=False) if not hasattr(parameter, "shard_group")]
        if gathers_weights(part) and any(id(parameter) not in sharded for parameter in own):
            raise SizeError(
                f"fully_shard was called on a module around this {type(module).__name__}: pass that module."
            )
    return sharded
