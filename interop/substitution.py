"""What the tests build: the library's own classes, or ours where `EMBEDLAYER_INTEROP=ours`. A pytest plugin."""

import builtins
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn

import embedlayer as el

OURS = os.environ.get("EMBEDLAYER_INTEROP") == "ours"


def embedding(num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **options: Any) -> nn.Embedding:
    """An `nn.Embedding`, or a `TokenEmbedding` with the same initial values for the same seed."""
    if not OURS:
        return nn.Embedding(num_embeddings, embedding_dim, padding_idx, **options)
    if "_weight" in options:
        return el.TokenEmbedding.from_pretrained(options["_weight"], freeze=False, padding_idx=padding_idx)
    kind = el.RowSparseEmbedding if options.pop("row_sparse", False) else el.TokenEmbedding
    return kind(num_embeddings, embedding_dim, padding_idx=padding_idx, init_std=1.0, **options)


def head(in_features: int, out_features: int) -> nn.Linear:
    """An `nn.Linear` without bias, or an untied `OutputHead`."""
    if not OURS:
        return nn.Linear(in_features, out_features, bias=False)
    return el.OutputHead(vocab_size=out_features, embed_dim=in_features)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """`AdamW`, or `RowAdamW`."""
    return (el.RowAdamW if OURS else torch.optim.AdamW)(parameters, **options)


def patched(model: nn.Module) -> nn.Module:
    """The model as it is, or after `patch`."""
    return el.patch(model) if OURS else model


def vectors(path: str | Path, binary: bool = False, **options: Any) -> Any:
    """Gensim's vectors of a file, or a `TokenVectors` over the same file."""
    from gensim.models import KeyedVectors

    if not OURS:
        return KeyedVectors.load_word2vec_format(str(path), binary=binary, **options)
    names, rows = el.checkpoints.read_vectors(path)
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}))
    return el.analysis.TokenVectors(rows, words)


def pytest_configure() -> None:
    """Let the rewritten tests find ours; patch each transformers model at the end of its construction."""
    builtins.interop_embedding, builtins.interop_vectors = embedding, vectors  # type: ignore[attr-defined]
    if OURS and os.environ.get("EMBEDLAYER_INTEROP_LIBRARY") == "transformers":
        from transformers import PreTrainedModel

        original = PreTrainedModel.post_init

        def post_init(self: Any) -> None:
            original(self)  # type: ignore[no-untyped-call]
            if callable(getattr(self, "get_input_embeddings", None)):
                el.patch(self)

        PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
