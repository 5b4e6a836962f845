"""Stored formats: rows, products and look-ups of folders that other libraries quantised, and bytes that ours writes."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from golden import files_of
from stored_cases import CASES, built, weights
from stored_folders import write_folder
from torch import Tensor

import embedlayer as el
from embedlayer.formats import CovarianceRounding, GGUFBlocks
from embedlayer.kernels import kernels_disabled

IDS = torch.tensor([[1, 7, 76, 7, 0], [0, 48, 3, 3, 1]])
QUANTIZED: dict[str, Callable[[Tensor], el.QuantizedEmbedding]] = {
    **{f"int{bits}": partial(el.QuantizedEmbedding.from_table, bits=bits) for bits in (4, 8)},
    **{
        f"int{bits}, groups of {size}": partial(el.QuantizedEmbedding.from_table, bits=bits, group_size=size)
        for bits in (4, 8)
        for size in (16, 24, 32)
    },
    **{f"q{bits}_0": partial(el.QuantizedEmbedding.from_table, bits=bits, layout=GGUFBlocks()) for bits in (4, 8)},
    "int4, covariance": lambda rows: el.QuantizedEmbedding.from_table(rows, 4, rounding=CovarianceRounding()),
}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for name in CASES:
        if not name.endswith(", head") and "width 33" not in name:  # of which no attention is built
            yield name, partial(stored, name)
            yield f"{name}, written again", partial(written, name)
    for name in QUANTIZED:
        for dtype in ("float32", "bfloat16"):
            yield f"ours, {name}, {dtype}", partial(quantized, name, dtype)


def stored(name: str) -> object:
    """Return rows, look-ups, logits, loss and gradient of a folder of a library."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder, "model"), built(name), None)
        return computed(el.load(Path(folder, "model")).table)


def written(name: str) -> object:
    """Return the folder with a table that was read from a folder of a library."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder, "model"), built(name), None)
        table = el.load(Path(folder, "model")).table
        el.compress.write_checkpoint(table, Path(folder, "model"), Path(folder, "written"))
        return files_of(Path(folder, "written"))


def quantized(name: str, dtype: str) -> object:
    """Return rows, look-ups, logits, loss, gradient and saved files of a table that ours quantises."""
    table = QUANTIZED[name](weights(96))
    table.to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        table.save_pretrained(folder)
        return {**computed(table), "files": files_of(folder)}


def computed(table: el.TokenTable) -> dict[str, object]:
    """Return what a table computes."""
    size = table.vocab_size
    hidden = torch.randn(2, 5, table.embed_dim).to(table.dtype).requires_grad_()
    logits = table.logits(hidden)
    loss = table.loss(hidden, IDS % size, impl="chunked")
    (gradient,) = torch.autograd.grad(loss, hidden)
    with kernels_disabled():
        plain = {"rows": table.rows(0, size), "logits": table.logits(hidden)}
    return {
        "kind": type(table).__name__,
        "plain": plain,
        "vectors": table(IDS % size),
        "rows": table.rows(0, size),
        "logits": logits,
        "one": table.logits(hidden[0, 0].detach()),
        "loss": loss,
        "gradient": gradient,
        "state": table.state_dict(),
    }
