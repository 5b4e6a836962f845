"""What a smaller table costs: bytes, error of the rows, nearest tokens that stay, and loss on text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from embedlayer.compress.convert import compressed, with_table
from embedlayer.errors import SizeError
from embedlayer.io.safetensors_files import encode_header
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.dense import as_table
from embedlayer.tables.table import ROWS_AT_ONCE, TokenTable

CHOICES = ("int8", "int4", "int4-g32")
QUERIES = 1000
NEAREST = 10
TOKENS_AT_ONCE = 4096

Loss = Callable[[TokenTable], float]


@dataclass(frozen=True)
class Comparison:
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


def compare(
    table: TokenTable | nn.Embedding,
    choices: Sequence[str] | Mapping[str, TokenTable] = CHOICES,
    *,
    counts: Shaped[Tensor, " V"] | None = None,
    kept: int | None = None,
    loss: Loss | None = None,
) -> list[Comparison]:
    """A table beside its compressed kinds, one at a time in memory: first as it is, then in the order of `choices`.

    Args:
        table: A table of any kind.
        choices: Kinds as `compressed` names them, or tables by any name.
        counts: How often each token occurs. Low ranks are weighted by it, neighbours are asked of tokens that occur
            (1000, evenly spread over these; without counts over all), and trimming to these tokens is added as a row.
        kept: With counts: how many tokens a trim keeps, `len(used_tokens(tokenizer, corpus))`; by default those that
            occur, as many as are kept where there is no tokenizer.
        loss: The loss of a model around a given table, such as `loss_on(model, ids)`.

    Raises:
        SizeError: A choice is not possible, or a table has other sizes.

    Example:
        >>> rows = compare(TokenEmbedding(1000, 64), ["int8", "rank=16"])
        >>> [(row.to, row.bytes, f"{row.row_error:.0%}") for row in rows]
        [('as it is', 256000, '0%'), ('int8', 72000, '1%'), ('rank=16', 68096, '82%')]
    """
    table = as_table(table)
    size, own = _bytes(table), None if loss is None else loss(table)
    rows = [Comparison("as it is", size, _file_bytes(table), 1.0, 0.0, 1.0, own, None if own is None else 0.0)]
    queries = _spread(table, counts)
    near = nearest(table, queries)
    for to in choices:
        other = choices[to] if isinstance(choices, Mapping) else compressed(table, to, counts=counts)
        lost = None if loss is None else loss(other)
        rows.append(
            Comparison(
                to,
                _bytes(other),
                _file_bytes(other),
                _bytes(other) / size,
                row_error(table, other),
                _overlap(near, nearest(other, queries)),
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


@torch.no_grad()
def nearest(table: TokenTable, queries: Int[Tensor, " Q"], count: int = NEAREST) -> Int[Tensor, "Q k"]:
    """The rows nearest to those of `queries`, by cosine, nearest first and without themselves; fewer in a small table.

    A block of rows at a time: nothing of size `Q x V` is made.
    """
    count = min(count, table.vocab_size - 1)
    asked = F.normalize(torch.cat([table.rows(q, q + 1) for q in queries.tolist()]).float(), dim=1)
    best = asked.new_empty(len(queries), 0)
    ids = queries.new_empty(len(queries), 0)
    for start in range(0, table.vocab_size, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, table.vocab_size)
        cosines = asked @ F.normalize(table.rows(start, stop).float(), dim=1).T
        places = torch.arange(start, stop, device=ids.device).expand(len(queries), -1)
        cosines.masked_fill_(places == queries.unsqueeze(1), -torch.inf)
        best, ids = torch.cat([best, cosines], dim=1), torch.cat([ids, places], dim=1)
        best, chosen = best.topk(min(count, best.shape[1]), dim=1)
        ids = ids.gather(1, chosen)
    return ids


def loss_on(model: DecoderLM, ids: Int[Tensor, " T"], *, length: int = 256) -> Loss:
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
        around = with_table(model, table).eval()
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
    return tokens[places].to(table.rows(0, 1).device)


def _tensors(table: TokenTable) -> list[tuple[str, Tensor]]:
    return list(table.state_dict().items())


def _bytes(table: TokenTable) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors(table))


def _file_bytes(table: TokenTable) -> int:
    """Bytes of the safetensors file that `save_pretrained` writes: the tensors, and a header of JSON before them."""
    tensors = sorted(_tensors(table), key=lambda item: (-item[1].element_size(), item[0]))
    entries = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors}
    return len(encode_header(entries, {"format": "pt"})) + _bytes(table)


def _trimmed(table: TokenTable, whole: Comparison, kept: int) -> Comparison:
    """Return what a trim to `kept` tokens would leave; their rows are untouched."""
    header = whole.file_bytes - whole.bytes
    bytes_left = round(whole.bytes * kept / table.num_rows)
    return Comparison("trim", bytes_left, bytes_left + header, bytes_left / whole.bytes, 0.0, None, None, None)
