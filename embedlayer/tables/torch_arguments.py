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
        sparse: Must be `False`; for sparse gradients pass `row_sparse=True` instead.
    """

    num_embeddings: int
    embedding_dim: int
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


UNSUPPORTED = {
    "max_norm": "is not supported: a look-up would write to the weight, which a tied head reads.\n"
    "Clip the rows after optimizer.step(): table.weight.data.copy_(table.weight.data.renorm(2, 0, max_norm)), or keep "
    "torch.nn.Embedding.",
    "scale_grad_by_freq": "is not supported: a row's gradient is the sum over its occurrences, also through a tied "
    "head. Leave it out, or keep torch.nn.Embedding.",
    "sparse": "is written row_sparse=True here: TokenEmbedding(vocab_size, embed_dim, row_sparse=True), trained by "
    "RowAdamW, which gives dense AdamW's result from the looked-up rows.",
}
"""Arguments of `torch.nn.Embedding` that are refused if they are set, with the rest of the error message."""


def resolve_sizes(vocab_size: int | None, embed_dim: int | None, arguments: EmbeddingArguments) -> tuple[int, int]:
    """Return `(vocab_size, embed_dim)`, each from our argument or from torch's name for it in `arguments`."""
    refuse_unsupported(arguments)
    sizes = []
    for name, torch_name, value, other in (
        ("vocab_size", "num_embeddings", vocab_size, arguments.get("num_embeddings")),
        ("embed_dim", "embedding_dim", embed_dim, arguments.get("embedding_dim")),
    ):
        passed = [size for size in (value, other) if size is not None]
        if not passed:
            raise TypeError(f"missing 1 required positional argument: {name!r} (in torch: {torch_name!r})")
        if len(passed) > 1:
            raise TypeError(f"{name} was passed twice, also under torch's name {torch_name!r}: {passed}")
        sizes.append(operator.index(passed[0]))
    return sizes[0], sizes[1]


def refuse_unsupported(arguments: EmbeddingArguments) -> None:
    """Check that `arguments` contain no option of `torch.nn.Embedding` that a `TokenEmbedding` does not support."""
    unknown = arguments.keys() - EmbeddingArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"TokenEmbedding has no argument {', '.join(sorted(unknown))}")
    for name, message in UNSUPPORTED.items():
        value = arguments.get(name)
        if value is not None and (value or name == "max_norm"):
            raise SizeError(f"{name}={value} {message}")
