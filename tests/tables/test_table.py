"""What every table does, shown on one that knows only its rows."""

from collections.abc import Iterator

import pytest
import torch
from small_blocks import small_blocks

from embedlayer import TokenEmbedding, TokenIdError, TokenTable, linear_cross_entropy


class RowsOnly(TokenTable):
    """The least that a kind must say."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size, self.embed_dim = weight.shape
        self.num_rows, self.padding_idx, self.scale = self.vocab_size, None, None

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.weight[start:stop]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(tokens=4, table_rows=7):
        yield


def test_logits_and_loss_follow_from_the_rows_chunk_by_chunk() -> None:
    weight = torch.randn(23, 4, dtype=torch.float64)
    table, dense = RowsOnly(weight), TokenEmbedding.from_pretrained(weight)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    targets = torch.randint(0, 23, (2, 3))
    assert torch.allclose(table.logits(hidden), dense.logits(hidden), rtol=1e-14)
    assert torch.allclose(table.loss(hidden, targets), dense.loss(hidden, targets), rtol=1e-14)


def test_a_table_that_cannot_say_its_rows_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TokenTable()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "padding_idx": 9, "bias": True, "softcap": 3.0, "logit_scale": 0.5},
        {"label_smoothing": 0.1, "z_loss": 0.1, "padding_idx": 22},
        {"padding_idx": 8, "mask_padding": True, "reduction": "sum"},
    ],
)
def test_a_loss_by_blocks_of_rows_equals_the_plain_definition_with_its_gradients(options) -> None:
    weight = torch.randn(23, 4, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 7, 1], [21, -100, 13]])
    if options.get("bias"):
        options = {**options, "bias": torch.randn(23, dtype=torch.float64)}
    table = RowsOnly(weight)
    table.padding_idx = options.get("padding_idx")
    ours = table.loss(hidden, targets, **options)
    plain = linear_cross_entropy(hidden, weight, targets, impl="plain", **options)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    made = torch.autograd.grad(ours.sum(), (hidden, weight))
    torch.testing.assert_close(made, torch.autograd.grad(plain.sum(), (hidden, weight)), rtol=1e-11, atol=1e-12)


def test_a_loss_by_blocks_of_rows_names_a_target_outside_and_is_zero_where_nothing_counts() -> None:
    table = RowsOnly(torch.randn(23, 4))
    with pytest.raises(TokenIdError, match="token id 23 at row 0, column 1"):
        table.loss(torch.randn(2, 4), torch.tensor([1, 23]))
    assert table.loss(torch.randn(2, 4), torch.tensor([-100, -100])) == 0
    assert table.token_log_probs(torch.randn(0, 4), torch.zeros(0, dtype=torch.long)).shape == (0,)
