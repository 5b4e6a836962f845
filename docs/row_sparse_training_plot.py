"""The picture in row-sparse-training.md: `python docs/row_sparse_training_plot.py` writes row-sparse-training.svg."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from embedlayer import RowAdamW, RowSparseEmbedding, TokenEmbedding
from embedlayer.plots import optimizer_paths

V, D, STEPS, TOKENS, RARE = 200, 8, 400, 16, 150


def path_of(make: Callable[[TokenEmbedding], torch.optim.Optimizer], *, row_sparse: bool) -> tuple[list[float], Tensor]:
    """One number of the rare row after each step, and the table at the end, for the same gradients each time."""
    generator = torch.Generator().manual_seed(2)
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(V, D, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.randn(V, D, generator=generator, dtype=torch.float64) * 0.02)
    optimizer = make(table)
    numbers = []
    for t in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, t / 40) * (0.55 + 0.45 * math.cos(math.pi * t / STEPS))
        ids = torch.multinomial(1 / torch.arange(1.0, V), TOKENS, replacement=True, generator=generator)
        upstream = torch.randn(TOKENS, D, generator=generator, dtype=torch.float64)
        ids[ids == RARE] = 0
        if t in TOUCHED:
            ids[0], upstream[0] = RARE, 1.0
        optimizer.zero_grad()
        (table(ids) * upstream).sum().backward()
        optimizer.step()
        numbers.append(float(table.rows(RARE, RARE + 1).detach()[0, 0]))
    return numbers, table.rows(0, V).detach()


TOUCHED = (20, 140, 155, 290)


def main() -> None:
    dense, exact = path_of(lambda table: torch.optim.AdamW(table.parameters(), weight_decay=0.0), row_sparse=False)
    rows, ours = path_of(lambda table: RowAdamW(table.parameters(), weight_decay=0.0), row_sparse=True)
    lazy, theirs = path_of(lambda table: torch.optim.SparseAdam(table.parameters()), row_sparse=True)
    off = [float((found - exact).abs().max()) for found in (ours, theirs)]
    paths = {
        "dense AdamW": dense,
        f"RowAdamW: the table ends within {off[0]:.0e}": rows,
        f"SparseAdam: the table ends {off[1]:.2f} away": lazy,
    }
    figure = optimizer_paths(paths, touched=TOUCHED, title="Who ends where")
    figure.savefig(Path(__file__).with_name("row-sparse-training.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
