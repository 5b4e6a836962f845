"""The embedding layer from scratch: NumPy, one-hot matrices, gradients written by hand.

A look-up is a matrix product. Write each ID as a row of zeros with a single 1, and

    out = one_hot @ W              (..., T, V) @ (V, D) -> (..., T, D)

picks rows of W. The gradient is then that of any matrix product, summed over all tokens:

    dL/dW = one_hot^T @ dL/dout    (V, tokens) @ (tokens, D) -> (V, D)

so a row without an ID in the batch gets no gradient. Everything else here repeats these two lines: positions are a
table indexed by position, a factorised table is a product of two, and a tied head multiplies by the same table.

It is slow and takes `tokens x V` memory on purpose: the rest of the library is tested against it. Numbers keep the
float dtype of the weights. New weights come from NumPy's global generator, so `np.random.seed` fixes them.
"""

import math
from typing import Literal

import numpy as np
from jaxtyping import Float, Integer

from embedlayer.core.errors import PositionError, ShapeError, SizeError, TokenIdError

IGNORED_TARGET = -100
"""Value of targets that are left out of the loss, as in torch."""


def one_hot(ids: Integer[np.ndarray, "*batch T"], vocab_size: int) -> Float[np.ndarray, "*batch T V"]:
    """Return a row of zeros for each ID, with a 1 in the column of that ID.

    Args:
        ids: Integers in `0..vocab_size - 1`.
        vocab_size: Number of columns, V.

    Raises:
        TokenIdError: An ID is not an integer or is outside the table.

    Example:
        >>> one_hot(np.array([2, 0]), 3)
        array([[0., 0., 1.],
               [1., 0., 0.]])
    """
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TokenIdError(f"token IDs are integers; found an array of {ids.dtype}. Convert it: ids.astype(np.int64).")
    bad = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(bad):
        *rows_before, column = map(int, bad[0])
        where = f"row {', '.join(map(str, rows_before))}, column {column}" if rows_before else f"column {column}"
        table = f"this table of {vocab_size} rows (0..{vocab_size - 1})"
        raise TokenIdError(f"token id {ids[tuple(bad[0])]} at {where} is outside {table}.")
    rows: np.ndarray = np.zeros((*ids.shape, vocab_size))
    np.put_along_axis(rows, ids[..., None].astype(np.int64), 1.0, axis=-1)
    return rows


class ScratchEmbedding:
    """A table with one row of W per token: `out = scale * one_hot @ W`.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        padding_idx: Row that is zero in a new table and gets no gradient; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        W: The table, `(V, D)`, which is copied; by default drawn from N(0, 0.02^2).

    Example:
        >>> emb = ScratchEmbedding(10, 4)
        >>> np.array_equal(emb(np.array([[3, 7, 1]]))[0, 0], emb.W[3])
        True
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        W: Float[np.ndarray, "V D"] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.padding_idx = padding_idx
        self.scale = _scale(scale, embed_dim)
        self.W = _weights(W, 0.02, vocab_size=vocab_size, embed_dim=embed_dim)
        _clear_padding(self.W, padding_idx, is_new=W is None)
        self._last_one_hot: Float[np.ndarray, "*batch T V"] | None = None

    def __call__(self, token_ids: Integer[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T D"]:
        """Return the scaled rows of `token_ids`, `scale * one_hot @ W`, and keep the one-hot rows for a backward pass.

        Raises:
            TokenIdError: An ID is not an integer or is outside the table.
        """
        self._last_one_hot = one_hot(token_ids, self.vocab_size).astype(self.W.dtype)
        out: np.ndarray = self.scale * (self._last_one_hot @ self.W)
        return out


class ScratchEmbeddingWithGrad(ScratchEmbedding):
    """`ScratchEmbedding` with its backward pass: `dL/dW = scale * one_hot^T @ dL/dout`.

    The arguments are those of `ScratchEmbedding`. The attribute `grad_W` is the gradient that the last call of
    `backward` computed, and `None` before the first call.

    Example:
        >>> emb = ScratchEmbeddingWithGrad(10, 4)
        >>> grad_W = emb.backward(np.ones_like(emb.forward(np.array([[3, 7, 1]]))))
        >>> np.flatnonzero(grad_W.any(axis=1))
        array([1, 3, 7])
    """

    grad_W: Float[np.ndarray, "V D"] | None = None

    def forward(self, token_ids: Integer[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T D"]:
        """Return the scaled rows of `token_ids`, and keep their one-hot rows for `backward`."""
        return self(token_ids)

    def backward(self, grad_output: Float[np.ndarray, "*batch T D"]) -> Float[np.ndarray, "V D"]:
        """Return the gradient of the table W for the last `forward`, and store it as `grad_W`.

        The row of `padding_idx` is zero. An earlier gradient is replaced, not added to.

        Args:
            grad_output: Gradient of the loss with respect to the output of `forward`.
        """
        self.grad_W = self.scale * _table_gradient(self._last_one_hot, grad_output)
        _clear_padding(self.grad_W, self.padding_idx)
        return self.grad_W


class ScratchFactorizedEmbedding:
    """A factorised table, `W = E1 E2`, with `V * R + R * D` numbers instead of `V * D`.

    The chain rule through the product gives both gradients from that of W:

        dL/dE1 = dL/dW @ E2^T        dL/dE2 = E1^T @ dL/dW

    Args:
        vocab_size: Rows of E1, V.
        embed_dim: Columns of E2, D.
        rank: Columns of E1 and rows of E2, R.
        padding_idx: Row of E1 that is zero in a new table and gets no gradient; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        E1: First factor, `(V, R)`, which is copied; by default drawn from N(0, 0.02^2).
        E2: Second factor, `(R, D)`, which is copied; by default drawn from N(0, 1/R), so that the entries of W have
            standard deviation 0.02.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        rank: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        E1: Float[np.ndarray, "V R"] | None = None,
        E2: Float[np.ndarray, "R D"] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.rank = rank
        self.padding_idx = padding_idx
        self.scale = _scale(scale, embed_dim)
        self.E1 = _weights(E1, 0.02, vocab_size=vocab_size, rank=rank)
        self.E2 = _weights(E2, rank**-0.5, rank=rank, embed_dim=embed_dim)
        _clear_padding(self.E1, padding_idx, is_new=E1 is None)
        self.grad_E1: Float[np.ndarray, "V R"] | None = None
        self.grad_E2: Float[np.ndarray, "R D"] | None = None
        self._last_one_hot: Float[np.ndarray, "*batch T V"] | None = None

    @property
    def W(self) -> Float[np.ndarray, "V D"]:
        """Return the whole table, the product `E1 @ E2`, computed at each access."""
        table: np.ndarray = self.E1 @ self.E2
        return table

    def forward(self, token_ids: Integer[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T D"]:
        """Return the scaled rows of `token_ids`, `scale * one_hot @ E1 @ E2`.

        The one-hot rows are kept for `backward`. Errors are those of `one_hot`.
        """
        self._last_one_hot = one_hot(token_ids, self.vocab_size).astype(self.E1.dtype)
        out: np.ndarray = self.scale * (self._last_one_hot @ self.E1 @ self.E2)
        return out

    __call__ = forward

    def backward(
        self, grad_output: Float[np.ndarray, "*batch T D"]
    ) -> tuple[Float[np.ndarray, "V R"], Float[np.ndarray, "R D"]]:
        """Return the gradients of the factors E1 and E2 for the last `forward`, in this order.

        They are also stored as `grad_E1` and `grad_E2`.

        Args:
            grad_output: Gradient of the loss with respect to the output of `forward`.
        """
        return self.split_gradient(self.scale * _table_gradient(self._last_one_hot, grad_output))

    def split_gradient(
        self, grad_W: Float[np.ndarray, "V D"]
    ) -> tuple[Float[np.ndarray, "V R"], Float[np.ndarray, "R D"]]:
        """Return the gradients of the factors E1 and E2, in this order, from the gradient of their product W.

        They are also stored as `grad_E1` and `grad_E2`. `backward` calls this method; call it yourself with the
        gradient of W that a tied head computed.

        Args:
            grad_W: Gradient of the loss with respect to W.
        """
        self.grad_E1, self.grad_E2 = grad_W @ self.E2.T, self.E1.T @ grad_W
        _clear_padding(self.grad_E1, self.padding_idx)
        return self.grad_E1, self.grad_E2


class ScratchPositionEmbedding:
    """A table with one row of W per position, looked up like a table of tokens.

    Args:
        max_seq_len: Rows of the table, T_max: the longest sequence.
        embed_dim: Width of a row, D.
        W: The table, which is copied; by default drawn from N(0, 0.02^2). `scratch_sinusoidal` returns a fixed one.

    Example:
        >>> pos = ScratchPositionEmbedding(32, 8)
        >>> np.array_equal(pos(5), pos.W[:5])
        True
    """

    def __init__(self, max_seq_len: int, embed_dim: int, *, W: Float[np.ndarray, "T_max D"] | None = None) -> None:
        self.max_seq_len = max_seq_len
        self.embed_dim = embed_dim
        self.W = _weights(W, 0.02, max_seq_len=max_seq_len, embed_dim=embed_dim)
        self.grad_W: Float[np.ndarray, "T_max D"] | None = None
        self._last_one_hot: Float[np.ndarray, "*rows T T_max"] | None = None

    def __call__(self, seq_len: int | Integer[np.ndarray, "*rows T"]) -> Float[np.ndarray, "*rows T D"]:
        """Return the rows of positions `0..seq_len - 1`, or of the positions in `seq_len` if it is an array.

        The one-hot rows are kept for `backward`.

        Raises:
            PositionError: A position is outside the table.
            TokenIdError: The array does not hold integers.
        """
        positions = np.arange(seq_len) if isinstance(seq_len, int) else seq_len
        if positions.size and not 0 <= positions.min() <= positions.max() < self.max_seq_len:
            found = f"positions {positions.min()}..{positions.max()}"
            raise PositionError(f"{found} do not fit a table of {self.max_seq_len} (0..{self.max_seq_len - 1}).")
        self._last_one_hot = one_hot(positions, self.max_seq_len).astype(self.W.dtype)
        rows: np.ndarray = self._last_one_hot @ self.W
        return rows

    def backward(self, grad_output: Float[np.ndarray, "*batch T D"]) -> Float[np.ndarray, "T_max D"]:
        """Return the gradient of the table W for the last call, summed over the batch, and store it as `grad_W`.

        Args:
            grad_output: Gradient of the loss with respect to the rows that the last call returned. It may have further
                batch dimensions in front if the rows were added to a batch.
        """
        self.grad_W = _table_gradient(self._last_one_hot, grad_output)
        return self.grad_W


class ScratchCombinedEmbedding:
    """The sum of token and position embeddings: `out = token_emb(ids) + pos_emb(T)`.

    Both terms of a sum get the same gradient. The gradient of the positions is summed over the batch.

    Args:
        vocab_size: Rows of the token table, V.
        embed_dim: Width of both tables, D.
        max_seq_len: Rows of the position table, T_max.
        padding_idx: As in `ScratchEmbedding`.
        scale: As in `ScratchEmbedding`; positions are not scaled.
        token_W: The token table, which is copied; drawn at random if `None`.
        position_W: The position table, which is copied; drawn at random if `None`.

    Example:
        >>> combined = ScratchCombinedEmbedding(100, 8, 32)
        >>> combined(np.array([[42, 42, 42, 42]])).shape
        (1, 4, 8)
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        max_seq_len: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        token_W: Float[np.ndarray, "V D"] | None = None,
        position_W: Float[np.ndarray, "T_max D"] | None = None,
    ) -> None:
        self.token_emb = ScratchEmbeddingWithGrad(
            vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, W=token_W
        )
        self.pos_emb = ScratchPositionEmbedding(max_seq_len, embed_dim, W=position_W)

    def forward(
        self,
        token_ids: Integer[np.ndarray, "*batch T"],
        positions: Integer[np.ndarray, "*rows T"] | None = None,
    ) -> Float[np.ndarray, "*batch T D"]:
        """Return the sum of the token rows and the position rows.

        Args:
            token_ids: Token IDs.
            positions: Position of each token; `0..T - 1` in each sequence if `None`.

        Raises:
            TokenIdError: An ID is not an integer or is outside the token table.
            PositionError: A position is outside the position table.
        """
        places = self.pos_emb(token_ids.shape[-1] if positions is None else positions)
        out: np.ndarray = self.token_emb(token_ids) + places
        return out

    __call__ = forward

    def backward(
        self, grad_output: Float[np.ndarray, "*batch T D"]
    ) -> tuple[Float[np.ndarray, "V D"], Float[np.ndarray, "T_max D"]]:
        """Return the gradients of the token table and of the position table for the last `forward`, in this order.

        Args:
            grad_output: Gradient of the loss with respect to the output of `forward`.
        """
        return self.token_emb.backward(grad_output), self.pos_emb.backward(grad_output)


class ScratchTiedHead:
    """A tied LM head: `logits = hidden @ W^T`, and the cross entropy of the next token.

    With p = softmax(logits) and N targets other than -100, in nats per token:

        L = -mean(log p[target])
        dL/dlogits = (p - one_hot(target)) / N
        dL/dhidden = dL/dlogits @ W
        dL/dW      = dL/dlogits^T @ hidden

    The scale of the table is not applied. The padding row is multiplied as every row and gets no gradient.

    Args:
        table: The table, kept by reference, so the head uses its current rows.
    """

    def __init__(self, table: ScratchEmbedding | ScratchFactorizedEmbedding) -> None:
        self.table = table
        self.grad_W: Float[np.ndarray, "V D"] | None = None
        self._last_hidden: Float[np.ndarray, "N D"] | None = None
        self._last_grad_logits: Float[np.ndarray, "*batch T V"] | None = None

    def logits(self, hidden: Float[np.ndarray, "*batch T D"]) -> Float[np.ndarray, "*batch T V"]:
        """Return the logit of each token of the vocabulary: `hidden @ W^T`."""
        logits: np.ndarray = hidden @ self.table.W.T
        return logits

    __call__ = logits

    def loss(self, hidden: Float[np.ndarray, "*batch T D"], targets: Integer[np.ndarray, "*batch T"]) -> float:
        """Return the mean cross entropy in nats over the targets that are not -100; 0 if all are.

        What `backward` needs is kept.

        Args:
            hidden: Hidden states.
            targets: ID of the correct token for each hidden state; -100 leaves a hidden state out.

        Raises:
            TokenIdError: A target is not an integer, or is outside the table and not -100.
        """
        counted = targets != IGNORED_TARGET
        log_p = log_softmax(self.logits(hidden))
        targets_hot = one_hot(np.where(counted, targets, 0), self.table.vocab_size) * counted[..., None]
        total = max(int(counted.sum()), 1)
        self._last_hidden = hidden.reshape(-1, hidden.shape[-1])
        self._last_grad_logits = ((np.exp(log_p) * counted[..., None] - targets_hot) / total).astype(hidden.dtype)
        return float(-(log_p * targets_hot).sum() / total)

    def backward(self) -> tuple[Float[np.ndarray, "*batch T D"], Float[np.ndarray, "V D"]]:
        """Return the gradients of the last `loss` with respect to `hidden` and to the table W, in this order.

        The second is also stored as `grad_W`. For a factorised table, pass it to `split_gradient` of the table to get
        the gradients of the factors.
        """
        if self._last_grad_logits is None or self._last_hidden is None:
            raise ShapeError("backward needs the result of a forward pass: call loss first.")
        self.grad_W = self._last_grad_logits.reshape(-1, self.table.vocab_size).T @ self._last_hidden
        _clear_padding(self.grad_W, self.table.padding_idx)
        return self._last_grad_logits @ self.table.W, self.grad_W


def scratch_sinusoidal(max_seq_len: int, embed_dim: int, *, base: float = 10000.0) -> Float[np.ndarray, "T D"]:
    """Return sinusoidal positions: `PE[t, 2i] = sin(t / base^(2i/D))`, `PE[t, 2i + 1] = cos(t / base^(2i/D))`.

    With an odd width the last column is a sine without a cosine.

    Args:
        max_seq_len: Number of rows, one for each position.
        embed_dim: Width, D.
        base: The longest wavelength is `2 pi base^(1 - 2/D)` positions, for an even D.

    Reference:
        Vaswani et al. 2017, section 3.5.
    """
    columns = np.arange(embed_dim)
    angles = np.arange(max_seq_len)[:, None] / base ** (columns // 2 * 2 / embed_dim)
    return np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))


def log_softmax(logits: Float[np.ndarray, "*batch V"]) -> Float[np.ndarray, "*batch V"]:
    """Return the logarithm of the softmax over the last dimension: `logits - log(sum(exp(logits)))`.

    The largest logit is subtracted first, so nothing overflows.
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_p


def cosine_similarity(rows: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N N"]:
    """Return the cosine similarity of every two rows, `(N, N)`; 0 for rows of zeros."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms == 0, 1, norms)
    cosines: np.ndarray = unit @ unit.T
    return cosines


def _table_gradient(
    one_hot: Float[np.ndarray, "*rows T V"] | None, grad_output: Float[np.ndarray, "*batch T D"]
) -> Float[np.ndarray, "V D"]:
    """Return the gradient of a table, `one_hot^T @ grad_output`, summed over all tokens.

    `one_hot` are the one-hot rows of the last look-up, or `None` if there was none. If `grad_output` has further batch
    dimensions in front, the same one-hot rows apply to each element of the batch.
    """
    if one_hot is None:
        raise ShapeError("backward needs the result of a forward pass: call the layer first.")
    *tokens, embed_dim = grad_output.shape
    each = np.broadcast_to(one_hot, (*tokens, one_hot.shape[-1]))
    grad_W: np.ndarray = each.reshape(-1, one_hot.shape[-1]).T @ grad_output.reshape(-1, embed_dim)
    return grad_W


def _weights(weights: Float[np.ndarray, "..."] | None, std: float, **sizes: int) -> Float[np.ndarray, "..."]:
    """Return a copy of `weights`, or new weights drawn from N(0, std^2).

    `sizes` are the name and the length of each dimension, in order.
    """
    shape = tuple(sizes.values())
    if weights is None:
        return np.random.standard_normal(shape) * std
    if weights.shape != shape:
        raise SizeError(f"weights have shape {weights.shape}; needed is ({', '.join(sizes)}) = {shape}.")
    return weights.copy()


def _scale(scale: float | Literal["sqrt_dim"] | None, embed_dim: int) -> float:
    """Return the scale as a number: 1 for `None`, sqrt(D) for `"sqrt_dim"`."""
    if scale is None:
        return 1.0
    return math.sqrt(embed_dim) if scale == "sqrt_dim" else scale


def _clear_padding(rows: Float[np.ndarray, "V D"], padding_idx: int | None, *, is_new: bool = True) -> None:
    """Set the padding row of new rows to zero in place; without effect on others, and if `padding_idx` is `None`."""
    if is_new and padding_idx is not None:
        rows[padding_idx] = 0
