"""Packed equals separate: documents in one row have the numbers that each has alone, for every kind."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from covering import covering, looped, some
from decoders import CACHES, small
from kinds import (
    EMBED_DIM,
    INJECTIONS,
    LOOKUP_TABLES,
    MAX_SEQ_LEN,
    POSITIONS,
    TABLES,
    TIED_HEADS,
    UNTIED_HEADS,
    VOCAB_SIZE,
)
from small_blocks import small_blocks
from torch import Tensor

import embedlayer as el
from embedlayer.core.documents import shifted_targets
from embedlayer.positions.position import AdditivePosition

DOCUMENTS = torch.tensor([
    [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 0],
    [1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    [0, 2, 2, 2, 2, 7, 7, 7, 7, 7, 7, 7, 0, 0],
])  # fmt: skip
"""Padding at both ends, documents of one token, numbers with gaps."""

IDS = torch.randint(1, VOCAB_SIZE, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))


def each_document() -> Iterator[tuple[int, Tensor]]:
    """The row and the places of each document."""
    for row, mask in enumerate(DOCUMENTS):
        for number in mask.unique():
            if number:
                yield row, (mask == number).nonzero().flatten()


PRODUCTS = {"factorised": 1e-6, "delta over factorised": 1e-6}
"""Kinds with a matrix product, whose last bits depend on how many tokens are multiplied at once."""


def check(packed: Tensor, alone: Any, **errors: float) -> None:
    """Compare `(B, T, ...)` of packed documents with what a function of IDs `(1, t)` gives for each document."""
    assert sum(len(places) == 1 for _, places in each_document()) == 4
    for row, places in each_document():
        torch.testing.assert_close(
            packed[row, places], alone(IDS[None, row, places])[0], **{"rtol": 0, "atol": 0, **errors}
        )


@looped("name", POSITIONS)
def test_an_input_embedding_with_positions_has_the_same_bits(name) -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.0, position=POSITIONS[name]())
    check(layer(IDS, attention_mask=DOCUMENTS), layer)
    *_, last = layer.trace(IDS, attention_mask=DOCUMENTS)
    check(last.vectors, lambda ids: [*layer.trace(ids)][-1].vectors)


@looped("name", LOOKUP_TABLES)
def test_an_input_embedding_over_a_table_has_the_same_bits(name) -> None:
    table, position = LOOKUP_TABLES[name](), POSITIONS["learned"]()
    assert isinstance(position, AdditivePosition)
    error = PRODUCTS.get(name, 0.0)
    packed = position.add(table(IDS), el.positions_of(IDS, DOCUMENTS))
    check(packed, lambda ids: position.add(table(ids), torch.arange(ids.shape[1])), rtol=error, atol=error)


@looped("name", [name for name, build in POSITIONS.items() if build().hook == "rotate"])
def test_rotated_queries_and_keys_have_the_same_bits(name) -> None:
    position, q = POSITIONS[name](), torch.randn(*IDS.shape, 4, EMBED_DIM // 4).transpose(1, 2)
    packed = position.rotate(q, q, el.positions_of(IDS, DOCUMENTS))
    for row, places in each_document():
        own = q[row : row + 1, :, places]
        for found, expected in zip(packed, position.rotate(own, own, torch.arange(len(places))), strict=True):
            assert torch.equal(found[row, :, places], expected[0])


def decoder(position: str, table: str, head: str, injection: str) -> el.DecoderLM:
    torch.manual_seed(0)
    rows = TABLES[table]()
    untied = UNTIED_HEADS[head]() if head in UNTIED_HEADS else None
    return small(position, table=rows, head=untied, injections=[INJECTIONS[injection]()])


FEW_POSITIONS = ["learned", "axial", "rotary", "rotary, query scaling", "query-scaled", "alibi", "relative"]
FEW_TABLES = ["dense, spare rows", "factorised", "int8", "int4, groups", "stored, FP8", "delta over int8", "of a user"]
"""One for each way through a decoder: the laws above have all of them."""
OTHERS = [["tied", *UNTIED_HEADS], INJECTIONS, [False, True], [torch.float32, torch.float64]]
DECODERS = [*product(POSITIONS, TIED_HEADS.values(), *OTHERS)]


@looped(
    "position, table, head, injection, in_blocks, dtype",
    some(covering(product(FEW_POSITIONS, FEW_TABLES, *OTHERS)), DECODERS),
)
def test_a_decoder_and_its_loss_are_those_of_separate_documents(
    position, table, head, injection, in_blocks, dtype
) -> None:
    model = decoder(position, table, head, injection).to(dtype)
    exact = all(p.dtype == dtype for p in model.parameters()) and model.table(IDS).dtype == dtype
    error = 1e-12 if dtype == torch.float64 and exact else 1e-5
    with small_blocks(attention_scores=200 if in_blocks else None):
        packed = model.hidden(IDS, attention_mask=DOCUMENTS)
    check(packed, model.hidden, rtol=error, atol=error)
    losses = [
        model.loss(IDS[None, row, at[:-1]], IDS[None, row, at[1:]], reduction="sum") for row, at in each_document()
    ]
    targets = shifted_targets(IDS, DOCUMENTS)
    assert int((targets != -100).sum()) == sum(len(at) - 1 for _, at in each_document())
    packed = model.loss(IDS[:, :-1], targets, attention_mask=DOCUMENTS[:, :-1], reduction="sum")
    torch.testing.assert_close(packed, torch.stack(losses).sum(), rtol=error, atol=error)
    output = model(input_ids=IDS, labels=IDS, attention_mask=DOCUMENTS)
    torch.testing.assert_close(output.loss, packed / (targets != -100).sum(), rtol=error, atol=error)


@looped("position, kind", some(covering(product(FEW_POSITIONS, CACHES)), product(POSITIONS, CACHES)))
def test_a_decoder_with_a_cache_has_the_numbers_of_separate_documents(position, kind) -> None:
    model = small(position).double()
    at, cache, parts = el.positions_of(IDS, DOCUMENTS), CACHES[kind](), []
    with torch.no_grad():
        for tokens in torch.arange(IDS.shape[1]).split(5):
            parts.append(
                model.hidden(IDS[:, tokens], attention_mask=DOCUMENTS[:, tokens], positions=at[:, tokens], cache=cache)
            )
        check(torch.cat(parts, 1), model.hidden, rtol=1e-12, atol=1e-12)
