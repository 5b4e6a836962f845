"""A tour of the embedding layer in seven results, computed with the classes of `lessons.scratch`."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

from embedlayer.core.formatting import format_bytes
from embedlayer.lessons.scratch import (
    ScratchCombinedEmbedding,
    ScratchEmbedding,
    ScratchTiedHead,
    cosine_similarity,
    scratch_sinusoidal,
)


@dataclass(frozen=True, eq=False)
class EmbeddingTour:
    """The results of `demonstrate_embeddings`, for T tokens.

    Args:
        token_ids: Token IDs, `(T,)`; the last one equals the first.
        looked_up: The rows of these tokens, read by index.
        product: The same rows, computed as `one_hot @ W`.
        grad_rows: Whether each row of the table got a gradient, `(V,)`.
        repeated: Vectors of one token at T positions, with learned positions added; they all differ.
        similarity: Cosine similarity of every two sinusoidal positions.
        order: A new order of the tokens: element i is the old place of the token that is now at place i.
        scores: Attention scores of every two tokens, without positions.
        reordered_scores: Scores of the tokens in the new order: the same numbers, permuted.
        uniform_loss: Loss of a uniform prediction, ln V, in nats.
        first_loss: Loss of an untrained tied head with rows from N(0, 0.02^2): near ln V.
        wide_first_loss: The same loss with rows from N(0, 1), the initialisation of `nn.Embedding`. It is far larger,
            because the head predicts that each token repeats itself.
        tied_parameters: Number of parameters of a table with a tied head.
        untied_parameters: Number of parameters of a table with an untied head, twice as many.
        table_bytes: Bytes of one table in fp32.
    """

    token_ids: Integer[np.ndarray, "T"]
    looked_up: Float[np.ndarray, "T D"]
    product: Float[np.ndarray, "T D"]
    grad_rows: Bool[np.ndarray, "V"]
    repeated: Float[np.ndarray, "T D"]
    similarity: Float[np.ndarray, "T T"]
    order: Integer[np.ndarray, "T"]
    scores: Float[np.ndarray, "T T"]
    reordered_scores: Float[np.ndarray, "T T"]
    uniform_loss: float
    first_loss: float
    wide_first_loss: float
    tied_parameters: int
    untied_parameters: int
    table_bytes: int

    def __str__(self) -> str:
        used = np.flatnonzero(self.grad_rows)
        permuted = np.allclose(self.reordered_scores, self.scores[np.ix_(self.order, self.order)])
        distinct = len(np.unique(self.repeated, axis=0))
        waves = " ".join(f"{cosine:.2f}" for cosine in self.similarity[0, :5])
        stops = {
            "A look-up is a product": f"one_hot @ W == W[ids]: {np.array_equal(self.looked_up, self.product)}",
            "Only rows in use learn": f"{len(used)} of {len(self.grad_rows)} got a gradient: {_few(used)}",
            "Same token, new place": f"token {self.token_ids[0]}, {len(self.repeated)} times: {distinct} vectors",
            "Sinusoids fade": f"cosine of 0 to 0, 1, ...: {waves}",
            "No positions, no order": f"scores of order {_few(self.order)} only permuted: {permuted}",
            "A tied head starts": f"at {self.first_loss:.2f} (ln V = {self.uniform_loss:.2f}); "
            f"from N(0, 1) at {self.wide_first_loss:.2f}",
            "Tying halves both ends": f"{self.untied_parameters:,} -> {self.tied_parameters:,} parameters; "
            f"one table is {format_bytes(self.table_bytes)}",
        }
        return "\n".join(f"{number}. {stop:23} {shown}" for number, (stop, shown) in enumerate(stops.items(), 1))


def demonstrate_embeddings(
    vocab_size: int = 100, embed_dim: int = 32, seq_len: int = 8, verbose: bool = True
) -> EmbeddingTour:
    """Demonstrate the layer on random tokens: look-up, gradient, positions, order, and the tied head.

    Tokens and tables are drawn from NumPy's global generator, so `np.random.seed` fixes the results.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        seq_len: Number of tokens, T.
        verbose: Whether to print the results, one line each.

    Returns:
        All results, as arrays and numbers.
    """
    combined = ScratchCombinedEmbedding(vocab_size, embed_dim, seq_len)
    table = combined.token_emb
    token_ids = np.random.randint(vocab_size, size=seq_len)
    token_ids[-1] = token_ids[0]

    product = table.forward(token_ids)
    grad_W = table.backward(np.ones_like(product))
    order = np.roll(np.arange(seq_len), 1)
    reordered = table(token_ids[order])
    tour = EmbeddingTour(
        token_ids=token_ids,
        looked_up=table.W[token_ids],
        product=product,
        grad_rows=np.count_nonzero(grad_W, axis=1) > 0,
        repeated=combined(np.full(seq_len, token_ids[0])),
        similarity=cosine_similarity(scratch_sinusoidal(seq_len, embed_dim)),
        order=order,
        scores=product @ product.T,
        reordered_scores=reordered @ reordered.T,
        uniform_loss=math.log(vocab_size),
        first_loss=_first_loss(token_ids, vocab_size, embed_dim, 0.02),
        wide_first_loss=_first_loss(token_ids, vocab_size, embed_dim, 1.0),
        tied_parameters=vocab_size * embed_dim,
        untied_parameters=2 * vocab_size * embed_dim,
        table_bytes=4 * vocab_size * embed_dim,
    )
    if verbose:
        print(tour)  # noqa: T201
    return tour


def _first_loss(token_ids: Integer[np.ndarray, "T"], vocab_size: int, embed_dim: int, std: float) -> float:
    """Return the loss in nats of an untrained tied head that predicts the next token.

    The table is drawn from N(0, std^2). The hidden state of each token is its own row, divided by `std`. The first
    token is the target of the last one.
    """
    table = ScratchEmbedding(vocab_size, embed_dim, W=np.random.standard_normal((vocab_size, embed_dim)) * std)
    return ScratchTiedHead(table).loss(table(token_ids) / std, np.roll(token_ids, -1))


def _few(numbers: Integer[np.ndarray, "N"]) -> str:
    """Return the first four numbers as text, separated by spaces, with "..." if there are more."""
    return " ".join(map(str, numbers[:4])) + (" ..." if len(numbers) > 4 else "")
