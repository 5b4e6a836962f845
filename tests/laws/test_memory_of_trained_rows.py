"""Training N rows of width D over stored codes adds at most 16 N D bytes and 64 MiB, less than a float32 copy."""

import sys
from pathlib import Path

import pytest
import torch
from covering import some
from processes import on_ranks

import embedlayer as el
from embedlayer.vocab import merge_rows, train_only_rows

NUMBERS, TRAINED = 18_500_000, 1000
FORMATS = ["int4", "GGUF Q4_K", "MLX 4 bits, groups of 64, bfloat16"]
FORMATS += ["pack-quantized 4 bits, group, symmetric, bfloat16", "float-quantized channel, symmetric, float32"]


def train_and_merge(model: torch.nn.ModuleDict, ids: list[int]) -> None:
    """Train the rows of some tokens for two steps by look-ups and losses, and merge them."""
    train_only_rows(model, ids)
    table, head = model["table"], model["head"]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    batch = torch.tensor([[1, *ids[:6], 2]])
    for _ in range(2):
        optimizer.zero_grad()
        head.loss(table(batch), batch.roll(-1)).backward()
        optimizer.step()
    merge_rows(model)


def added_beyond_the_bound(name: str) -> float:
    """Return by how much the memory that training 1,000 rows of a large table adds is more than the bound, in MiB."""
    from stored_cases import rows_of
    from stored_tables import table_of

    def resident(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    few = rows_of(name)
    width = few.shape[1]

    def model_of(vocab_size: int) -> torch.nn.ModuleDict:
        table = table_of(few.take(torch.arange(vocab_size) % few.shape[0]))
        return torch.nn.ModuleDict({"table": table, "head": el.OutputHead(table)})

    train_and_merge(model_of(5000), [*range(100, 200)])  # compiles the kernels
    vocab_size = NUMBERS // width
    model = model_of(vocab_size)
    before = resident("Rss")
    Path("/proc/self/clear_refs").write_text("5")
    train_and_merge(model, [*range(vocab_size - TRAINED, vocab_size)])
    added, bound = resident("VmHWM") - before, 16 * TRAINED * width / 2**20 + 64
    assert bound < 4 * NUMBERS / 2**20
    return added - bound


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", some([FORMATS[0], FORMATS[2]], FORMATS))
def test_training_rows_over_stored_codes_takes_the_memory_of_these_rows(name: str) -> None:
    for package in ("gguf", "mlx", "compressed_tensors"):
        pytest.importorskip(package)
    assert on_ranks(1, added_beyond_the_bound, name)[0] <= 0
