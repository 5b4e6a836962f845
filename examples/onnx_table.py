"""What a quantised table costs in ONNX Runtime, as a table of docs/compression.md: bytes, time and error of logits."""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime
import torch
from tables import markdown_table, write_between_markers

from embedlayer.compress import export_onnx
from embedlayer.formats import GGUFBlocks
from embedlayer.tables.quantized import QuantizedEmbedding

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compression.md"
EMBED_DIM = 768


def measure(table: QuantizedEmbedding, accuracy_level: int, folder: Path) -> dict[str, str]:
    """A line of the table: logits of one token, against those of `table.logits`."""
    file = folder / "table.onnx"
    export_onnx(table, file, accuracy_level=accuracy_level)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    hidden = torch.randn(1, 1, EMBED_DIM)
    inputs = {"input_ids": np.zeros((1, 0), np.int64), "hidden": hidden.numpy()}
    times = []
    for _ in range(6):
        start = perf_counter()
        found = session.run(["logits"], inputs)[0]
        times.append(perf_counter() - start)
    expected = table.logits(hidden)
    error = (torch.from_numpy(found) - expected).abs().max() / expected.abs().max()
    return {
        "kind": f"q{table.row_format.bits}_0",
        "`accuracy_level`": str(accuracy_level),
        "file, MiB": f"{file.stat().st_size / 2**20:.1f}",
        "logits of one token, ms": f"{median(times[1:]) * 1e3:.1f}",
        "largest error of the largest logit": f"{error:.0e}",
    }


def main() -> None:
    """Measure and print; with --write, put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--write", metavar="NAME", help="of the table on the page")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = 0.02 * torch.randn(options.vocab_size, EMBED_DIM)
    tables = [QuantizedEmbedding.from_table(rows, bits, layout=GGUFBlocks(), clip=False) for bits in (4, 8)]
    with tempfile.TemporaryDirectory() as folder:
        lines = [measure(table, level, Path(folder)) for table in tables for level in (1, 4)]
    text = markdown_table(lines)
    print(text)
    if options.write:
        write_between_markers(PAGE, options.write, text)


if __name__ == "__main__":
    main()
