"""The former place of `core.own_attributes.unwrapped`."""

from embedlayer.core.own_attributes import unwrapped as without_adapters

__all__ = ["without_adapters"]
