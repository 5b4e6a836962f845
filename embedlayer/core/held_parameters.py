"""Optimizers that hold a parameter which changed without them: they are found when it changes, and say so at a step.

Nothing is installed before such a change, and afterwards only a hook of the optimizers that it concerns.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.errors import StaleRowsError
from embedlayer.core.formatting import a_or_an


def held_parameters(
    module: nn.Module, optimizer: Optimizer | None = None, others: Iterable[nn.Module] = ()
) -> set[int]:
    """Return the `id` of each parameter of `module` and `others` that something else refers to."""
    owners = [*module.modules(), *others]
    uses = Counter(id(parameter) for owner in owners for parameter in owner._parameters.values())
    if optimizer is not None:  # a list of its group, and a key of its state
        uses.update(id(parameter) for parameter in (*parameters_of(optimizer), *optimizer.state))
    parts = [(owner._parameters, name) for owner in owners for name in owner._parameters]
    held = [part[name] for part, name in parts if is_held(part, name, uses[id(part[name])])]
    return {id(parameter) for parameter in held if parameter is not None}


def is_held(parameters: Mapping[str, Tensor | None], name: str, uses: int) -> bool:
    """Return whether something else than modules refers to a parameter, so that it may have an optimizer."""
    other = {name: nn.Parameter(requires_grad=False)}  # which only this dictionary refers to
    return sys.getrefcount(parameters[name]) - sys.getrefcount(other[name]) > uses - 1


def former_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter of a module that is about to be replaced, or `None` if no optimizer can have it."""
    # not one that FSDP replaces in each forward pass, or `PendingUpdates` watches: these are of other classes
    parameters = module.__dict__.get("_parameters", {})
    may_be_trained = type(parameters.get(name)) is nn.Parameter and not parameters[name].is_meta
    return parameters[name] if may_be_trained and is_held(parameters, name, 1) else None


def optimizers_of(parameters: Collection[Tensor]) -> list[Optimizer]:
    """Return the optimizers of this process that train any of these parameters; it takes about 0.1 s."""
    # A parameter does not know its optimizers. The garbage collector finds them, as what refers to its class.
    ids, kinds = {id(parameter) for parameter in parameters}, Optimizer.__subclasses__()
    for kind in kinds:  # the list grows by the subclasses of its classes
        kinds += kind.__subclasses__()
    optimizers = [each for each in gc.get_referrers(*kinds) if type(each) in kinds] if ids else []
    return [each for each in optimizers if ids & {id(parameter) for parameter in parameters_of(each)}]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer; none while its constructor runs."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def trained_by(optimizer: Optimizer, parameter_id: int) -> Tensor | None:
    """Return the parameter of an optimizer that has this `id`, or `None`."""
    # a weak reference instead of the `id` would forbid FSDP to give the parameter another size
    return next((parameter for parameter in parameters_of(optimizer) if id(parameter) == parameter_id), None)


def watch_replacement(module: nn.Module, name: str, former: Tensor | None) -> None:
    """Let the optimizers that train the former parameter of a module raise an error if its new one stays untrained."""
    parameter = module._parameters.get(name)
    if former is None or former is parameter or type(parameter) is not nn.Parameter or not parameter.requires_grad:
        return
    for optimizer in optimizers_of([former]):
        optimizer.register_step_pre_hook(partial(_check_is_trained, weakref.ref(module), name, id(former)))


def _check_is_trained(owner: weakref.ref[nn.Module], name: str, former_id: int, optimizer: Optimizer, *_: Any) -> None:
    """Raise an error at a step of an optimizer that trains only the former parameter of a module."""
    module, former = owner(), trained_by(optimizer, former_id)
    parameter = None if module is None else module._parameters.get(name)
    if parameter is None or parameter.grad is None or former is None or former.grad is not None:
        return
    if not optimizers_of([parameter]):
        raise StaleRowsError(
            f"The {name} of {a_or_an(module)} was replaced and no optimizer trains it: this {type(optimizer).__name__} "
            f"has the former one. Build the optimizer again, or see docs/errors.md, A replaced parameter."
        )
