"""Arguments of `torch.nn.Embedding` that a `TokenEmbedding` accepts under another name, or refuses."""

import operator
from typing import TypedDict

from embedlayer.core.errors import SizeError


class EmbeddingArguments(TypedDict, total=False):
    """Arguments of `torch.nn.Embedding` that `TokenEmbedding` also accepts, under torch's names.

    `padding_idx`, `device` and `dtype` have the same names in both libraries.

    Attributes:
        num_embeddings: Torch's name of `vocab_size`.
        embedding_dim: Torch's name of `embed_dim`.
        max_norm: Must be `None`, because look-ups never write to the weight.
        norm_type: Ignored, as in torch without `max_norm`.
        scale_grad_by_freq: Must be `False`.
        sparse: Must be `False`; a `RowSparseEmbedding` has sparse gradients.
        row_sparse: Must be `False`, as `sparse`.
    """

    num_embeddings: int
    embedding_dim: int
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    row_sparse: bool


UNSUPPORTED = {
    "max_norm": "is not supported: look-ups do not write. Call weight.data.renorm(2, 0, max_norm) after a step.",
    "scale_grad_by_freq": "is not supported: a row's gradient is the sum over its occurrences.",
    **dict.fromkeys(("sparse", "row_sparse"), "is a class here: RowSparseEmbedding(...), trained with RowAdamW."),
}
"""Arguments of `torch.nn.Embedding` that are refused if they are set, with the rest of the error message."""


def resolve_sizes(vocab_size: int | None, embed_dim: int | None, arguments: EmbeddingArguments) -> tuple[int, int]:
    """Return `(vocab_size, embed_dim)`, each from our argument or from torch's name for it in `arguments`."""
    refuse_unsupported(arguments)
    sizes = (vocab_size, arguments.get("num_embeddings")), (embed_dim, arguments.get("embedding_dim"))
    if any(pair.count(None) != 1 for pair in sizes):
        raise TypeError(f"TokenEmbedding needs vocab_size and embed_dim, each under one name; found {sizes}.")
    rows, width = (next(size for size in pair if size is not None) for pair in sizes)
    return operator.index(rows), operator.index(width)


def refuse_unsupported(arguments: EmbeddingArguments) -> None:
    """Check that `arguments` contain no option of `torch.nn.Embedding` that a `TokenEmbedding` does not support."""
    unknown = arguments.keys() - EmbeddingArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"TokenEmbedding has no argument {', '.join(sorted(unknown))}")
    for name, message in UNSUPPORTED.items():
        value = arguments.get(name)
        if value is not None and (value or name == "max_norm"):
            raise SizeError(f"{name}={value} {message}")
