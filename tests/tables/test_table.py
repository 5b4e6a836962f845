"""What every table does, shown on one that knows only its rows."""

import pytest
import torch

from embedlayer import TokenEmbedding, TokenTable
from embedlayer.tables import table as module


class RowsOnly(TokenTable):
    """The least that a kind must say."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size, self.embed_dim = weight.shape
        self.num_rows, self.padding_idx, self.scale = self.vocab_size, None, None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.weight[start:stop]

    def check(self) -> None:
        pass


def test_logits_and_loss_follow_from_the_rows_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    weight = torch.randn(23, 4, dtype=torch.float64)
    table, dense = RowsOnly(weight), TokenEmbedding.from_pretrained(weight)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    targets = torch.randint(0, 23, (2, 3))
    assert torch.allclose(table.logits(hidden), dense.logits(hidden), rtol=1e-14)
    assert torch.allclose(table.loss(hidden, targets), dense.loss(hidden, targets), rtol=1e-14)


def test_a_table_that_cannot_say_its_rows_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TokenTable()
