"""What a smaller table costs: bytes, error of the rows, nearest tokens that stay, and loss on text."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.compress.convert import compress_table, replace_table
from embedlayer.errors import SizeError
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.dense import as_table
from embedlayer.tables.table import ROWS_AT_ONCE, TokenTable

CHOICES = ("int8", "int4", "int4-g32")
QUERIES = 1000
NEAREST = 10
TOKENS_AT_ONCE = 4096

Loss = Callable[[TokenTable], float]

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class CompressionResult:
    """One way to store a table beside the table itself.

    Attributes:
        to: The way, as in `compressed`; `"as it is"` for the table itself, `"trim"` for dropped rows.
        bytes: Of the table in memory, scales included.
        file_bytes: Of a safetensors file with the table alone.
        share: `bytes` as a share of the table's own.
        row_error: `|E - E'| / |E|`, Frobenius norms over all rows.
        neighbors: Share of the ten nearest rows, by cosine, that are among the ten nearest still.
        loss: Nats per token on the text, or `None` without one.
        loss_change: What was added to it.
    """

    to: str
    bytes: int
    file_bytes: int
    share: float
    row_error: float
    neighbors: float | None
    loss: float | None
    loss_change: float | None


def compare_compression(
    table: TokenTable | nn.Embedding,
    choices: Sequence[str] | Mapping[str, TokenTable] = CHOICES,
    *,
    counts: Shaped[Tensor, " V"] | None = None,
    kept: int | None = None,
    loss: Loss | None = None,
) -> list[CompressionResult]:
    """A table beside its compressed kinds, one at a time in memory: first as it is, then in the order of `choices`.

    Args:
        table: A table of any kind.
        choices: Kinds as `compressed` names them, or tables by any name.
        counts: How often each token occurs. Low ranks are weighted by it, neighbours are asked of tokens that occur
            (1000, evenly spread over these; without counts over all), and trimming to these tokens is added as a row.
        kept: With counts: how many tokens a trim keeps, `len(used_tokens(tokenizer, corpus))`; by default those that
            occur, as many as are kept where there is no tokenizer.
        loss: The loss of a model around a given table, such as `loss_on_text(model, ids)`.

    Raises:
        SizeError: A choice is not possible, or a table has other sizes.

    Example:
        >>> rows = compare_compression(TokenEmbedding(1000, 64), ["int8", "rank=16"])
        >>> [(row.to, row.bytes, f"{row.row_error:.0%}") for row in rows]
        [('as it is', 256000, '0%'), ('int8', 72000, '1%'), ('rank=16', 68096, '82%')]
    """
    table = as_table(table)
    size, own = _bytes(table), None if loss is None else loss(table)
    rows = [CompressionResult("as it is", size, _file_bytes(table), 1.0, 0.0, 1.0, own, None if own is None else 0.0)]
    queries = _spread(table, counts)
    near = nearest_rows(table, queries, NEAREST).ids
    for to in choices:
        other = choices[to] if isinstance(choices, Mapping) else compress_table(table, to, counts=counts)
        lost = None if loss is None else loss(other)
        rows.append(
            CompressionResult(
                to,
                _bytes(other),
                _file_bytes(other),
                _bytes(other) / size,
                row_error(table, other),
                _overlap(near, nearest_rows(other, queries, NEAREST).ids),
                lost,
                None if lost is None or own is None else lost - own,
            )
        )
    if counts is not None:
        rows.append(_trimmed(table, rows[0], int((counts > 0).sum()) if kept is None else kept))
    return rows


@torch.no_grad()
def row_error(table: TokenTable, other: TokenTable) -> float:
    """`|E - E'| / |E|` in Frobenius norms, a block of rows at a time; 0 for a table of zeros.

    Raises:
        SizeError: The tables are of other sizes.
    """
    if (table.vocab_size, table.embed_dim) != (other.vocab_size, other.embed_dim):
        raise SizeError(
            f"A table of {other.vocab_size} x {other.embed_dim} cannot be compared with one of "
            f"{table.vocab_size} x {table.embed_dim}."
        )
    missed = whole = 0.0
    for start in range(0, table.vocab_size, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, table.vocab_size)
        rows = table.rows(start, stop).double()
        whole += rows.square().sum().item()
        missed += (rows - other.rows(start, stop)).square().sum().item()
    return math.sqrt(missed / whole) if whole else 0.0


def loss_on_text(model: DecoderLM, ids: Int[Tensor, " T"], *, length: int = 256) -> Loss:
    """The loss of `model` around a given table, in nats per token of a text.

    Args:
        model: Its own table is left alone.
        ids: The text's tokens.
        length: They are read in windows of so many, each from its beginning.

    Raises:
        SizeError: There are fewer than two tokens.
    """
    if len(ids) < 2:
        raise SizeError(f"A loss needs at least two tokens of text, not {len(ids)}.")
    starts = range(0, len(ids) - 1, length)
    batch = max(1, TOKENS_AT_ONCE // length)

    @torch.no_grad()
    def loss(table: TokenTable) -> float:
        around = replace_table(model, table).eval()
        total = 0.0
        windows = [ids[start : start + length + 1] for start in starts]
        whole = [window for window in windows if len(window) == length + 1]
        groups = [torch.stack(whole[place : place + batch]) for place in range(0, len(whole), batch)]
        groups += [window.unsqueeze(0) for window in windows[len(whole) :]]
        for group in groups:
            total += around.loss(group[:, :-1], group[:, 1:], reduction="sum").item()
        around.train(model.training)
        return total / (len(ids) - 1)

    return loss


def _overlap(near: Tensor, found: Tensor) -> float | None:
    """Share of `near` that is in `found`, query by query; `None` where there are no neighbours."""
    return (near.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean().item() if near.numel() else None


def _spread(table: TokenTable, counts: Tensor | None) -> Tensor:
    """Tokens to ask for neighbours, evenly spread over those that occur; zero rows have none."""
    tokens = torch.arange(table.vocab_size) if counts is None else (counts > 0).nonzero()[:, 0].cpu()
    tokens = tokens[tokens != (-1 if table.padding_idx is None else table.padding_idx)]
    places = torch.linspace(0, max(len(tokens) - 1, 0), min(QUERIES, len(tokens))).round().long()
    return tokens[places]


def _tensors(table: TokenTable) -> list[tuple[str, Tensor]]:
    return list(table.state_dict().items())


def _bytes(table: TokenTable) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors(table))


def _file_bytes(table: TokenTable) -> int:
    """Bytes of the safetensors file that `save_pretrained` writes: the tensors, and a header of JSON before them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in sorted(_tensors(table), key=lambda item: (-item[1].element_size(), item[0])):
        kind = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    return 8 + math.ceil(len(json.dumps(header, separators=(",", ":"))) / 8) * 8 + place


def _trimmed(table: TokenTable, whole: CompressionResult, kept: int) -> CompressionResult:
    """Return what a trim to `kept` tokens would leave; their rows are untouched."""
    header = whole.file_bytes - whole.bytes
    bytes_left = round(whole.bytes * kept / table.num_rows)
    return CompressionResult("trim", bytes_left, bytes_left + header, bytes_left / whole.bytes, 0.0, None, None, None)
