"""What some tested releases lack: a test that needs it is skipped there by name, and `LACKING` has all such names."""

from importlib import import_module

import pytest

LACKING: dict[str, str] = {
    "peft.tuners.tuners_utils:warn_msg_weight_tying": "PEFT 0.18",  # came with LoRA on tied ends
    "torch.distributed.tensor.experimental._attention:_HeadTailLoadBalancer": "torch 2.9",
    "torch.nn.attention.varlen:varlen_attn": "torch 2.9",
}
"""Module, or module and attribute -> the newest release that was found to lack it."""


def has(name: str) -> bool:
    """Return whether an entry of `LACKING` can be imported."""
    module, _, attribute = name.partition(":")
    try:
        return not attribute or hasattr(import_module(module), attribute)
    except ImportError:
        return False


def skip_without(name: str) -> None:
    """Skip the test, or the whole module where this is called at its top, if the installed release lacks `name`."""
    lacking = LACKING[name]
    if not has(name):
        pytest.skip(f"{name} does not exist, as in {lacking}", allow_module_level=True)
