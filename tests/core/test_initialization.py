"""What weights begin with."""

import subprocess
import sys

import pytest
import torch

from embedlayer.core import initialization as normal


def test_a_weight_has_the_numbers_of_torch() -> None:
    weight = torch.empty(5, 3)
    torch.manual_seed(1)
    normal.init_normal_(weight, std=0.5)
    torch.manual_seed(1)
    assert torch.equal(weight, torch.empty(5, 3).normal_(std=0.5))


def test_what_is_born_without_values_draws_none_and_imports_no_compiler() -> None:
    code = """
import sys, torch
import embedlayer as el
before = torch.get_rng_state()
with torch.device("meta"):
    head = el.OutputHead(vocab_size=9, embed_dim=4, bias=True)
    el.DecoderLM(el.TokenEmbedding(9, 4), el.LearnedPositionalEmbedding(8, 4), head, num_layers=1, num_heads=1)
    el.FactorizedEmbedding(9, 4, 2), el.RelativePositionBias(1)
print(torch.equal(before, torch.get_rng_state()), "torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "True False\n", found.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_rows", "width"), [(3, 2), (7, 3), (50, 7), (400, 33), (1000, 16), (129, 1)])
def test_some_rows_are_drawn_as_all_would_be(monkeypatch, dtype, num_rows, width) -> None:
    monkeypatch.setattr(normal, "NUMBERS_AT_ONCE", 100)
    torch.manual_seed(0)
    whole = torch.empty(num_rows, width, dtype=dtype).normal_(std=0.5)
    after = torch.rand(1)
    for start, stop in ((0, num_rows), (0, 1), (num_rows // 3, num_rows // 2 + 1), (num_rows - 1, num_rows)):
        torch.manual_seed(0)
        part = torch.empty(stop - start, width, dtype=dtype)
        normal.init_normal_rows_(part, start=start, num_rows=num_rows, std=0.5)
        assert torch.equal(part, whole[start:stop])
        assert torch.equal(torch.rand(1), after)
