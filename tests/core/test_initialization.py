"""What weights begin with."""

import subprocess
import sys

import torch

import embedlayer as el
from embedlayer.core.initialization import init_normal_rows_


def test_a_weight_has_the_numbers_of_torch() -> None:
    torch.manual_seed(1)
    weight = el.TokenEmbedding(5, 3, init_std=0.5).weight
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


def test_some_rows_are_drawn_as_all_would_be() -> None:
    """Blocks of 2^19 numbers, which no sharded table of the other tests has."""
    for num_rows, width, dtype in ((3, 2, torch.float32), (900, 1000, torch.float64), (6000, 333, torch.float32)):
        torch.manual_seed(0)
        whole = torch.empty(num_rows, width, dtype=dtype).normal_(std=0.5)
        after = torch.rand(1)
        for start, stop in ((0, num_rows), (0, 1), (num_rows // 3, num_rows // 2 + 1), (num_rows - 1, num_rows)):
            torch.manual_seed(0)
            part = torch.empty(stop - start, width, dtype=dtype)
            init_normal_rows_(part, start=start, num_rows=num_rows, std=0.5)
            assert torch.equal(part, whole[start:stop])
            assert torch.equal(torch.rand(1), after)
