"""Axial learned positions: the row of a position is the concatenation of a row and a column of a grid (Reformer)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.initialization import init_normal_
from embedlayer.core.shapes import Positions
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.positions.position import AdditivePosition


class AxialPositionalEmbedding(AdditivePosition):
    """Learned positions on a grid of A rows and B columns: `vector(p) = [rows[p // B], columns[p % B]]`.

    The two tables have `A + B` rows together, where `LearnedPositionalEmbedding` has `A * B`.

    Args:
        grid: Number of rows A and of columns B; the longest sequence is `A * B`.
        widths: Widths of the vectors of a row and of a column; their sum is the width of the model, D.
        init_std: Standard deviation of the normal initialisation.

    Example:
        >>> position = AxialPositionalEmbedding((4, 8), (6, 10))
        >>> position(torch.tensor([0, 31])).shape
        torch.Size([2, 16])

    Reference: Kitaev et al., Reformer: the efficient transformer, 2020;
    transformers/models/reformer/modeling_reformer.py (`AxialPositionEmbeddings`).
    """

    def __init__(self, grid: Sequence[int], widths: Sequence[int], *, init_std: float = 0.02) -> None:
        super().__init__()
        self.grid, self.widths = list(grid), list(widths)
        (rows, columns), (row_width, column_width) = grid, widths
        self.init_std = init_std
        self.max_seq_len, self.embed_dim = rows * columns, row_width + column_width
        self.rows = nn.Parameter(torch.empty(rows, 1, row_width))
        self.columns = nn.Parameter(torch.empty(1, columns, column_width))
        self.index_check = IndexCheck(self.max_seq_len, "position")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both tables again, in place, from N(0, init_std²)."""
        init_normal_(self.rows, std=self.init_std)
        init_normal_(self.columns, std=self.init_std)

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """Return the vector of each position.

        Raises:
            PositionError: On the CPU, a position is outside `0 .. max_seq_len - 1`. On an accelerator its vector is
                zero, and the next `index_check.check()` raises the error.
        """
        index, outside = self.index_check(positions)
        columns = self.grid[1]
        row = F.embedding(index // columns, self.rows[:, 0])
        vectors = torch.cat([row, F.embedding(index % columns, self.columns[0])], dim=-1)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)
