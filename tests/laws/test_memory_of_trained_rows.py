"""Training N rows of width D over stored codes adds at most 16 N D bytes and 64 MiB, less than a float32 copy."""

import sys
from pathlib import Path

import pytest
import torch
from covering import some
from processes import on_ranks

import embedlayer as el
from embedlayer.formats.compressed_tensors import NaiveQuantizedRows, PackQuantizedRows
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.mlx import MLXAffineRows
from embedlayer.formats.quantized import QuantizedRows
from embedlayer.formats.stored import StoredFormat, StoredRows
from embedlayer.vocab.row_training import merge_rows, train_only_rows

VOCAB_SIZE, EMBED_DIM, TRAINED = 72_000, 256, 1000

FORMATS: dict[str, StoredFormat] = {
    "int4": QuantizedRows(EMBED_DIM, 4, EMBED_DIM),
    "GGUF Q8_0": GGUFRows(EMBED_DIM, "Q8_0"),
    "MLX, 4 bits": MLXAffineRows(EMBED_DIM, 4, 64, "BF16"),
    "compressed-tensors, 4 bits": PackQuantizedRows(EMBED_DIM, 32, "BF16", True, 4),
    "compressed-tensors, FP8": NaiveQuantizedRows(EMBED_DIM, 0, "F32", True, "F8_E4M3"),
}


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


def added_mib(name: str) -> float:
    """Return the most resident memory that training and merging 1,000 rows of a large table adds at any time."""
    from stored_tables import table_of

    def resident(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    def model_of(vocab_size: int) -> torch.nn.ModuleDict:
        record = FORMATS[name]
        shared = {part: torch.ones(sizes.shape).to(sizes.dtype) for part, sizes in record.shared_parts.items()}
        few = record.quantise(0.02 * torch.randn(1000, EMBED_DIM), shared)
        rows = StoredRows(record, few, shared).take(torch.arange(vocab_size) % 1000)
        table = table_of(rows)
        return torch.nn.ModuleDict({"table": table, "head": el.OutputHead(table)})

    train_and_merge(model_of(5000), [*range(100, 200)])  # compiles the kernels
    model = model_of(VOCAB_SIZE)
    before = resident("Rss")
    Path("/proc/self/clear_refs").write_text("5")
    train_and_merge(model, [*range(VOCAB_SIZE - TRAINED, VOCAB_SIZE)])
    return resident("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", some(["int4", "MLX, 4 bits"], FORMATS))
def test_training_rows_over_stored_codes_takes_the_memory_of_these_rows(name: str) -> None:
    if name.startswith("GGUF"):
        pytest.importorskip("gguf")
    bound = 16 * TRAINED * EMBED_DIM / 2**20 + 64
    assert bound < 4 * VOCAB_SIZE * EMBED_DIM / 2**20
    added = on_ranks(1, added_mib, name)[0]
    assert 0 < added <= bound
