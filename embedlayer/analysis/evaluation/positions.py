"""The loss of a causal language model by the position of the predicted token, for texts beyond its trained length."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from embedlayer.analysis.evaluation.text import CausalModel, encode_text
from embedlayer.core.errors import SizeError, TextError
from embedlayer.losses.statistics import token_statistics_of
from embedlayer.models.causal import causal_logits, check_causal, evaluating

WINDOWS = 16


class PositionLoss(NamedTuple):
    """Mean loss at a range of positions.

    Attributes:
        start: First number of tokens before the predicted one.
        stop: End of the range, which is not in it.
        loss: Mean loss, in nats per token.
        tokens: Number of predicted tokens.
    """

    start: int
    stop: int
    loss: float
    tokens: int


@torch.no_grad()
def evaluate_positions(
    model: CausalModel, text: str | Path, window: int, trained: int, *, read: int | None = None
) -> list[PositionLoss]:
    """Measure the loss at ranges of positions: up to half of the trained length, up to it, up to twice it, and so on.

    The model reads at most 16 windows, at equal distances in the text, each from position 0, so that every position
    has the same number of predicted tokens.

    Args:
        model: The model, with its tokenizer.
        text: The text, or the path of a UTF-8 file.
        window: Tokens of a window; those of a text that is shorter.
        trained: Trained length of the model, in tokens.
        read: Tokens that the model reads of each window, where it has no more positions; `None` for the window.

    Raises:
        TextError: The text is not UTF-8, is empty, or has a single token.
        FileError: The file cannot be read.
        PositionError: The model has fewer positions.
        CheckpointError: The model is no causal language model.
        TokenizerError: There is no tokenizer, or it has IDs outside the table.

    Example:
        >>> losses = evaluate_positions(CausalModel(model, tokenizer), "the cat sat on the mat . " * 20, 64, trained=16)
        >>> [(each.start, each.stop) for each in losses]
        [(0, 8), (8, 16), (16, 32), (32, 64)]
    """
    if window < 2 or trained < 2:
        raise SizeError(f"window and trained must be at least 2, not {window} and {trained}.")
    encoded = encode_text(model, text)
    window = min(window, encoded.predicted)
    if window < 2:
        raise TextError("The text has a single token: pass a longer one.")
    read = window if read is None else min(read, window)
    check_causal(model.model, encoded.ids)
    last = encoded.predicted - window
    starts = torch.linspace(0, last, min(WINDOWS, last // window + 1)).long().tolist()
    sums = torch.zeros(read, dtype=torch.float64)
    with evaluating(model.model):
        for start in starts:
            inputs, targets = (encoded.ids[start + shift : start + shift + read].clone() for shift in (0, 1))
            if model.start_id is not None:
                inputs[0] = model.start_id
            logits = causal_logits(model.model, inputs[None].to(model.device))
            log_probs = token_statistics_of(logits, targets[None].to(model.device)).log_probs
            assert log_probs is not None
            sums -= log_probs[0].cpu().double()
    bounds, end = [0, trained // 2], trained
    while end < read:
        bounds, end = [*bounds, end], 2 * end
    bounds = [*(each for each in bounds if each < read), read]
    counts = [(first, end, (end - first) * len(starts)) for first, end in pairwise(bounds)]
    return [PositionLoss(first, end, float(sums[first:end].sum()) / count, count) for first, end, count in counts]
