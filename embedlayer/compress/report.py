"""Measure the cost of smaller tables: bytes, error of the rows, nearest neighbours kept, and loss on text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.text_evaluation import TOKENS_AT_ONCE, UNKNOWN_WINDOW, windows_of
from embedlayer.compress.convert import check_kind, compress_table, replace_table
from embedlayer.core.errors import SizeError
from embedlayer.io.safetensors_files import encode_header
from embedlayer.models.causal import causal_outputs, check_causal, evaluating, longest_sequence
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.conversions import as_table
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.table import TokenTable

CHOICES = ("int8", "int4", "int4-g32", "q8_0", "q4_0", "mlx-int4", "ct-int4-g32")
QUERIES = 1000
NEAREST = 10

Loss = Callable[[TokenTable], float]


@dataclass(frozen=True)
class CompressionResult:
    """The cost of one way to store a table, compared with the original table.

    Attributes:
        to: The kind, as in `compress_table`; `"as it is"` for the original, `"trim"` for removed rows.
        bytes: Bytes of the table in memory, scales included.
        file_bytes: Bytes of a safetensors file with the table alone.
        share: `bytes` divided by the bytes of the original.
        row_error: `|E - E'| / |E|` of the rows E of the original and the rows E' of this table, Frobenius norms.
        neighbors: Share of the ten nearest neighbours of a token in the original that are still among its ten nearest,
            from 0 to 1; `None` if no token has a neighbour, or for `"trim"`. Always 1 for the original.
        loss: What the function `loss` of `compare_compression` returns, such as nats per token on a text; `None`
            without such a function, or for `"trim"`.
        loss_change: `loss` minus that of the original; `None` where `loss` is `None`.
    """

    to: str
    bytes: int
    file_bytes: int
    share: float
    row_error: float
    neighbors: float | None
    loss: float | None
    loss_change: float | None


def choices_for(width: int) -> list[str]:
    """Return the kinds of `CHOICES` that suit rows of a width: more than one group, of other libraries whole groups."""
    choices = []
    for to in CHOICES:
        numbers = check_kind(to)
        own = 32 if "blocks" in numbers else numbers.get("group", 0)
        if width > own and width % numbers.get("mlx_group", numbers.get("ct_group", 1)) == 0:
            choices.append(to)
    return choices


def compare_compression(
    table: TokenTable | nn.Embedding,
    choices: Sequence[str] | Mapping[str, TokenTable] | None = None,
    *,
    counts: Shaped[Tensor, " V"] | None = None,
    kept: int | None = None,
    loss: Loss | None = None,
) -> list[CompressionResult]:
    """Measure a table and its compressed kinds, one at a time in memory.

    Args:
        table: A table of any kind.
        choices: Kinds as `compress_table` names them, or a mapping from any name to a table; `None` for those of
            `choices_for`.
        counts: Number of occurrences of each token, `(V,)`. They weight the error of low ranks, choose the tokens whose
            neighbours are compared (up to 1,000 tokens that occur), and add a result for a trim, which removes rows.
            `None`: all tokens count equally, and there is no trim.
        kept: With counts, the number of tokens that a trim keeps, such as `len(used_tokens(tokenizer, corpus))`; `None`
            for the tokens that occur.
        loss: Function from a table to the loss of a model with it, such as `loss_on_text(model, ids)`; `None` for no
            loss.

    Returns:
        The result of the original, then one for each of `choices` in their order, then with `counts` that of the trim.

    Raises:
        TokenIdError: `counts` is longer than the table.

    Example:
        >>> seeded = torch.manual_seed(0)
        >>> rows = compare_compression(TokenEmbedding(1000, 64), ["int8", "rank=16"])
        >>> [(row.to, row.bytes, f"{row.row_error:.1%}") for row in rows]
        [('as it is', 256000, '0.0%'), ('int8', 72000, '0.5%'), ('rank=16', 68096, '81.6%')]
    """
    table = as_table(table)
    size, own = _bytes(table), None if loss is None else loss(table)
    rows = [CompressionResult("as it is", size, _file_bytes(table), 1.0, 0.0, 1.0, own, None if own is None else 0.0)]
    queries = _spread(table, counts)
    near = nearest_rows(table, queries, NEAREST).ids
    for to in choices_for(table.embed_dim) if choices is None else choices:
        other = choices[to] if isinstance(choices, Mapping) else compress_table(table, to, counts=counts)
        lost = None if loss is None else loss(other)
        error = row_error(table, other)  # an error for a table of other sizes
        other_near = nearest_rows(other, queries, NEAREST).ids
        is_shared = (near.unsqueeze(2) == other_near.unsqueeze(1)).any(2)
        rows.append(
            CompressionResult(
                to,
                _bytes(other),
                _file_bytes(other),
                _bytes(other) / size,
                error,
                is_shared.float().mean().item() if near.numel() else None,
                lost,
                None if lost is None or own is None else lost - own,
            )
        )
    if counts is not None:
        left = round(size * (int((counts > 0).sum()) if kept is None else kept) / table.num_rows)
        file_size = left + rows[0].file_bytes - size  # the rows that remain do not change, so their error is 0
        rows.append(CompressionResult("trim", left, file_size, left / size, 0.0, None, None, None))
    return rows


@torch.no_grad()
def row_error(table: TokenTable, other: TokenTable) -> float:
    """Compute the relative error `|E - E'| / |E|` of the rows E' of `other` against the rows E of `table`.

    The norms are Frobenius norms over all tokens, without `scale`, computed a block of rows at a time. The result is 0
    if `table` has only zeros.
    """
    sizes, other_sizes = (table.vocab_size, table.embed_dim), (other.vocab_size, other.embed_dim)
    if sizes != other_sizes:
        raise SizeError(f"A table of {other_sizes} cannot be compared with one of {sizes}.")
    missed = whole = 0.0
    for start, chunk in RowReader(table).chunks():
        rows = chunk.double()
        whole += rows.square().sum().item()
        missed += (rows - other.rows(start, start + len(rows))).square().sum().item()
    return math.sqrt(missed / whole) if whole else 0.0


def loss_on_text(
    model: nn.Module,
    ids: Int[Tensor, " T"],
    *,
    window: int = UNKNOWN_WINDOW,
    stride: int | None = None,
    start_id: int | None = None,
) -> Loss:
    """Return a function from a table to the loss of `model` with that table, in nats per token of a text.

    It is the loss of `evaluate_text`, over the same windows. The function runs the model in evaluation mode, without
    gradients, and restores its mode.

    Args:
        model: A `DecoderLM`, or a causal language model of transformers after `patch`; its own table is not changed.
        ids: Token IDs of the text, `(T,)`, after the start token if there is one.
        window: Tokens that the model reads at once, reduced to the longest sequence that it states and to `T - 1`.
        stride: Tokens from one window to the next, from 1 to `window`; `None` for half a window.
        start_id: Token with which every window starts; `None` for none.

    Raises:
        SizeError: The text has fewer than two tokens.
        CheckpointError: The model is no causal language model. The function that is returned raises the errors of
            `replace_table`.
    """
    if len(ids) < 2:
        raise SizeError(f"The loss needs a text of at least 2 tokens; found {len(ids)}.")
    check_causal(model, ids)
    device, window = next(model.parameters()).device, min(window, longest_sequence(model) or window, len(ids) - 1)
    stride = max(1, window // 2) if stride is None else min(stride, window)

    @torch.no_grad()
    def loss(table: TokenTable) -> float:
        around, total = replace_table(model, table), 0.0
        # transformers' head of a table that is not dense computes all logits of a batch
        has_logits = not (isinstance(model, DecoderLM) or isinstance(table, DenseTable))
        with evaluating(around):
            for inputs, targets in windows_of(ids, window, stride, start_id, window if has_logits else TOKENS_AT_ONCE):
                _, loss_of = causal_outputs(around, inputs.to(device))
                total += float(loss_of(targets.to(device), reduction="none").double().sum())
        return total / (len(ids) - 1)

    return loss


def _spread(table: TokenTable, counts: Tensor | None) -> Tensor:
    """Return up to `QUERIES` token IDs whose nearest neighbours are compared, evenly spread over the vocabulary."""
    tokens = torch.arange(table.vocab_size) if counts is None else (counts > 0).nonzero()[:, 0].cpu()
    padding = table.padding_idx
    if padding is not None and not table.rows(padding, padding + 1).any():
        tokens = tokens[tokens != padding]
    places = torch.linspace(0, max(len(tokens) - 1, 0), min(QUERIES, len(tokens))).round().long()
    return tokens[places]


def _bytes(table: TokenTable) -> int:
    """Return the number of bytes that the tensors of a table take in memory."""
    return sum(tensor.nbytes for tensor in table.state_dict().values())


def _file_bytes(table: TokenTable) -> int:
    """Return the size in bytes of the safetensors file of a table, as `save_pretrained` writes it: header and data."""
    tensors = sorted(table.state_dict().items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors}
    return len(encode_header(entries, {"format": "pt"})) + _bytes(table)
