"""Numbers in kernels, compared with torch: all bfloat16 numbers, rounding, and the exponential."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from embedlayer.kernels.cpu.numbers import exp, kernel, narrow, widen


@kernel
def widened(start, stop, bits, out):
    for i in range(start, stop):
        out[i] = widen(bits[i])


@kernel
def narrowed(start, stop, numbers, out):
    for i in range(start, stop):
        out[i] = narrow(numbers[i], out[i])


@kernel
def exponentials(start, stop, numbers, out):
    for i in range(start, stop):
        out[i] = exp(numbers[i])


def test_every_bfloat16_is_widened_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    widened(0, len(bits), bits, out)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float()
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    bits = torch.randint(0, 1 << 32, (1 << 20,)).to(torch.uint32)
    ties = (torch.arange(1 << 16) << 16 | 0x8000).to(torch.uint32)
    numbers = torch.cat([bits, ties]).view(torch.float32)
    out = np.empty(len(numbers), np.uint16)
    narrowed(0, len(numbers), numbers.numpy(), out)
    found = torch.from_numpy(out).view(torch.bfloat16)
    torch.testing.assert_close(found, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_the_float32_exponential_is_as_exact_as_torchs() -> None:
    x = torch.cat([torch.linspace(-87.3, 0, 1 << 20), -torch.logspace(-40, 0, 1000)])
    out = np.empty(len(x), np.float32)
    exponentials(0, len(x), x.numpy(), out)
    exact = x.double().exp()
    error = (torch.from_numpy(out).double() / exact - 1).abs().max()
    assert error <= max(float((x.exp().double() / exact - 1).abs().max()), 2.0**-23)


def test_the_exponential_of_infinities_and_nan_is_that_of_torch() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([-math.inf, -1e30, -104.0, -0.0, 0.0, math.nan], dtype=dtype)
        out = np.empty(len(x), x.numpy().dtype)
        exponentials(0, len(x), x.numpy(), out)
        torch.testing.assert_close(torch.from_numpy(out), x.exp(), rtol=1e-6, atol=1e-37, equal_nan=True)
