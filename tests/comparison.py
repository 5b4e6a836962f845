"""How tests compare a result with a better one."""

from torch import Tensor


def assert_no_worse(fast: Tensor, plain: Tensor, exact: Tensor, *, slack: float) -> None:
    """`fast` may miss the float64 answer by what plain PyTorch misses it by, plus `slack`."""
    allowed = (plain.double() - exact).abs().max() + slack
    missed = (fast.double() - exact).abs().max()
    assert missed <= allowed, f"off by {missed:.3g}, plain PyTorch by {allowed - slack:.3g}"
