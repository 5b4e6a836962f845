"""Attributes of one module object, past `nn.Module`: marks on modules of other libraries, and methods put on them.

`nn.Module` registers a module or parameter that is assigned, and a class may compute an attribute of the same name. The
functions here read and set what the object itself has. `unpatch` and `merge_rows` remove what `patch` and
`train_only_rows` set.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

REPLACED = "_replaced_by_embedlayer"
"""Attribute of a module of this library that stores the module of transformers that it replaced; `patch` sets it."""

TRAINED_BEFORE = "_trained_before_its_rows"
"""Attribute of a module between `train_only_rows` and `merge_rows`: the parameters that were trained before."""

ROW_HOOKS = "_hooks_of_its_rows"
"""Attribute of a module between `train_only_rows` and `merge_rows`: the functions that remove its hooks."""

INITIALISED = "_is_hf_initialized"
"""Attribute with which transformers marks a module that must not be initialised again, such as a resized head."""


def own_attribute(module: object, name: str) -> Any:
    """Return an attribute in the `__dict__` of an object; `None` without one."""
    return vars(module).get(name)


def set_own_attribute(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module without registering a parameter or a child."""
    vars(module)[name] = value


def copy_own_attributes(source: nn.Module, target: nn.Module, names: Iterable[str]) -> None:
    """Set those attributes of `target` among `names` that `source` itself has, to the same objects."""
    vars(target).update({name: vars(source)[name] for name in names if name in vars(source)})


def remove_own_attribute(module: nn.Module, name: str) -> Any:
    """Remove an attribute that a module itself may have, and return its value; `None` if there was none."""
    return vars(module).pop(name, None)


def modules_with(module: nn.Module, name: str) -> list[nn.Module]:
    """Return the submodules of a module, itself included, that have an attribute of their own with a name."""
    return [part for part in module.modules() if name in vars(part)]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all adapters around it, which have it as their child `base_layer`; without any, itself.

    This is the one thing about adapters of other libraries that the core knows.
    """
    while (base := module._modules.get("base_layer")) is not None:
        module = base
    return module
