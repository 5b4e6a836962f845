"""Which modules of a live module belong to its vocabulary, and which refuse an edit."""

import pytest
import torch
from vocab_models import D, V, model

import embedlayer as el
from embedlayer.vocab.operations import add_tokens, edit_vocabulary
from embedlayer.vocab.targets.live import row_tensors
from embedlayer.vocab.targets.module_parts import vocabulary_modules


def test_each_kind_of_module_is_edited() -> None:
    table = el.TokenEmbedding(V, D)
    for made in (
        el.TransformerEmbedding(V, D, 16),
        el.lessons.GPTEmbedding(V, D, 16),
        el.OutputHead(table),
        el.OutputHead(vocab_size=V, embed_dim=D, bias=True),
        torch.nn.ModuleDict({"encoder": el.TokenEmbedding(V, D), "decoder": el.TokenEmbedding(V, D)}),
        el.EmbeddingLayer(table=table, head=el.OutputHead(table), types=el.TokenEmbedding(2, D), recipe=["types"]),
    ):
        ends = vocabulary_modules(made)
        receipt = add_tokens(made, 2)
        assert ends.vocab_size == V + 2
        assert {*receipt.live.before} == {*row_tensors(made, ends)[0]}
        assert all(name == "types.weight" or len(p) in (V + 2, 16, 2) for name, p in made.named_parameters())
        receipt.undo(made)
    assert table.vocab_size == V


def test_hashed_ngrams_of_other_libraries_are_refused() -> None:
    made = model()
    made.engram = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(9, 2)})
    with pytest.raises(el.VocabularyError, match=r"This model has hashed n-grams \(engram.embedding.weight\)"):
        edit_vocabulary(made, add=1)
