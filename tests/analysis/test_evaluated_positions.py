"""The loss by the position of the predicted token."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import embedlayer as el
from embedlayer.analysis import CausalModel, evaluate_positions

TEXT = "the cat sat on the mat and the dog sat on the log . " * 12


@pytest.fixture(scope="module")
def model() -> CausalModel:
    torch.manual_seed(0)
    tokenizer = el.train_tokenizer((), "byte")
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 16)
    return CausalModel(el.DecoderLM(table, "rotary", num_layers=1, num_heads=2), tokenizer)


def test_losses_are_the_means_over_windows_that_start_at_position_0(model) -> None:
    ids = torch.tensor(model.tokenizer.encode(TEXT).ids)
    found = evaluate_positions(model, TEXT, 40, trained=10)
    starts = torch.linspace(0, len(ids) - 1 - 40, (len(ids) - 1 - 40) // 40 + 1).long().tolist()[:16]
    assert len(starts) > 2
    each = []
    for start in starts:
        window = ids[start : start + 41]
        each.append(F.cross_entropy(model.model(window[None, :-1])[0].double(), window[1:], reduction="none"))
    expected = torch.stack(each).detach().mean(0)
    assert [(one.start, one.stop) for one in found] == [(0, 5), (5, 10), (10, 20), (20, 40)]
    for one in found:
        assert one.loss == pytest.approx(float(expected[one.start : one.stop].mean()), rel=1e-5)
        assert one.tokens == (one.stop - one.start) * len(starts)


@pytest.mark.parametrize(
    ("window", "trained", "read", "bounds"),
    [
        (40, 10, 10, [0, 5, 10]),
        (10, 40, None, [0, 10]),
        (48, 10, None, [0, 5, 10, 20, 40, 48]),
        (9, 9, None, [0, 4, 9]),
        (4, 3, None, [0, 1, 3, 4]),
        (4096, 700, None, [0, 350, 623]),  # the text ends there
    ],
)
def test_ranges_double_from_the_trained_length_and_end_with_the_window(model, window, trained, read, bounds) -> None:
    found = evaluate_positions(model, TEXT, window, trained, read=read)
    assert [(one.start, one.stop) for one in found] == list(pairwise(bounds))
