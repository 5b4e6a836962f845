"""The Triton kernels, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embedlayer import MissingExtraError, linear_cross_entropy

CASES = Path(__file__).with_name("interpreted_triton.py")


def test_the_kernels_agree_with_the_plain_definition_in_tritons_interpreter(request) -> None:
    pytest.importorskip("triton", reason="the package triton is missing")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-q",
            "-W",
            "ignore:Conversion of an array with ndim:DeprecationWarning",  # by Triton 3.6 with NumPy 1.26
            *(["--all"] if request.config.getoption("--all") else []),
            str(CASES),
        ],  # checked wrappers hide the kernels from Triton
        cwd=CASES.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_without_triton_or_its_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(MissingExtraError, match="needs the package triton and a CUDA device, not 'cpu'"):
        linear_cross_entropy(torch.randn(1, 4), torch.randn(5, 4), torch.tensor([1]), impl="triton")
